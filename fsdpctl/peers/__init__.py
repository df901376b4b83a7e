"""PyTorch's own engines, `fully_shard` and DistributedDataParallel, behind what training asks."""
