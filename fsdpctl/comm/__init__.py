"""Collectives, process groups, the status of ranks, and what a rank holds of a unit."""
