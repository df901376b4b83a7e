"""Collectives, process groups, the status of ranks, and the shards of a rank."""
