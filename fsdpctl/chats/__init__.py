"""Conversations of others, made into tokens that have a loss and tokens that have none."""
