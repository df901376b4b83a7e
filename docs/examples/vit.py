"""Your module in the trainer: a small vision transformer that classifies images of shapes.

torchrun --nproc-per-node 2 docs/examples/vit.py
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import fsdpctl

SHAPES, SIDE, PATCH = 3, 24, 6  # disc, square, cross; pixels


class Images(Dataset[tuple[Tensor, int]]):
    """Noisy images of shapes, drawn when they are read."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.numbers[number])
        row, column = (torch.rand(2, generator=generator) * 8 + 8).tolist()
        down = (torch.arange(SIDE) - row).abs().unsqueeze(1).expand(SIDE, SIDE)
        right = (torch.arange(SIDE) - column).abs().expand(SIDE, SIDE)
        far, near = torch.maximum(down, right), torch.minimum(down, right)
        label = number % SHAPES
        image = (down**2 + right**2 < 36, far < 5, (near < 2) & (far < 7))[label].float()
        return image + 0.1 * torch.randn(SIDE, SIDE, generator=generator), label


class VisionTransformer(nn.Module):
    """A transformer from patches of an image to a score for each shape."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SHAPES)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, SIDE, SIDE) to (batch, SHAPES)."""
        x = self.patches(images.unsqueeze(1)).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x.mean(1)))
        return scores


def cross_entropy(
    model: nn.Module, batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return the sum over the images, their number, and how many were classified correctly."""
    images, labels = batch
    scores = model(images)
    correct = (scores.argmax(1) == labels).sum()
    return F.cross_entropy(scores, labels, reduction="sum"), len(labels), {"correct": correct}


if __name__ == "__main__":
    torch.manual_seed(0)
    fsdpctl.train(
        module=VisionTransformer(),
        loss=cross_entropy,
        data=Images(range(3000)),
        val_data=Images(range(3000, 3300)),
        settings=["train.steps=120", "optimizer.lr=1e-3", "train.eval_every=40", *sys.argv[1:]],
    )
