"""Comparison of several configurations, measured or simulated."""
