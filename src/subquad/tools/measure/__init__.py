"""What to measure: closeness to exact attention, time, memory."""
