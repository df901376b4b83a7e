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

    After an interruption, run the same command to continue.
    """
    if not source:
        raise UsageError("SRC: empty; expected a file, a directory or a glob")
    if destination.suffix != ".bin":
        raise UsageError(f"{destination}: expected a name that ends in .bin")
    output = TokenOutput(destination, shard_tokens)
    result = tokenize_files(source, output, open_tokenizer(tokenizer), overwrite=overwrite)
    location = str(destination)
    if shard_tokens is not None:
        location = f"{result.files:,} files {destination.stem}-*.bin"
    counts_text = f"{result.tokens:,} tokens of {result.num_bytes:,} bytes of {result.summary}"
    say(f"{location}: {counts_text}", *result.notes)


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
    samples, rejection = samples_of_step(run, step)
    say(f"step {step}: {len(samples)} samples" + (f"; {rejection}" if rejection else ""))
    for sample in samples:
        if rank is None or rank in sample.ranks:
            ranks_text = ", ".join(map(str, sample.ranks))
            of_ranks = f" (rank{'s' * (len(sample.ranks) > 1)} {ranks_text})" if ranks_text else ""
            say(f"--- sample {sample.index}{of_ranks}\n{sample.text}")


@dataclass(frozen=True, slots=True)
class StepSample:
    """A sample of a step."""

    index: int  # position in the training data
    ranks: tuple[int, ...]  # ranks that computed the sample; () if unknown
    text: str  # the decoded tokens, including the last target


def samples_of_step(run_dir: Path, step: int) -> tuple[list[StepSample], str]:
    """Return the samples of a step, and why the step was rejected, or an empty string.

    UsageError if the data has changed, or the run has not completed the step.
    """
    from fsdpctl.data.batches import Batches
    from fsdpctl.resolve.run_plan import stored_plan
    from fsdpctl.run.directory import read_config

    location, metrics = f"--run {run_dir}", run_dir / METRICS
    if not metrics.is_file():
        raise UsageError(f"{location}: not found; expected a run with at least one completed step")
    config = read_config(run_dir)
    if config.model.is_script_module:
        raise UsageError(f"{location}: {NO_DECODER}")
    data = open_data(config.data, config.train.seed)
    _check_unchanged(run_dir, data)
    rejected, samples_after = _find_step(metrics, step)
    if rejected is not None:
        # Only the samples of the failed rank are known.
        failed_rank: tuple[int, ...] = () if rejected.rank is None else (rejected.rank,)
        ranks, indices = dict.fromkeys(rejected.rank_samples, failed_rank), rejected.samples
    else:
        plan = stored_plan(config).batches
        rows = data.train.samples(config.train.seq_len)
        batches = Batches(rows, plan, config.train.seed, data.vocab_size)
        position = samples_after - config.train.global_batch_size
        if position < 0:
            raise UsageError(f"{metrics}: corrupted: {samples_after} samples by step {step}")
        indices = batches.sample_indices(position)
        ranks = {  # the ranks of a group share samples
            each: tuple(group)
            for group in context_groups(plan.world_size, plan.context_parallel)
            for each in batches.sample_indices(position, group[0])
        }
    texts = zip(indices, _texts(data, config.train.seq_len, indices), strict=True)
    samples = [StepSample(n, ranks.get(n, ()), text) for n, text in texts]
    return samples, "" if rejected is None else _describe_rejection(rejected)


def _find_step(metrics: Path, step: int) -> tuple[RejectedRecord | None, int]:
    rejected, samples_after, last = None, 0, 0
    for line in read_metrics(metrics):
        last = max(last, line.step)
        if line.step == step:
            rejected, samples_after = line.rejected_step or rejected, line.samples or samples_after
    if rejected is None and not samples_after:
        raise UsageError(f"--step {step}: not found; {metrics.parent} has completed {last} steps")
    return rejected, samples_after


def _describe_rejection(record: RejectedRecord) -> str:
    rank = "" if record.rank is None else f", on rank {record.rank}"
    threshold = "" if record.threshold is None else f", threshold {record.threshold:.6g}"
    values = f"loss {record.loss}, gradient norm {record.grad_norm}"
    return f"{record.reason}{rank}; {record.action}; {values}{threshold}"


def _check_unchanged(run_dir: Path, data: DataSet) -> None:
    if (newest := newest_checkpoint(run_dir / CHECKPOINTS)) is not None:
        saved = CheckpointReader(newest).manifest.progress.data_fingerprint
        check_same_data(run_dir, data, recorded_fingerprint(run_dir, saved), f"--run {run_dir}")


def _texts(data: DataSet, seq_len: int, indices: list[int]) -> Iterator[str]:
    rows = data.train.samples(seq_len)
    if excess := next((each for each in indices if each >= len(rows)), None):
        raise UsageError(f"{METRICS}: corrupted: sample {excess}; the data has {len(rows):,}")
    for index in indices:
        yield "\n".join(map(data.tokenizer.decode, rows[index].documents()))
