"""A Dataset of the user's script as data; each sample counts as one token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpctl.data.packing import Sample, Samples

if TYPE_CHECKING:
    from torch import Tensor

    Returned = tuple[Tensor, int | Tensor]
    Loss = Callable[[Any, Any], Returned | tuple[*Returned, Mapping[str, float | Tensor]]]

# A placeholder for every sample: training reads `script_batch` instead.
_SAMPLE = Sample(np.zeros(1, np.int64), np.zeros(1, np.int64))


@dataclass(frozen=True)
class ScriptData(Samples):
    """A map-style Dataset of a script with its collate function and its loss.

    fsdpctl decides the order of samples. `loss(module, batch)` returns a sum and the count to
    divide it by, and optionally a dict of further sums by name.
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
        """The number of samples; their content isn't included, since it may be random."""
        return f"{len(self)} samples "  # the fingerprint of the validation data follows

    def samples(self, seq_len: int) -> "ScriptData":
        return self

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Sample:
        return _SAMPLE

    def script_batch(self, numbers: Sequence[int]) -> "ScriptBatch":
        """Return a batch. A rank without samples gets the first sample, which is not counted."""
        samples = [self.dataset[number] for number in numbers or [0]]
        return ScriptBatch(self.collate(samples), self, is_counted=bool(numbers))


@dataclass(frozen=True, slots=True)
class ScriptBatch:
    """A batch of a script's samples."""

    value: Any
    data: ScriptData
    is_counted: bool
