"""Your own training loop: a convolutional network that classifies shapes.

    torchrun --nproc-per-node 2 docs/examples/conv_net.py full_shard
    torchrun --nproc-per-node 4 docs/examples/conv_net.py hybrid_shard --dp-shard-size 2
    python docs/examples/conv_net.py no_shard

Every strategy prints the same losses; the memory of a rank differs.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdpctl

SHAPES, SIDE = 3, 24  # disc, square, cross; pixels


class ResidualBlock(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`: (batch, channels, height, width)."""
        out: Tensor = x + self.second(F.relu(self.first(F.relu(self.norm(x)))))
        return out


class ConvNet(nn.Module):
    """A network from images to a score for each shape."""

    def __init__(self, channels: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(ResidualBlock(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, SHAPES)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 1, height, width) to (batch, SHAPES)."""
        features = self.blocks(self.stem(images)).mean(dim=(-1, -2))
        scores: Tensor = self.head(features)
        return scores


def make_batch(step: int, rank: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return noisy images of shapes, different for every step and rank."""
    generator = torch.Generator().manual_seed(step * 10_000 + rank)
    labels = torch.randint(SHAPES, (size,), generator=generator)
    centers = torch.rand(2, size, 1, 1, generator=generator) * 8 + 8
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    down, right = (rows - centers[0]).abs(), (columns - centers[1]).abs()
    disc, square = down**2 + right**2 < 36, torch.maximum(down, right) < 5
    cross = (torch.minimum(down, right) < 2) & (torch.maximum(down, right) < 7)
    pictures = torch.stack([disc, square, cross], dim=1).float()
    images = pictures[torch.arange(size), labels].unsqueeze(1)
    return images + 0.1 * torch.randn(images.shape, generator=generator), labels


def train(strategy: str, dp_shard_size: int | None, steps: int) -> None:
    """Train, save, load into a new model, and print the memory of a rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = fsdpctl.shard_model(ConvNet(), strategy=strategy, dp_shard_size=dp_shard_size)
    optimizer = fsdpctl.ShardedAdamW(model, lr=3e-3, weight_decay=0.01)
    accumulator = fsdpctl.GradAccumulator(model, steps=2, reduce="last")
    for step in range(steps):
        losses = []
        for half in range(2):
            images, labels = make_batch(2 * step + half, rank)
            with accumulator.micro_step():
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
            losses.append(loss.detach())
        fsdpctl.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = model.collectives.all_reduce(torch.stack(losses).mean()) / model.collectives.size
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:3d}  loss {mean:.6f}", flush=True)

    folder = Path(model.collectives.all_gather_values(tempfile.mkdtemp())[0])  # rank 0's
    fsdpctl.save_checkpoint(folder / "last", model, optimizer, extra={"step": steps})
    again = fsdpctl.shard_model(ConvNet(), strategy="full_shard")  # any strategy can read it
    fsdpctl.load_checkpoint(folder / "last", again, fsdpctl.ShardedAdamW(again))
    images, labels = make_batch(steps, rank=999, size=256)
    with torch.no_grad():
        right = (again(images).argmax(-1) == labels).float().mean()
    if rank == 0:
        print(
            f"{strategy}: {right:.0%} of new images correct; a rank stores "
            f"{model.shard_memory_bytes():,} of {model.replicated_memory_bytes():,} bytes of "
            f"master weights and {optimizer.memory_bytes():,} bytes of optimizer states"
        )


def main() -> None:
    """Join the other ranks, if torchrun started some, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", nargs="?", default="full_shard")
    parser.add_argument("--dp-shard-size", type=int)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(args.strategy, args.dp_shard_size, args.steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
