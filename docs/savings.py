"""The memory that settings save and the time that they cost, for docs/out-of-memory.md."""

from collections.abc import Sequence

from docs.measured import table_of
from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.duration import run_time
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan

_GIB = 1 << 30
_BASE = (
    "model=llama3_8b cluster=h100 train.seq_len=8192 train.micro_batch_size=2 prefetch=both "
    "strategy=full_shard"
)
_OF_ACTIVATIONS = (
    "train.micro_batch_size=1",
    "train.context_parallel=2",
    "activation_checkpointing=selective",
    "train.mlp_chunk_tokens=auto",
    "activation_checkpointing=full",
)
_OF_STATES = (
    "strategy.offload=states,gradients",
    "strategy.offload=all",
    "strategy.offload=states",
    "optimizer.state_dtype=int8",
    "precision.master_dtype=bfloat16+int8",
    "activation_checkpointing.offload=true",
    "prefetch=none",
    "launch.nnodes=2",
    "model.lora.rank=16",
    "model.lora.rank=16 model.base_dtype=nf4",
)


def savings_of_activations() -> str:
    """Return the memory that settings save by reducing activations."""
    return _savings(f"{_BASE} activation_checkpointing=none", _OF_ACTIVATIONS)


def savings_of_states() -> str:
    """Return the memory that settings save if all blocks are recomputed."""
    return _savings(f"{_BASE} activation_checkpointing=full", _OF_STATES)


def _savings(base: str, changes: Sequence[str]) -> str:
    """Return a rank's reserved memory and the time of a step without and with each change."""
    estimator = Estimator()

    def figures(change: str) -> tuple[float, float]:
        settings = dict(each.split("=", 1) for each in f"{base} {change}".split())
        composed = compose_config([f"{key}={text}" for key, text in settings.items()])
        estimate = estimator.estimate(make_run_plan(prepare(composed, ESTIMATE_ROLE).config))
        return estimate.peak_reserved / _GIB, run_time(estimator, estimate).step_seconds

    reserved, seconds = figures("")
    rows = [f"none | {reserved:.1f} | – | {seconds:.2f} | –"]
    for change in changes:
        less, longer = figures(change)
        saved, time = reserved - less, longer / seconds - 1
        rows.append(f"`{change}` | {less:.1f} | {saved:.1f} | {longer:.2f} | {time:+.0%}")
    header = "change | reserved, GiB | saved, GiB | step, s | time"
    return table_of(header, rows, f"Settings: `{base}`.")
