"""Which engines are compared with each other."""

# Ours, and the engine of PyTorch's that keeps as much.
PAIRS = {
    "full_shard": "fsdp2",
    "shard_grad_op": "fsdp2_keeps",
    "shard_optimizer": "zero_redundancy_optimizer",
    "no_shard": "ddp",
}
