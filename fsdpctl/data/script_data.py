"""A Dataset of a script as data: each sample counts as one token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpctl.data.packing import Sample, Samples

if TYPE_CHECKING:
    from torch import Tensor

    Returned = tuple[Tensor, int | Tensor]
    Loss = Callable[[Any, Any], Returned | tuple[*Returned, Mapping[str, float | Tensor]]]

_SAMPLE = Sample(np.zeros(1, np.int64), np.zeros(1, np.int64))


@dataclass(frozen=True)
class ScriptData(Samples):
    """The samples of a script in our order, what makes a batch of some, and its loss.

    `loss(module, batch)` returns a sum, and the count of what it averages over; also other sums by
    name, if it has some.
    """

    dataset: Any  # a map-style Dataset
    collate: Callable[[list[Any]], Any]
    loss: "Loss"
    seq_len = 1
    origin = "data"
    num_bytes = None  # there is no text
    empty_message = "data: expected at least one sample, got none"

    @property
    def fingerprint(self) -> str:
        """The number of samples: their content may differ from time to time."""
        return f"{len(self)} samples "

    def samples(self, seq_len: int) -> "ScriptData":
        return self

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Sample:
        return _SAMPLE

    def script_batch(self, numbers: Sequence[int]) -> "ScriptBatch":
        """Return a batch; a rank without a sample runs the first one, which is not counted."""
        samples = [self.dataset[number] for number in numbers or [0]]
        return ScriptBatch(self.collate(samples), self, is_counted=bool(numbers))


@dataclass(frozen=True, slots=True)
class ScriptBatch:
    """A batch of a script's samples."""

    value: Any
    data: ScriptData
    is_counted: bool
