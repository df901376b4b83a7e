"""Optimizers of flat shards, and gradient clipping."""
