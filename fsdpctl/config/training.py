"""The sections `train`, `checkpoint` and `log`."""

from dataclasses import dataclass

from fsdpctl.config.keys import NONE, auto_key, key, optional_key
from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError, did_you_mean

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")  # packages, and extras of fsdpctl
MAX_SAMPLES = 1 << 20  # per step
_MAX_LENGTH = 1 << 27  # tokens
# Values of train.seq_len=auto for the toy model, and the upper limit for other models.
_TOY_LENGTH, _DEFAULT_LENGTH = 128, 4096


def default_seq_len(model: str | None, max_seq_len: int) -> int:
    """Return the value of `train.seq_len=auto` for a named model; None is the default model."""
    is_toy = model in (None, ModelConfig().name)
    return _TOY_LENGTH if is_toy else min(max_seq_len, _DEFAULT_LENGTH)


def _tracker_list(text: str) -> str:
    """Return the trackers in a list, with or without brackets, separated by commas."""
    names = [each.strip().lower() for each in text.strip("[] ").split(",")]
    if text.strip("[] ") in ("", NONE):
        return NONE
    for name in names:
        if name not in TRACKERS:
            expected = f"none, or a list of {', '.join(TRACKERS)}{did_you_mean(name, TRACKERS)}"
            raise UsageError(f"log.trackers={text}: expected {expected}")
    return ",".join(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The training loop."""

    run_dir: str | None = auto_key("directory of the run; auto: runs/NAME-HASH", is_path=True)
    steps: int | None = auto_key(
        "length of the run in optimizer steps; auto: 500, or 3 epochs of conversations, unless "
        "epochs or tokens are set; with epochs in a recipe: the shorter of the two",
        minimum=1,
        optional=True,
    )
    epochs: float | None = optional_key(
        "length of the run in passes over the data", within=(1e-9, 1e6)
    )
    tokens: int | None = optional_key("length of the run in tokens", minimum=1)
    seq_len: int = auto_key(
        "tokens per sample; auto: 128 for llama_tiny, else model.max_seq_len, at most 4096; less "
        "for shorter data or conversations",
        within=(1, _MAX_LENGTH),
    )
    context_parallel: int = key(
        1, "adjacent ranks that share a sample, for long samples", minimum=1
    )
    global_batch_size: int = auto_key(
        "samples per step, over all ranks; auto: 16, or 4 or 8 if conversations would train for "
        "less than 50 steps; at least one per rank",
        within=(1, MAX_SAMPLES),
    )
    global_batch_tokens: int | None = optional_key(
        "tokens per step, rounded down to whole samples", minimum=1
    )
    micro_batch_size: int | None = optional_key(
        "samples per rank and micro-batch; not set: the rank's share of a step, or selected if "
        "that does not fit; auto: selected",
        within=(1, MAX_SAMPLES),
        auto_and_none=True,
    )
    seed: int = key(0, "seed of the initial weights and the data order", minimum=0)
    eval_every: int = key(200, "steps between validations; 0: only at the end", minimum=0)
    eval_batches: int = key(20, "global batches per validation; 0: all data", minimum=0)
    final_eval_batches: int | None = auto_key(
        "global batches of the last validation; 0: all data; auto: all, or train.eval_batches if "
        "losses are compared (train.patience, checkpoint.keep_best)",
        minimum=0,
    )
    patience: int | None = optional_key(
        "consecutive validations without a lower loss that end the run; not set: no limit",
        minimum=1,
    )
    log_every: int = key(50, "steps between plain progress lines", minimum=1)
    sample_tokens: int = key(200, "tokens to generate after training; 0: none", minimum=0)
    on_nonfinite: str = key(
        "stop", "reaction to a non-finite or spiking step: stop or skip", choices=("stop", "skip")
    )
    spike_factor: float | None = optional_key(
        "spike threshold: deviations (1.4826 MAD) above the median of the last 128 applied steps",
        within=(1, 1e6),
    )
    max_skips: int = key(10, "skipped steps per run; one more stops the run", minimum=0)
    loss_chunk_tokens: int | None = auto_key("tokens per chunk of logits; 0: all", minimum=0)
    mlp_chunk_tokens: int | None = key(
        0,
        "tokens that feed-forward layers run on at a time, for long samples; the layers are "
        "recomputed in backward; 0: all",
        minimum=0,
        auto=True,
    )
    self_check: str = key(
        "auto",
        "check of the first step after each start (gradients; on CUDA also packed documents); "
        "auto: a failure exits with code 77; warn: it is only printed",
        choices=("auto", "warn", "off"),
    )
    require_fit: bool = key(
        True, "do not start runs whose estimated memory exceeds that of ranks or nodes; exit code 3"
    )
    compile: bool = key(False, "compile each block with torch.compile")
    profile: bool = key(False, "write a Chrome trace of three steps to the run directory")
    deterministic: bool = key(False, "CUDA: use deterministic kernels only")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The times at which checkpoints are saved, and the checkpoints that are kept."""

    every: int = key(100, "steps between checkpoints; 0: only at the end", minimum=0)
    keep_last: int = key(2, "number of newest checkpoints to keep; 0: all", minimum=0)
    keep_every: int = key(0, "also keep checkpoints of every N-th step; 0: none", minimum=0)
    keep_best: bool = key(False, "also keep the checkpoint with the lowest validation loss")
    mode: str = key("async", "async: write in the background", choices=("async", "sync"))
    remote: str | None = optional_key(
        "directory in an object store to upload each checkpoint to, such as s3://BUCKET/runs"
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Trackers, and the memory snapshot that is written if memory runs out."""

    trackers: str = key(
        "none",
        "programs that get the metrics: event files in the run directory for TensorBoard; Weights "
        "& Biases; Trackio; MLflow",
        choices=TRACKERS,
        normalize=_tracker_list,
        is_list=True,
    )
    project: str | None = optional_key(
        "project in trackers, experiment in MLflow; not set: WANDB_PROJECT, TRACKIO_PROJECT, "
        "MLFLOW_EXPERIMENT_NAME, else fsdpctl"
    )
    memory_snapshot: bool = key(False, "CUDA: record allocations for a snapshot if memory runs out")

    @property
    def tracker_names(self) -> list[str]:
        return [] if self.trackers == NONE else self.trackers.split(",")
