"""The training samples of one step of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdpctl.checkpoint.folders import newest_checkpoint
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.data.batches import Batches
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.open import open_data
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import CHECKPOINTS, METRICS
from fsdpctl.plan.context import context_groups
from fsdpctl.resolve.settle import settle
from fsdpctl.run.directory import read_config
from fsdpctl.run.metrics import RejectedRecord, read_metrics


@dataclass(frozen=True, slots=True)
class StepSample:
    """A sample of a step."""

    number: int  # in the training data
    ranks: tuple[int, ...]  # that computed it; () if not known
    text: str  # the tokens and the last target, decoded


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of a step, and why it was rejected."""

    about: str  # why the step was rejected; empty if it was applied
    samples: list[StepSample]


def samples_of_step(run_dir: Path, step: int) -> StepSamples:
    """Return the samples of `step` of a run, whose data must not have changed."""
    if not (run_dir / METRICS).is_file():
        raise UsageError(
            f"--run {run_dir}: not found; expected a run with at least one completed step"
        )
    config = read_config(run_dir)
    data = open_data(config.data, config.train.seed)
    _check_data(run_dir, data)
    bad, after = _found(run_dir / METRICS, step)
    if bad is not None:
        of_rank = set(bad.rank_samples) if bad.rank is not None else ()
        ranks: dict[int, tuple[int, ...]] = {
            each: (int(bad.rank or 0),) for each in bad.samples if each in of_rank
        }
        numbers = bad.samples
    else:
        plan = settle(config).batches
        batches = Batches(
            data.train.rows(config.train.seq_len), plan, config.train.seed, data.vocab_size
        )
        position = after - config.train.global_batch_size
        if position < 0:
            raise UsageError(f"{run_dir / METRICS}: corrupted: {after} samples after step {step}")
        numbers = batches.numbers(position)
        ranks = {
            each: tuple(group)
            for group in context_groups(plan.world_size, plan.context_parallel)
            for each in batches.numbers(position, group[0])
        }
    texts = _texts(data, config.train.seq_len, numbers)
    samples = [
        StepSample(n, ranks.get(n, ()), text) for n, text in zip(numbers, texts, strict=True)
    ]
    return StepSamples("" if bad is None else _in_words(bad), samples)


def _found(metrics: Path, step: int) -> tuple[RejectedRecord | None, int]:
    """Return the record of a rejected step, or None, and the samples consumed after the step."""
    bad, after, last = None, 0, 0
    for line in read_metrics(metrics):
        last = max(last, line.step)
        if line.step == step:
            bad, after = line.rejected_step or bad, line.samples or after
    if bad is None and not after:
        raise UsageError(f"--step {step}: not found; {metrics.parent} has completed {last} steps")
    return bad, after


def _in_words(bad: RejectedRecord) -> str:
    rank = "" if bad.rank is None else f", on rank {bad.rank}"
    threshold = "" if bad.threshold is None else f", threshold {bad.threshold:.6g}"
    figures = f"loss {bad.loss}, gradient norm {bad.grad_norm}"
    return f"{bad.reason}{rank}; {bad.action}; {figures}{threshold}"


def _check_data(run_dir: Path, data: DataSet) -> None:
    newest = newest_checkpoint(run_dir / CHECKPOINTS)
    if newest is None:
        return
    known = CheckpointReader(newest).manifest.progress.data_fingerprint
    if known not in ("", data.fingerprint):
        raise UsageError(f"--run {run_dir}: the data has changed since the run")


def _texts(data: DataSet, seq_len: int, numbers: list[int]) -> Iterator[str]:
    rows = data.train.rows(seq_len)
    if outside := next((each for each in numbers if each >= len(rows)), None):
        raise UsageError(f"{METRICS}: corrupted: sample {outside} of {len(rows):,}")
    for number in numbers:
        documents = rows[number].documents()
        yield "\n".join(data.tokenizer.decode(each) for each in documents)
