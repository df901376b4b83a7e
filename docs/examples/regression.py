"""Your module in the trainer: a regression with two inputs, and targets that may be missing.

python docs/examples/regression.py train.steps=100
torchrun --nproc-per-node 2 docs/examples/regression.py strategy=shard_optimizer
"""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fsdpctl


class Model(nn.Module):
    """A network from two inputs to three numbers."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.place, self.time = nn.Linear(2, width), nn.Linear(1, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(depth))
        )
        self.head = nn.Linear(width, 3)

    def forward(self, inputs: Tensor, time: Tensor) -> Tensor:
        """Map (batch, 2) and (batch, 1) to (batch, 3)."""
        out: Tensor = self.head(self.blocks(self.place(inputs) + self.time(time)))
        return out


class Measurements(Dataset[dict[str, Tensor]]):
    """Measurements of a moving wave, a tenth of which is missing."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.place, self.time, missing = (
            torch.rand(count, size, generator=generator) for size in (2, 1, 3)
        )
        phase = 3 * (self.place.sum(1, keepdim=True) - self.time)
        self.value = torch.sin(phase + torch.arange(3)).masked_fill(missing < 0.1, torch.nan)

    def __len__(self) -> int:
        return len(self.time)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {name: getattr(self, name)[number] for name in ("place", "time", "value")}


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum over the known values, and their number."""
    is_known = ~batch["value"].isnan()
    error = model(batch["place"], batch["time"])[is_known] - batch["value"][is_known]
    return error.square().sum(), is_known.sum()


if __name__ == "__main__":
    torch.manual_seed(0)
    fsdpctl.train(
        module=Model(),
        loss=squared_error,
        data=Measurements(4000, seed=1),
        val_data=Measurements(400, seed=2),
        settings=[
            "train.steps=200",
            "train.global_batch_size=64",
            "train.eval_every=50",
            "optimizer.lr=1e-2",
            *sys.argv[1:],
        ],
    )
