"""The run itself: how long it is, what it looks at on the way, and when its state is saved."""

from dataclasses import dataclass

from fsdpctl.config.keys import key

MOST_SAMPLES = 1 << 20  # of a step
_MOST_LENGTH = 1 << 27  # tokens


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The run itself."""

    run_dir: str | None = key(
        None, "where everything of the run lies; auto: runs/NAME-HASH", is_path=True, auto=True
    )
    steps: int | None = key(1000, "length in optimizer steps", minimum=1, optional=True)
    epochs: float | None = key(
        None, "length in passes over the data", minimum=1e-9, maximum=1e6, optional=True
    )
    tokens: int | None = key(None, "length in trained tokens", minimum=1, optional=True)
    seq_len: int = key(
        None,
        "tokens of a sample; auto: 128 for llama_tiny, else model.max_seq_len, at most 4096",
        minimum=1,
        maximum=_MOST_LENGTH,
        auto=True,
    )
    global_batch_size: int = key(
        16, "samples of a step, over all ranks", minimum=1, maximum=MOST_SAMPLES
    )
    global_batch_tokens: int | None = key(
        None, "the same in tokens: as many whole samples as they make", minimum=1, optional=True
    )
    micro_batch_size: int | None = key(
        None,
        "samples of a rank and pass; not set: all of its share; auto: chosen",
        minimum=1,
        maximum=MOST_SAMPLES,
        optional=True,
        is_chosen=True,
    )
    seed: int = key(0, "of weights and data order", minimum=0)
    eval_every: int = key(200, "steps between validations; 0: only at the end", minimum=0)
    eval_batches: int = key(20, "global batches of a validation; 0: all there are", minimum=0)
    final_eval_batches: int = key(0, "the same of the last one, at the end", minimum=0)
    log_every: int = key(50, "steps between plain progress lines", minimum=1)
    sample_tokens: int = key(200, "tokens generated at the end; 0: none", minimum=0)
    on_nonfinite: str = key(
        "stop",
        "at a non-finite loss or gradient, or a spike: stop; leave the step out; or go back to the "
        "newest checkpoint and on with the data after it",
        choices=("stop", "skip", "rollback"),
    )
    spike_factor: float | None = key(
        None,
        "a spike: so many deviations (1.4826 MAD) above the median of the last 128 steps",
        minimum=1,
        maximum=1e6,
        optional=True,
    )
    max_skips: int = key(
        10, "steps left out or gone back from, after which the next one stops the run", minimum=0
    )
    loss_chunk_tokens: int | None = key(
        None, "tokens of a pass whose logits exist at a time; 0: all", minimum=0, auto=True
    )
    compile: bool = key(False, "torch.compile each block")
    profile: bool = key(False, "write a Chrome trace of three steps into the run's directory")
    deterministic: bool = key(False, "CUDA: only kernels that repeat their results")
