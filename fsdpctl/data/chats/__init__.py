"""Conversations as token sequences with a loss mask, rendered by chat templates."""
