"""Values of `auto` that are computed from other values: one row per key and stage, by stage.

Note: a key is filled in at the stage at which the inputs of its row are known. A run may resume on
another number of ranks: values that decide the losses do not depend on it, except for the minimum
of samples per step. The reader of a key without a row, such as `launch.share_memory`, computes it.
"""

import hashlib
import json
import math
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdpctl.checkpoint.pretrained import find_tokenizer
from fsdpctl.config.data import CHAT, TOKENS
from fsdpctl.config.model import SCRIPT_PREFIX
from fsdpctl.config.schema import BATCH_SIZE, Config, ConfigT
from fsdpctl.config.serialize import to_settings
from fsdpctl.config.training import default_seq_len
from fsdpctl.data.batches import Batches
from fsdpctl.data.data_set import DataSet, contents_of
from fsdpctl.data.packing import DocumentSet
from fsdpctl.errors import UsageError
from fsdpctl.io.run_files import RUNS
from fsdpctl.models.quantized import count_weights
from fsdpctl.plan.batch_plan import BatchPlan, plan_batches, tokens_per_rank
from fsdpctl.plan.optimizers import MATRICES, MUON
from fsdpctl.plan.precision import SPLIT
from fsdpctl.plan.strategy import get_strategy
from fsdpctl.resolve.attention_kernel import kernel_of
from fsdpctl.resolve.run_data import DATE_KEY, check_amount, vocabulary_of

# Default samples per step and warmup steps, which small data and short runs reduce.
_SAMPLES, _DEFAULT_WARMUP = 16, 50
_STEPS, _EPOCHS = 500, 3  # default length of a run on text, and on conversations
# If a run on conversations would have fewer steps, it has fewer samples per step, at least these.
_MIN_STEPS, _MIN_SAMPLES = 50, 4
_PACKED_SAMPLES = 8  # samples per step that the length of packed sequences is computed for
_CHUNK_BYTES = 128 << 20  # bytes of float32 logits in a chunk
_MIN_CHUNK_TOKENS = 1024
_CHUNK_MULTIPLE = 64  # tokens in a chunk are a multiple of this number
_MAX_CHUNKS = 128  # each chunk launches kernels, and takes time in every estimate
_CHUNK_KEYS = ("train.loss_chunk_tokens", "train.mlp_chunk_tokens")
# Settings that decide the losses; other settings may change between starts of a run.
_DECIDING_SECTIONS = ("model", "data", "optimizer", "lr_scheduler", "precision")
_DECIDING_KEYS = ("train.seed", "train.seq_len", "train.global_batch_size")


class Stage(Enum):
    """The stages of preparation; the comment says what is known from this stage on."""

    RANKS = auto()  # the device and the ranks of this machine or of a cluster
    MODEL = auto()  # the files of the model
    DECODER = auto()  # the attention kernels that the decoder supports
    DATA = auto()  # the data; an estimate may lack it
    MODULE = auto()  # the module, and the steps of a run
    STRATEGY = auto()  # the strategy, which may have been selected
    BATCHES = auto()  # the division of a step among ranks


class AutoInputs(NamedTuple):
    """The inputs of rows other than the settings."""

    is_here: bool = False  # whether the ranks are on this machine, not on a described cluster
    data: DataSet | None = None
    module: nn.Module | None = None
    batches: BatchPlan | None = None
    recipe: str | None = None


class AutoValue(NamedTuple):
    """A row: the function that computes the value of a key, and its stage."""

    key: str
    stage: Stage
    value: Callable[[Config, AutoInputs], Any]
    # Whether the row replaces a value too, such as the value of an earlier row. Keys with
    # `Config.is_auto` have their first value in `run_identity`.
    replaces: Callable[[Config, str], bool] = lambda config, key: False
    kept_on_resume: bool = False  # a resumed run keeps the value, since losses depend on it


def fill_auto(config: ConfigT, stage: Stage, inputs: AutoInputs = AutoInputs()) -> ConfigT:
    """Return the configuration with the values of a stage; set values stay."""
    for row in AUTO_VALUES:
        if row.stage is stage and (config.value(row.key) is None or row.replaces(config, row.key)):
            config = config.changed({row.key: row.value(config, inputs)})
    return config


def has_bf16() -> bool:
    """Return whether the GPUs compute in bf16 in hardware; without a GPU here, it is assumed."""
    is_here = torch.cuda.is_available()
    return not is_here or torch.cuda.is_bf16_supported(including_emulation=False)


def _compute_dtype(config: Config, inputs: AutoInputs) -> str:
    """Return bfloat16 for GPUs, except for GPUs that emulate it, which are much slower with it."""
    on_gpu = config.launch.device == "cuda" and has_bf16()
    is_split = config.precision.master_dtype == SPLIT  # the bf16 half of the weights is gathered
    return "bfloat16" if on_gpu or is_split else "float32"


def _final_eval_batches(config: Config, inputs: AutoInputs) -> int:
    """Return 0 (all data), unless validation losses are compared with one another."""
    return config.train.eval_batches if config.compares_losses else 0


def _default_warmup(config: Config, inputs: AutoInputs) -> int | None:
    return None if config.lr_scheduler.warmup_ratio is not None else _DEFAULT_WARMUP


def _tokenizer(config: Config, inputs: AutoInputs) -> str | None:
    path = Path(str(config.model.path))
    reads_text = config.data.name != TOKENS or config.model.is_pretrained
    return find_tokenizer(path) if config.model.path and reads_text and path.exists() else None


def _seq_len(config: Config, inputs: AutoInputs) -> int:
    """Return the length of samples, at most the default.

    Samples of text are no longer than the smaller of training and validation data. Sequences of
    conversations hold the longest conversation; packed ones are longer if enough steps remain.
    """
    default, data = config.train.seq_len, inputs.data
    if data is None:  # an estimate without data is an upper bound
        return default
    parts = [data.train] if data.val is None else [data.train, data.val]
    contents = [each for part in parts for each in contents_of(part)]
    if chats := [each for each in contents if isinstance(each, DocumentSet)]:
        longest = max(int(part.lengths.max(initial=2)) for part in chats) - 1  # inputs: n of n + 1
        length = 1 << max(6, (longest - 1).bit_length())  # the next power of two, at least 64
        if chats[0].packing.shares_sequences:
            tokens = _epochs(config) * data.train.num_tokens / (_MIN_STEPS * _PACKED_SAMPLES)
            length = max(length, _power_of_two_up_to(tokens))
        return min(default, length)
    check_amount(config, data)
    max_len = min(part.num_tokens for part in parts) - 1
    return default if default <= max_len or max_len < 1 else _power_of_two_up_to(max_len)


def _global_batch_size(config: Config, inputs: AutoInputs) -> int:
    """Return the samples per step: the default, or as many as `train.global_batch_tokens` hold.

    Each rank gets at least one micro-batch. For conversations, the number is reduced if the run
    would have too few steps.
    """
    if (tokens := config.train.global_batch_tokens) is not None:
        if tokens < config.train.seq_len:
            problem = f"fewer than the train.seq_len={config.train.seq_len} of one sample"
            raise UsageError(f"train.global_batch_tokens={tokens}: {problem}")
        return tokens // config.train.seq_len
    size = config.train.global_batch_size
    if config.data.name == CHAT and inputs.data is not None:
        samples = _epochs(config) * len(inputs.data.train.samples(config.train.seq_len))
        size = min(size, max(_power_of_two_up_to(samples / _MIN_STEPS), _MIN_SAMPLES))
    micro, passes = config.train.micro_batch_size or 1, config.accumulation.steps or 1
    return max(size, config.data_parallel_size * micro * passes)


def _epochs(config: Config) -> float:
    return config.train.epochs or _EPOCHS


def _power_of_two_up_to(count: float) -> int:
    return 1 << max(0, int(count).bit_length() - 1)


def _attention(config: Config, inputs: AutoInputs) -> str | None:
    return kernel_of(config, is_here=inputs.is_here)


def _date(config: Config, inputs: AutoInputs) -> str | None:
    return None if inputs.data is None else inputs.data.date


def _steps(config: Config, inputs: AutoInputs) -> int | None:
    return total_steps(config, inputs.data)


def _vocab_size(config: Config, inputs: AutoInputs) -> int | None:
    return None if inputs.data is None else vocabulary_of(config, inputs.data)


def _lr(config: Config, inputs: AutoInputs) -> float | None:
    """Return a learning rate for the model's size: 3e-4 at 8 B, 1.5e-4 at 70 B, as for Llama 3.

    Pretrained weights are usually trained with a tenth of the rate, LoRA adapters with all of it.
    """
    if inputs.module is None:  # an estimate
        return None
    millions = sum(count_weights(inputs.module).values()) / 1e6
    tunes_all_weights = config.model.is_pretrained and config.model.lora.rank is None
    rate = (3e-4 if tunes_all_weights else 3e-3) / max(1.0, millions) ** 0.25
    return float(f"{rate:.2g}")


def _warmup_steps(config: Config, inputs: AutoInputs) -> int | None:
    """Return the warmup steps: the default, or a tenth of all steps if that is less."""
    default, steps = config.lr_scheduler.warmup_steps, config.train.steps
    if default is None or steps is None:  # `warmup_ratio` is set
        return default
    return min(default, -(-steps // 10))


def total_steps(config: Config, data: DataSet | None) -> int | None:
    """Return the steps of a run; None if they depend on data that is unknown.

    UsageError if there is too little data for one sample.
    """
    train = config.train
    set_steps = None if config.is_auto("train.steps") else train.steps
    epochs = None if data is None else steps_of_epochs(config, data)
    if train.epochs is not None:
        return epochs if set_steps is None or epochs is None else min(set_steps, epochs)
    if set_steps is not None:
        return set_steps
    if train.tokens is not None:
        return math.ceil(train.tokens / (train.global_batch_size * train.seq_len))
    return epochs if config.data.name == CHAT else _STEPS


def steps_of_epochs(config: Config, data: DataSet) -> int:
    """Return the steps of all epochs; UsageError without a sample to train on or to validate."""
    train = config.train
    size, shared = train.global_batch_size, train.context_parallel
    plan = plan_batches(size, config.num_ranks, context_parallel=shared)
    batches = Batches(data.train.samples(train.seq_len), plan, train.seed, data.vocab_size)
    if data.val is not None and not len(data.val.samples(train.seq_len)):
        raise UsageError(
            f"train.seq_len={train.seq_len}: longer than the validation data, which has "
            f"{data.val.num_tokens} tokens; change data.val_fraction, or set it to 0 to skip "
            "validation"
        )
    return max(1, math.ceil(_epochs(config) * batches.num_samples / plan.global_batch_size))


def decides_losses(name: str) -> bool:
    """Return whether a setting changes the losses of a run by more than rounding."""
    if name == "model.attention":
        return False
    return name.split(".")[0] in _DECIDING_SECTIONS or name in _DECIDING_KEYS


def run_identity(config: Config) -> str:
    """Return six hexadecimal digits of the hash of the settings that decide the losses.

    Settings with their default are left out, so that a new key changes no hash. Values of `auto`
    that depend on the data, the length or the ranks are replaced by their defaults.
    """
    rows = (each for each in AUTO_VALUES if each.replaces is Config.is_auto)
    keys = {each.key for each in rows if config.is_auto(each.key)}
    if config.train.global_batch_tokens is not None:
        keys.discard(BATCH_SIZE)
    canonical = fill_auto(config.changed(dict.fromkeys(keys)), Stage.RANKS)
    defaults = to_settings(Config())
    deciding = {
        name: text
        for name, text in to_settings(canonical).items()
        if decides_losses(name) and name != DATE_KEY and defaults.get(name) != text
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:6]


def _run_dir(config: Config, inputs: AutoInputs) -> str | None:
    if inputs.module is None:  # an estimate
        return None
    name = inputs.recipe or config.model.name.removeprefix(SCRIPT_PREFIX)
    return str(Path(RUNS) / f"{name}-{run_identity(config)}")


def _owner_map(config: Config, inputs: AutoInputs) -> str:
    has_map = get_strategy(config.strategy.name).has_owner_map
    return MATRICES if has_map and config.optimizer.name == MUON else "even"


def _dp_shard_size(config: Config, inputs: AutoInputs) -> int | None:
    return config.launch.nproc_per_node if get_strategy(config.strategy.name).replicates else None


def _loss_chunk_tokens(config: Config, inputs: AutoInputs) -> int:
    """Return the tokens whose logits exist at a time, not so few that matmuls become slow."""
    assert config.model.vocab_size is not None
    if config.engine.emulated.keeps_logits:
        return 0
    preferred = _CHUNK_BYTES // (4 * config.model.vocab_size)
    return _chunk(_micro_batch_tokens(config, inputs.batches), preferred)


def _mlp_chunk_tokens(config: Config, inputs: AutoInputs) -> int:
    """Return the tokens whose MLP activations need about the memory of all hidden states."""
    tokens = _micro_batch_tokens(config, inputs.batches)
    mlp_size = 3 * config.model.intermediate_size  # gate, up and their product
    equal_memory = tokens * config.model.hidden_size // mlp_size
    return _chunk(tokens, -(-equal_memory // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)


def _micro_batch_tokens(config: Config, batches: BatchPlan | None) -> int:
    assert batches is not None
    per_sample = tokens_per_rank(config.train.seq_len, config.train.context_parallel)
    return batches.micro_batch_size * per_sample


def _chunk(tokens: int, preferred: int) -> int:
    """Return `preferred` tokens within limits; 0 if `tokens` are fewer than two chunks."""
    chunk = max(_MIN_CHUNK_TOKENS, preferred, -(-tokens // _MAX_CHUNKS))
    return chunk if tokens >= 2 * chunk else 0


def check_chunks(config: Config, batches: BatchPlan) -> None:
    tokens = _micro_batch_tokens(config, batches)
    least = -(-tokens // _MAX_CHUNKS)
    for key in _CHUNK_KEYS:
        if 0 < (size := config.value(key) or 0) < least:
            raise UsageError(
                f"{key}={size}: {tokens:,} tokens of a micro-batch would be more than "
                f"{_MAX_CHUNKS} chunks; expected at least {least}"
            )


def _from_batches(name: str) -> Callable[[Config, AutoInputs], int]:
    return lambda config, inputs: int(getattr(inputs.batches, name))


def _computes_steps(config: Config, key: str) -> bool:
    """Return whether train.steps is `auto`, or limited by train.epochs."""
    return config.is_auto(key) or config.train.epochs is not None


_WARMUP_KEY, _LENGTH_KEY = "lr_scheduler.warmup_steps", "train.seq_len"
AUTO_VALUES = (
    AutoValue("precision.param_dtype", Stage.RANKS, _compute_dtype, kept_on_resume=True),
    AutoValue("precision.reduce_dtype", Stage.RANKS, lambda c, _: "float32"),
    AutoValue("precision.master_dtype", Stage.RANKS, lambda c, _: "float32"),
    AutoValue("train.final_eval_batches", Stage.RANKS, _final_eval_batches),
    AutoValue(
        "model.lora.alpha", Stage.RANKS, lambda c, _: c.model.lora.rank and c.model.lora.used_alpha
    ),
    AutoValue(
        _LENGTH_KEY, Stage.RANKS, lambda c, _: default_seq_len(c.model.name, c.model.max_seq_len)
    ),
    AutoValue(BATCH_SIZE, Stage.RANKS, lambda c, _: _SAMPLES),
    AutoValue(_WARMUP_KEY, Stage.RANKS, _default_warmup),
    AutoValue("data.tokenizer", Stage.MODEL, _tokenizer),
    AutoValue("model.attention", Stage.DECODER, _attention, kept_on_resume=True),
    AutoValue(_LENGTH_KEY, Stage.DATA, _seq_len, Config.is_auto, kept_on_resume=True),
    AutoValue("model.vocab_size", Stage.DATA, _vocab_size),
    AutoValue(DATE_KEY, Stage.DATA, _date, kept_on_resume=True),
    AutoValue(BATCH_SIZE, Stage.DATA, _global_batch_size, Config.is_auto, kept_on_resume=True),
    AutoValue("train.steps", Stage.MODULE, _steps, _computes_steps),
    AutoValue("optimizer.lr", Stage.MODULE, _lr),
    AutoValue(_WARMUP_KEY, Stage.MODULE, _warmup_steps, Config.is_auto, kept_on_resume=True),
    AutoValue("train.run_dir", Stage.MODULE, _run_dir),
    AutoValue("strategy.owner_map", Stage.STRATEGY, _owner_map),
    AutoValue("strategy.dp_shard_size", Stage.STRATEGY, _dp_shard_size),
    AutoValue("train.micro_batch_size", Stage.BATCHES, _from_batches("micro_batch_size")),
    AutoValue("accumulation.steps", Stage.BATCHES, _from_batches("num_micro_batches")),
    AutoValue(_CHUNK_KEYS[0], Stage.BATCHES, _loss_chunk_tokens),
    AutoValue(_CHUNK_KEYS[1], Stage.BATCHES, _mlp_chunk_tokens),
)
