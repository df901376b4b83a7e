"""Rows of files as conversations, and conversations as text, rendered by chat templates."""
