"""The length of samples, the size of a step, and the number of steps, as the data allows."""

import math
from dataclasses import replace

from fsdpctl.config.data import CHAT
from fsdpctl.config.schema import SIZES, Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.data_set import DataSet, contents_of
from fsdpctl.data.mixture import MixedRows
from fsdpctl.data.packing import DocumentSet, Rows
from fsdpctl.errors import UsageError
from fsdpctl.plan.batch import plan_batches
from fsdpctl.resolve.data import check_amount

_STEPS, _EPOCHS = 1000, 3  # of a run whose length is not set: on text, and on conversations
_WARMUP = "lr_scheduler.warmup_steps"
# If the size of a step is not set: steps of a run on conversations, and the fewest samples in one.
_WANTED, _FEWEST = 50, 4
_NOMINAL = 8  # samples per step, for the length of packed sequences


def with_length(config: Config, data: DataSet, automatic: frozenset[str]) -> Config:
    """Set the length of samples if it is `automatic`, at most the usual one.

    Text is as long as its shortest part. Conversations get sequences for the longest of them, and
    packed ones longer sequences, as far as enough steps are left. The number of ranks has no
    influence, so a run resumes on another number.

    Raises:
        UsageError: If the data is too little to train on, and the length is not set.
    """
    if "train.seq_len" not in automatic:
        return config
    parts = [data.train] if data.val is None else [data.train, data.val]
    contents = [each for part in parts for each in contents_of(part)]
    chats = [each for each in contents if isinstance(each, DocumentSet)]
    if chats:
        length = _rounded_up(max(int(part.lengths.max(initial=2)) for part in chats) - 1)
        if chats[0].packing.shares_rows:
            tokens = _epochs(config) * data.train.num_tokens / (_WANTED * _NOMINAL)
            length = max(length, _rounded_down(tokens))
        return _of_length(config, min(config.train.seq_len, length))
    check_amount(config, data)
    most = min(part.num_tokens for part in parts) - 1
    if config.train.seq_len <= most or most < 1:
        return config
    return _of_length(config, _rounded_down(most))


def with_size(config: Config, data: DataSet, automatic: frozenset[str]) -> Config:
    """Set the samples per step if they are `automatic`: the usual number.

    Of conversations, fewer if the run would otherwise have too few steps.
    """
    train = config.train
    if not automatic.issuperset(SIZES):
        return config
    size = train.global_batch_size
    if config.data.name == CHAT:
        count = len(data.train.rows(train.seq_len))
        wanted = _rounded_down(_epochs(config) * count / _WANTED)
        size = min(size, max(wanted, _FEWEST))
    config = replace(config, train=replace(train, global_batch_size=size))
    return with_enough_samples(config, automatic)


def with_enough_samples(config: Config, automatic: frozenset[str]) -> Config:
    """Raise the samples per step, if they are `automatic`, to what the ranks need."""
    train = config.train
    if not automatic.issuperset(SIZES):
        return config
    micro, passes = train.micro_batch_size or 1, config.accumulation.steps or 1
    size = max(train.global_batch_size, config.num_groups * micro * passes)
    return replace(config, train=replace(train, global_batch_size=size))


def total_steps(config: Config, data: DataSet) -> int:
    """Return the number of steps of a run; UsageError if there is too little data for one."""
    train = config.train
    plan = plan_batches(
        train.global_batch_size, config.num_ranks, context_parallel=train.context_parallel
    )
    rows = data.train.rows(train.seq_len)
    batches = Batches(rows, plan, train.seed, data.vocab_size)
    if data.val is not None:
        _check_validation(data, train.seq_len)
    epochs = math.ceil(_epochs(config) * batches.num_samples / plan.global_batch_size)
    if train.steps is not None:
        steps = train.steps if train.epochs is None else min(train.steps, epochs)
    elif train.tokens is not None:
        steps = math.ceil(train.tokens / (plan.global_batch_size * train.seq_len))
    elif train.epochs is None and config.data.name != CHAT:
        steps = _STEPS
    else:
        steps = epochs
    return _within(rows, max(1, steps), plan.global_batch_size, asked=train.steps is not None)


def _within(rows: Rows, steps: int, size: int, *, asked: bool) -> int:
    """Return the steps that a mixture has data for; UsageError if more were `asked` for."""
    length = rows.schedule.length if isinstance(rows, MixedRows) else None
    if length is None or steps * size <= length:
        return steps
    if asked or length < size:
        raise UsageError(
            f"train.steps={steps}: {length // size} steps of {size} samples are left until all "
            "sources have ended (epochs); give one without epochs, or fewer steps"
        )
    return length // size


def with_warmup(config: Config, automatic: frozenset[str]) -> Config:
    """Shorten a warmup that is `automatic` to a tenth of the steps on conversations."""
    given, train = config.lr_scheduler, config.train
    assert train.steps is not None
    most = given.warmup_steps  # None: a share
    if most is None or config.data.name != CHAT or _WARMUP not in automatic:
        return config
    steps = min(most, -(-train.steps // 10))
    return replace(config, lr_scheduler=replace(given, warmup_steps=steps))


def _of_length(config: Config, length: int) -> Config:
    return replace(config, train=replace(config.train, seq_len=length))


def _epochs(config: Config) -> float:
    return config.train.epochs or _EPOCHS


def _rounded_up(length: int) -> int:
    """Return the next power of two, at least 64."""
    return 1 << max(6, (length - 1).bit_length())


def _rounded_down(count: float) -> int:
    """Return the power of two below, at least 1."""
    return 1 << max(0, int(count).bit_length() - 1)


def _check_validation(data: DataSet, seq_len: int) -> None:
    assert data.val is not None
    if not len(data.val.rows(seq_len)):
        raise UsageError(
            f"train.seq_len={seq_len}: longer than the validation data, which has "
            f"{data.val.num_tokens} tokens; change data.val_fraction, or set it to 0 to skip "
            "validation"
        )
