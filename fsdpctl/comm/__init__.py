"""The only package that calls torch.distributed: process groups, collectives, streams."""
