"""PyTorch's `fully_shard` and DistributedDataParallel, behind the interface of training."""
