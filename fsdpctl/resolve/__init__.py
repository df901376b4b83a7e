"""Resolve a configuration on a machine."""
