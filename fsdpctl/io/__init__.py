"""Bounded, safe reading of untrusted files, and text for terminals."""
