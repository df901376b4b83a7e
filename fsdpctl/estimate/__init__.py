"""Estimates and predictions of a configuration before it runs."""
