"""Bytes before a run, from the plan alone."""
