"""What a run was trained on in one of its steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpctl.checkpoint.folders import newest_checkpoint
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.model_path import CHECKPOINTS
from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.open import open_data
from fsdpctl.data.rows import documents_of
from fsdpctl.data.tokens import DataSet
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch import plan_batches
from fsdpctl.resolve.machine import world_size
from fsdpctl.run.directory import METRICS, read_config
from fsdpctl.run.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a step."""

    number: int  # in the training data
    rank: int | None  # that had it, where that is known
    text: str  # its tokens and the last one's target, decoded


@dataclass(frozen=True, slots=True)
class StepSamples:
    """A step, and what is on record of it."""

    about: str  # why it was not applied; empty where it was
    samples: list[Sample]


def samples_of_step(run_dir: Path, step: int) -> StepSamples:
    """What the run in `run_dir` saw in `step`; the last time, if it went back and came by again.

    Raises:
        UsageError: there is no such run or step, or its data is not what it was.
    """
    if not (run_dir / METRICS).is_file():
        raise UsageError(f"--run {run_dir}: no run that has done a step")
    config = read_config(run_dir)
    data = open_data(config.data, config.train.seed)
    _check_data(run_dir, data)
    bad, after = _found(run_dir / METRICS, step)
    if bad is not None:
        of_rank = set(bad["rank_samples"])
        ranks = {each: bad["rank"] for each in bad["samples"] if each in of_rank}
        numbers = list(bad["samples"])
    else:
        batches = _batches(config, data)
        position = after - config.train.global_batch_size
        numbers = batches.numbers(position)
        plan = batches.plan
        ranks = {
            each: rank
            for rank in range(plan.world_size)
            for each in batches.numbers(position, rank)
        }
    texts = _texts(data, config.train.seq_len, numbers)
    samples = [Sample(n, ranks.get(n), text) for n, text in zip(numbers, texts, strict=True)]
    return StepSamples("" if bad is None else _in_words(bad), samples)


def _found(metrics: Path, step: int) -> tuple[dict[str, Any] | None, int]:
    """The record of a step that was not applied, if it was not; samples consumed after it."""
    bad, after, last = None, 0, 0
    for line in read_metrics(metrics):
        last = max(last, line.step)
        if line.step == step:
            bad, after = line.rejected_step or bad, line.samples or after
    if bad is None and not after:
        raise UsageError(f"--step {step}: {metrics.parent} has come to step {last}")
    return bad, after


def _in_words(bad: dict[str, Any]) -> str:
    rank = "" if bad["rank"] is None else f", on rank {bad['rank']}"
    threshold = "" if bad["threshold"] is None else f", threshold {bad['threshold']:.6g}"
    figures = f"loss {bad['loss']}, gradient norm {bad['grad_norm']}"
    return f"{bad['reason']}{rank}; {bad['action']}; {figures}{threshold}"


def _check_data(run_dir: Path, data: DataSet) -> None:
    newest = newest_checkpoint(run_dir / CHECKPOINTS)
    if newest is None:
        return
    known = CheckpointReader(newest).manifest.progress.data_fingerprint
    if known not in ("", data.fingerprint):
        raise UsageError(f"--run {run_dir}: its data is not what the run was trained on")


def _batches(config: Config, data: DataSet) -> Batches:
    train = config.train
    plan = plan_batches(
        train.global_batch_size,
        world_size(config),
        micro_batch_size=train.micro_batch_size,
        num_micro_batches=config.accumulation.steps,
    )
    return Batches(data.train.rows(train.seq_len), plan, train.seed, data.vocab_size)


def _texts(data: DataSet, seq_len: int, numbers: list[int]) -> Iterator[str]:
    rows = data.train.rows(seq_len)
    for number in numbers:
        documents = documents_of(rows[number])
        yield "\n".join(data.tokenizer.decode(each) for each in documents)
