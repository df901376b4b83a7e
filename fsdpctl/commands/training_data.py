"""`fsdpctl tokenize` writes token files; `fsdpctl data` shows the samples of a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.run_checkpoints import newest_checkpoint
from fsdpctl.commands.printing import say
from fsdpctl.config.model import NO_DECODER
from fsdpctl.data.data_set import DataSet
from fsdpctl.data.open_data import open_data
from fsdpctl.data.tokenizer import open_tokenizer
from fsdpctl.data.tokenizing import TokenOutput, tokenize_files
from fsdpctl.errors import UsageError
from fsdpctl.io.files import latest_run
from fsdpctl.io.run_files import CHECKPOINTS, LATEST, METRICS, RUNS
from fsdpctl.plan.batch_plan import context_groups
from fsdpctl.run.data_record import check_same_data, recorded_fingerprint
from fsdpctl.run.metrics import RejectedRecord, read_metrics


def tokenize(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Text, JSON Lines or Parquet: file, directory, glob."),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST.bin", help="Token file; its header is DST.json.")
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|DIR", help="Tokenizer: bytes, or a directory.")
    ] = "bytes",
    shard_tokens: Annotated[
        int | None,
        typer.Option(min=1 << 10, metavar="N", help="Tokens of each of the files DST-00000.bin …"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Tokenize text into token files.

    After an interruption, the same command continues.
    """
    if not source:
        raise UsageError("SRC: empty; expected a file, a directory or a glob")
    if destination.suffix != ".bin":
        raise UsageError(f"{destination}: expected a name that ends in .bin")
    output = TokenOutput(destination, shard_tokens)
    done = tokenize_files(source, output, open_tokenizer(tokenizer), overwrite=overwrite)
    location = str(destination)
    if shard_tokens is not None:
        location = f"{done.files:,} files {destination.stem}-*.bin"
    read = f"{done.tokens:,} tokens of {done.num_bytes:,} bytes of {done.about}"
    say(f"{location}: {read}", *done.notes)


def data(
    step: Annotated[int, typer.Option(min=1, help="Step, starting at 1.")],
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory (default: runs/latest).")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Show the samples of this rank only, if known.")
    ] = None,
) -> None:
    """Show the training samples of one step."""
    run = run or latest_run(Path(RUNS)) or Path(RUNS, LATEST)
    samples, rejected = samples_of_step(run, step)
    say(f"step {step}: {len(samples)} samples{rejected and '; '}{rejected}")
    for sample in samples:
        if rank is None or rank in sample.ranks:
            names = ", ".join(map(str, sample.ranks))
            of_ranks = f" (rank{'s' * (len(sample.ranks) > 1)} {names})" if names else ""
            say(f"--- sample {sample.number}{of_ranks}\n{sample.text}")


@dataclass(frozen=True, slots=True)
class StepSample:
    """A sample of a step."""

    number: int  # in the training data
    ranks: tuple[int, ...]  # that computed the sample; () if unknown
    text: str  # the decoded tokens, including the last target


def samples_of_step(run_dir: Path, step: int) -> tuple[list[StepSample], str]:
    """Return the samples of a step, and why the step was rejected, or an empty string.

    UsageError if the data has changed, or the run has not completed the step.
    """
    from fsdpctl.data.batches import Batches
    from fsdpctl.resolve.run_plan import stored_plan
    from fsdpctl.run.directory import read_config

    location = f"--run {run_dir}"
    if not (run_dir / METRICS).is_file():
        raise UsageError(f"{location}: not found; expected a run with at least one completed step")
    config = read_config(run_dir)
    if config.model.is_script_module:
        raise UsageError(f"{location}: {NO_DECODER}")
    data = open_data(config.data, config.train.seed)
    _check_data(run_dir, data)
    rejected, after = _find_step(run_dir / METRICS, step)
    if rejected is not None:
        rank: tuple[int, ...] = () if rejected.rank is None else (rejected.rank,)
        ranks, numbers = dict.fromkeys(rejected.rank_samples, rank), rejected.samples
    else:
        plan = stored_plan(config).batches
        rows = data.train.samples(config.train.seq_len)
        batches = Batches(rows, plan, config.train.seed, data.vocab_size)
        position = after - config.train.global_batch_size
        if position < 0:
            raise UsageError(f"{run_dir / METRICS}: corrupted: {after} samples after step {step}")
        numbers = batches.sample_indices(position)
        ranks = {
            each: tuple(group)
            for group in context_groups(plan.world_size, plan.context_parallel)
            for each in batches.sample_indices(position, group[0])
        }
    texts = zip(numbers, _texts(data, config.train.seq_len, numbers), strict=True)
    samples = [StepSample(n, ranks.get(n, ()), text) for n, text in texts]
    return samples, "" if rejected is None else _describe_rejection(rejected)


def _find_step(metrics: Path, step: int) -> tuple[RejectedRecord | None, int]:
    rejected, after, last = None, 0, 0
    for line in read_metrics(metrics):
        last = max(last, line.step)
        if line.step == step:
            rejected, after = line.rejected_step or rejected, line.samples or after
    if rejected is None and not after:
        raise UsageError(f"--step {step}: not found; {metrics.parent} has completed {last} steps")
    return rejected, after


def _describe_rejection(record: RejectedRecord) -> str:
    rank = "" if record.rank is None else f", on rank {record.rank}"
    threshold = "" if record.threshold is None else f", threshold {record.threshold:.6g}"
    values = f"loss {record.loss}, gradient norm {record.grad_norm}"
    return f"{record.reason}{rank}; {record.action}; {values}{threshold}"


def _check_data(run_dir: Path, data: DataSet) -> None:
    newest = newest_checkpoint(run_dir / CHECKPOINTS)
    if newest is None:
        return
    known = CheckpointReader(newest).manifest.progress.data_fingerprint
    check_same_data(run_dir, data, recorded_fingerprint(run_dir, known), f"--run {run_dir}")


def _texts(data: DataSet, seq_len: int, numbers: list[int]) -> Iterator[str]:
    rows = data.train.samples(seq_len)
    if outside := next((each for each in numbers if each >= len(rows)), None):
        raise UsageError(f"{METRICS}: corrupted: sample {outside} of {len(rows):,}")
    for number in numbers:
        documents = rows[number].documents()
        yield "\n".join(data.tokenizer.decode(each) for each in documents)
