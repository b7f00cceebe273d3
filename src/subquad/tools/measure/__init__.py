"""Measurements: closeness to exact attention, time, memory."""
