"""Settings that PyTorch's engines don't support are rejected in one line, before a run."""

from pathlib import Path

import pytest

from fsdpctl.plan.strategy import ENGINES, STRATEGIES, engine_strategies
from tests.commands.run import invoke
from tests.training.ranks import run_args


@pytest.mark.parametrize(("more", "error"), [
    ("engine=ddp", "engine=ddp: strategy=full_shard not supported; expected no_shard"),
    ("engine=fsdp2 strategy=no_shard", "expected shard_grad_op, full_shard, hybrid_shard"),
    ("engine=fsdp2 strategy=shard_optimizer", "strategy=shard_optimizer not supported"),
    ("engine=fsdp2 strategy=hybrid_shard_optimizer", "not supported"),
    ("engine=ddp strategy=no_shard precision=bf16 precision.reduce_dtype=bfloat16",
     "expected precision.reduce_dtype=float32, got bfloat16"),
    ("activation_checkpointing.offload=true",
     "requires activation_checkpointing=full or selective, got activation_ch"),
    ("engine=fsdp2 activation_checkpointing=full activation_checkpointing.offload=true",
     "activation_checkpointing.offload=true: requires engine=fsdpctl, got engine=fsdp2"),
    ("train.compile=true activation_checkpointing=selective "
     "activation_checkpointing.offload=true",
     "offload=true: requires train.compile=false with selective"),
    ("engine=fsdp2 model.lora.rank=4", "model.lora.rank=4: requires engine=fsdpctl"),
    ("engine=fsdp3", "did you mean fsdp2?"),
    ("engine=fsdp2 strategy=hybrid_shard strategy.dp_shard_size=3", "must divide"),
])  # fmt: skip
def test_unsupported_settings_are_rejected(more: str, error: str, tmp_path: Path) -> None:
    code, text = invoke("train", *run_args(tmp_path, 2, *more.split()), "--dry-run")
    assert (code, error in text, "\n" in text.strip()) == (2, True, False)


def test_a_run_prints_its_engine(tmp_path: Path) -> None:
    options = run_args(tmp_path, 2, "engine=fsdp2", f"train.run_dir={tmp_path / 'run'}")
    code, text = invoke("train", *options, "--dry-run")
    assert (code, "engine fsdp2, full_shard" in " ".join(text.split())) == (0, True)


def test_every_engine_supports_a_strategy_and_fsdpctl_all() -> None:
    has = {engine: set(engine_strategies(engine)) for engine in ENGINES}
    assert has["fsdpctl"] == set(STRATEGIES)
    assert has["fsdp2"] == {"full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_grad_op"}
    assert has["ddp"] == {"no_shard"}
