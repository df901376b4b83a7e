"""PyTorch's `fully_shard` and DistributedDataParallel, behind the interface that training uses."""
