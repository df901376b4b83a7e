"""Two runs side by side: losses, configurations, and the newest checkpoints of one step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.folders import complete_checkpoints, step_folder, step_of
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.model_path import CHECKPOINTS, RUN_CONFIG
from fsdpctl.config.recipe import read_recipe
from fsdpctl.errors import UsageError
from fsdpctl.tools.series import FIGURES, Series, compared, read_figures
from fsdpctl.tools.tensors import CheckpointDifference, compare_checkpoints

_WHERE = ("train.run_dir",)  # of the run, nothing that it does
# Of bytes that will be read: a context in which they are counted.
Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Words:
    """A key of the configuration that differs; None where it is not set."""

    key: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """How two runs differ."""

    a: Path
    b: Path
    series: dict[str, Series]  # by figure
    configuration: tuple[Words, ...]
    checkpoint: CheckpointDifference | None  # None: there are none of the same step
    has_checkpoints: bool  # whether either run has any

    @property
    def differences(self) -> list[str]:
        """What of losses and tensors is not equal, a clause each; configurations do not count."""
        return [*_of_losses(self.series), *self._of_tensors()]

    def _of_tensors(self) -> Iterator[str]:
        found = self.checkpoint
        if found is None:
            if self.has_checkpoints:
                yield "no complete checkpoint of a step that both have"
            return
        if found.different:
            yield f"{len(found.different)} of {len(found.tensors)} tensors at step {found.step}"
        if missing := len(found.only_a) + len(found.only_b):
            yield f"{missing} tensors at step {found.step} that only one has"

    def to_dict(self) -> dict[str, Any]:
        """What `compare-runs --json` prints."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            **{name: each.to_dict() for name, each in self.series.items()},
            "configuration": [{"key": x.key, "a": x.a, "b": x.b} for x in self.configuration],
            "checkpoint": None if self.checkpoint is None else self.checkpoint.to_dict(),
            "equal": not self.differences,
            "differences": self.differences,
        }


def _of_losses(series: dict[str, Series]) -> Iterator[str]:
    loss, validation = series["loss"], series["val_loss"]
    if not loss.compared:
        yield "no step that both have done"
    for each in (loss, validation):
        if each.first is not None:
            values = " and ".join("not finite" if v is None else f"{v:.9g}" for v in
                                  (each.first.a, each.first.b))  # fmt: skip
            yield f"{each.name} from step {each.first.step} on ({values})"
    if loss.compared and loss.only_a + loss.only_b:
        yield f"{loss.only_a + loss.only_b} steps that only one has done"


def compare_runs(a: Path, b: Path, bar: Bar) -> TwoRuns:
    """How the runs in two directories differ.

    Args:
        a: one.
        b: another.
        bar: told how many bytes of checkpoints will be read, and then of those that were.

    Raises:
        UsageError: one is no run, or its metrics are damaged.
        CheckpointError: a checkpoint is damaged; names the file.
    """
    words = [_words(each) for each in (a, b)]
    figures = [read_figures(each) for each in (a, b)]
    steps = [{step_of(each) for each in complete_checkpoints(x / CHECKPOINTS)} for x in (a, b)]
    checkpoint = None
    if both := steps[0] & steps[1]:
        checkpoint = _compare_checkpoints(a, b, max(both), bar)
    return TwoRuns(
        a,
        b,
        {name: compared(name, figures[0][name], figures[1][name]) for name in FIGURES},
        tuple(
            Words(key, words[0].get(key), words[1].get(key))
            for key in sorted(words[0].keys() | words[1].keys())
            if key not in _WHERE and words[0].get(key) != words[1].get(key)
        ),
        checkpoint,
        any(steps),
    )


def _words(run_dir: Path) -> dict[str, str]:
    if not (run_dir / RUN_CONFIG).is_file():
        raise UsageError(f"{run_dir}: not a run of fsdpctl: it has no {RUN_CONFIG}")
    return dict(read_recipe(run_dir / RUN_CONFIG))


def _compare_checkpoints(a: Path, b: Path, step: int, bar: Bar) -> CheckpointDifference:
    readers = [CheckpointReader(step_folder(each / CHECKPOINTS, step)) for each in (a, b)]
    with bar(sum(reader.num_bytes for reader in readers)) as advance:
        return compare_checkpoints(readers[0], readers[1], advance)
