"""Values of `auto` that follow from others: a row per key, in the order in which they are known.

Note: a key is filled in where all that its row reads is known: on a machine or cluster, with the
data, with the model, or for a number of ranks. Except for the least samples of a step, the number
of ranks has no influence on values that decide the losses: a run resumes on another number. Keys
whose `auto` remains, such as `model.attention`, are read where they have a meaning.
"""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdpctl.config.data import CHAT
from fsdpctl.config.schema import SIZES, C, Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.data_set import DataSet, contents_of
from fsdpctl.data.packing import DocumentSet
from fsdpctl.errors import UsageError
from fsdpctl.models.quantized import count_weights
from fsdpctl.plan.batch import BatchPlan, plan_batches, tokens_per_rank
from fsdpctl.plan.optimizers import MATRICES, MUON
from fsdpctl.plan.precision import SPLIT
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.resolve.data import check_amount

_STEPS, _EPOCHS = 500, 3  # of a run whose length is not set: on text, and on conversations
# If the size of a step is not set: steps of a run on conversations, and the fewest samples in one.
_WANTED, _FEWEST = 50, 4
_NOMINAL = 8  # samples per step, for the length of packed sequences
_CHUNK_BYTES = 128 << 20  # of float32 logits
_LEAST_CHUNK_TOKENS = 1024
_MULTIPLE = 64  # of tokens in a chunk
_MOST_CHUNKS = 128  # each costs kernels, and time in every estimate
_CHUNKED = ("train.loss_chunk_tokens", "train.mlp_chunk_tokens")


class Facts(NamedTuple):
    """The facts that rows read besides the settings."""

    data: DataSet | None = None
    module: nn.Module | None = None
    batches: BatchPlan | None = None


Row = tuple[str, Callable[[Config, Facts], Any]]


def filled(
    config: C, rows: Iterable[Row], facts: Facts = Facts(), automatic: Collection[str] | None = None
) -> C:
    """Return the configuration with the value of each row whose key is `auto`.

    Those are the `automatic` ones; None: that have no value.
    """
    for key, value in rows:
        if config.value(key) is None if automatic is None else key in automatic:
            config = config.changed({key: value(config, facts)})
    return config


# ---- on a machine or cluster -------------------------------------------------------------------


def has_bf16() -> bool:
    """Return whether GPUs, those of this machine if it has any, compute in bf16 in hardware."""
    is_here = torch.cuda.is_available()
    return not is_here or torch.cuda.is_bf16_supported(including_emulation=False)


def _compute_dtype(c: Config, f: Facts) -> str:
    """bfloat16 on GPUs, except those that only emulate it and are many times slower with it."""
    on_gpu = c.launch.device == "cuda" and has_bf16()
    is_split = c.precision.master_dtype == SPLIT  # of which the bf16 half is gathered
    return "bfloat16" if on_gpu or is_split else "float32"


def _last_validation(c: Config, f: Facts) -> int:
    """All data, unless its loss is compared with those before."""
    return c.train.eval_batches if c.compares_losses else 0


OF_PLACE: tuple[Row, ...] = (
    ("precision.param_dtype", _compute_dtype),
    ("precision.reduce_dtype", lambda c, f: "float32"),
    ("precision.master_dtype", lambda c, f: "float32"),
    ("train.final_eval_batches", _last_validation),
    ("model.lora.alpha", lambda c, f: c.model.lora.rank and c.model.lora.used_alpha),
)


# ---- with the data -----------------------------------------------------------------------------


def _length(c: Config, f: Facts) -> int:
    """Samples of at most the usual length.

    Text is as long as its shortest part. Conversations get sequences for the longest of them, and
    packed ones longer sequences, as far as enough steps are left.
    """
    assert f.data is not None
    usual = c.train.seq_len
    parts = [f.data.train] if f.data.val is None else [f.data.train, f.data.val]
    contents = [each for part in parts for each in contents_of(part)]
    if chats := [each for each in contents if isinstance(each, DocumentSet)]:
        longest = max(int(part.lengths.max(initial=2)) for part in chats) - 1
        length = 1 << max(6, (longest - 1).bit_length())
        if chats[0].packing.shares_rows:
            tokens = _epochs(c) * f.data.train.num_tokens / (_WANTED * _NOMINAL)
            length = max(length, _rounded_down(tokens))
        return min(usual, length)
    check_amount(c, f.data)
    most = min(part.num_tokens for part in parts) - 1
    return usual if usual <= most or most < 1 else _rounded_down(most)


def _samples(c: Config, f: Facts) -> int:
    """The usual number, or what the tokens of a step hold; at least what the ranks need.

    Of conversations, fewer if the run would otherwise have too few steps.
    """
    if (tokens := c.train.global_batch_tokens) is not None:
        if tokens < c.train.seq_len:
            raise UsageError(
                f"train.global_batch_tokens={tokens}: fewer than the "
                f"train.seq_len={c.train.seq_len} of one sample"
            )
        return tokens // c.train.seq_len
    size = c.train.global_batch_size
    if c.data.name == CHAT and f.data is not None:
        wanted = _rounded_down(_epochs(c) * len(f.data.train.rows(c.train.seq_len)) / _WANTED)
        size = min(size, max(wanted, _FEWEST))
    micro, passes = c.train.micro_batch_size or 1, c.accumulation.steps or 1
    return max(size, c.num_groups * micro * passes)


OF_DATA: tuple[Row, ...] = (("train.seq_len", _length),)
OF_STEP: tuple[Row, ...] = ((SIZES[0], _samples),)


def _epochs(c: Config) -> float:
    return c.train.epochs or _EPOCHS


def _rounded_down(count: float) -> int:
    """Return the power of two below, at least 1."""
    return 1 << max(0, int(count).bit_length() - 1)


# ---- with the model ----------------------------------------------------------------------------


def _peak_rate(c: Config, f: Facts) -> float:
    """By the model's size, as the values published for Llama 3: 3e-4 at 8 B, 1.5e-4 at 70 B.

    Pretrained weights are usually trained with a tenth of it, and LoRA adapters with the full rate.
    """
    assert f.module is not None
    millions = sum(count_weights(f.module).values()) / 1e6
    tunes_all_weights = c.model.is_pretrained and c.model.lora.rank is None
    rate = (3e-4 if tunes_all_weights else 3e-3) / max(1.0, millions) ** 0.25
    return float(f"{rate:.2g}")


def _warmup(c: Config, f: Facts) -> int | None:
    """The usual steps, or a tenth of all if that is less."""
    usual, steps = c.lr_scheduler.warmup_steps, c.train.steps
    if usual is None or steps is None:  # a share
        return usual
    return min(usual, -(-steps // 10))


OF_MODEL: tuple[Row, ...] = (("optimizer.lr", _peak_rate), ("lr_scheduler.warmup_steps", _warmup))


def total_steps(c: Config, data: DataSet) -> int:
    """Return the number of steps of a run; UsageError if there is too little data for one."""
    train = c.train
    plan = plan_batches(
        train.global_batch_size, c.num_ranks, context_parallel=train.context_parallel
    )
    rows, size = data.train.rows(train.seq_len), plan.global_batch_size
    batches = Batches(rows, plan, train.seed, data.vocab_size)
    if data.val is not None and not len(data.val.rows(train.seq_len)):
        raise UsageError(
            f"train.seq_len={train.seq_len}: longer than the validation data, which has "
            f"{data.val.num_tokens} tokens; change data.val_fraction, or set it to 0 to skip "
            "validation"
        )
    epochs = math.ceil(_epochs(c) * batches.num_samples / size)
    if train.steps is not None:
        steps = train.steps if train.epochs is None else min(train.steps, epochs)
    elif train.tokens is not None:
        steps = math.ceil(train.tokens / (size * train.seq_len))
    elif train.epochs is None and c.data.name != CHAT:
        steps = _STEPS
    else:
        steps = epochs
    return max(1, steps)


# ---- for a number of ranks ---------------------------------------------------------------------


def _owners(c: Config, f: Facts) -> str:
    has_map = get_strategy(c.strategy.name).has_owner_map
    return MATRICES if has_map and c.optimizer.name == MUON else "even"


def _replica(c: Config, f: Facts) -> int | None:
    return c.launch.nproc_per_node if get_strategy(c.strategy.name).replicates else None


OF_STRATEGY: tuple[Row, ...] = (
    ("strategy.owner_map", _owners),
    ("strategy.dp_shard_size", _replica),
)


def _logits(c: Config, f: Facts) -> int:
    """Tokens whose logits exist at a time; never so few that matrix products become slow."""
    assert c.model.vocab_size is not None
    few = _CHUNK_BYTES // (4 * c.model.vocab_size)
    return 0 if c.engine.facts.keeps_logits else _chunk(_tokens(c, f), few)


def _feed_forward(c: Config, f: Facts) -> int:
    """Tokens whose activations need about as much memory as a hidden state of all."""
    tokens = _tokens(c, f)
    alike = tokens * c.model.hidden_size // (3 * c.model.intermediate_size)
    return _chunk(tokens, -(-alike // _MULTIPLE) * _MULTIPLE)


OF_BATCHES: tuple[Row, ...] = tuple(zip(_CHUNKED, (_logits, _feed_forward), strict=True))


def _tokens(c: Config, f: Facts) -> int:
    assert f.batches is not None
    shared = tokens_per_rank(c.train.seq_len, c.train.context_parallel)
    return f.batches.micro_batch_size * shared


def _chunk(tokens: int, few: int) -> int:
    """Return `few` tokens within limits; 0 if that would be nearly all."""
    chunk = max(_LEAST_CHUNK_TOKENS, few, -(-tokens // _MOST_CHUNKS))
    return chunk if tokens >= 2 * chunk else 0


def check_chunks(c: Config, batches: BatchPlan) -> None:
    """Check that chunks that are set are not too many."""
    tokens = _tokens(c, Facts(batches=batches))
    least = -(-tokens // _MOST_CHUNKS)
    for key in _CHUNKED:
        if 0 < (asked := c.value(key) or 0) < least:
            raise UsageError(
                f"{key}={asked}: {tokens:,} tokens of a micro-batch would be more than "
                f"{_MOST_CHUNKS} chunks; expected at least {least}"
            )
