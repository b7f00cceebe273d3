"""Maths that methods share."""
