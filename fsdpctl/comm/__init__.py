"""Collectives, process groups and the status of ranks: all that uses `torch.distributed`."""
