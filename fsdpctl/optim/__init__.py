"""Optimizers of flat shards, gradient clipping and learning-rate schedules."""
