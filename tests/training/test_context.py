"""Context parallelism: ranks that share samples have the losses of ranks that do not."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan
from fsdpctl.training.decoder_loss import summed_loss
from tests.commands.run import TINY, invoke
from tests.distributed import distributed
from tests.matrix import fast
from tests.training.chats import make_chat_model, make_chats
from tests.training.ranks import lines, new_trainer, run_args

STEPS = 3
SHARED = "train.context_parallel"
# Without a larger epsilon, AdamW turns the rounding of gradients near 0 into whole updates.
FP32 = ["precision=fp32", f"train.steps={STEPS}", "train.self_check=auto", "optimizer.eps=1e-4"]


@distributed(timeout=150)
def train_each(rank: int, world_size: int, runs: Sequence[list[str]]) -> None:
    """Train several runs on the same ranks, one after another."""
    for typed in runs:
        new_trainer(typed).run()


def figures(run_dir: Path) -> list[tuple[float, float, int]]:
    steps = (each for each in lines(run_dir) if "loss" in each)
    return [(each["loss"], each["grad_norm"], each["tokens"]) for each in steps]


def shared_args(folder: Path, ranks: int, shared: int, *more: str, key: str = SHARED) -> list[str]:
    args = [*FP32, *more, f"{key}={shared}", f"train.run_dir={folder / f'shared-{shared}'}"]
    sized = any(arg.startswith("model.path=") for arg in more)
    typed = run_args(folder, ranks, *args)
    tiny = [arg for arg in typed if not (sized and arg in TINY)]
    return [arg for arg in tiny if not (sized and arg == "data.val_fraction=0")]


def check_alike(folder: Path, ranks: int, shares: list[int], *more: str, key: str = SHARED) -> None:
    """Check that runs have equal losses, whatever number of ranks shares samples."""
    runs = [shared_args(folder, ranks, shared, *more, key=key) for shared in shares]
    train_each(world_size=ranks, runs=runs)
    first, *others = (figures(folder / f"shared-{shared}") for shared in shares)
    assert len(first) == STEPS
    for each in others:
        for one, other in zip(first, each, strict=True):
            assert one == pytest.approx(other, rel=1e-6)
            assert one[2] == other[2]  # tokens are counted once


def chats(folder: Path, family: str) -> list[str]:
    """Return the settings of a run on chats in packed sequences."""
    make_chat_model(folder / "model", family)
    file = make_chats(folder / "chats.jsonl", 60)
    return [f"model.path={folder / 'model'}", "data=chat", f"data.path={file}",
            "train.seq_len=60", "train.global_batch_size=3"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("more", fast(
    ["strategy=hybrid_shard", "strategy.dp_shard_size=2", "activation_checkpointing=full",
     "train.micro_batch_size=1", "accumulation=last", "train.seq_len=100"],
    slow=[["strategy=full_shard", "train.seq_len=100"],
     ["strategy=shard_grad_op", "accumulation=every", "train.micro_batch_size=1"],
     ["strategy=shard_optimizer", "strategy.owner_map=balanced", "model.num_kv_heads=1"],
     ["strategy=hybrid_shard_optimizer", "strategy.dp_shard_size=2"],
     ["strategy=no_shard", "activation_checkpointing=selective"],
     ["model.lora.rank=4", "train.loss_chunk_tokens=10"],
     ["model.overrides.model_type=mistral", "model.overrides.sliding_window=20",
     "train.seq_len=70"], ["model=gpt2", "model.num_kv_heads=4", "model.max_seq_len=16"],
     ["optimizer.state_dtype=int8", "model.hidden_size=64"], ["strategy.offload=states,gradients"]],
), ids=lambda more: more[0])  # fmt: skip
def test_losses_are_those_of_ranks_with_samples_of_their_own(tmp_path, more):
    check_alike(tmp_path, 4, [1, 2, 4], *more)


def _mean_of_rank(model: Any, batch: Any, *options: Any) -> Any:
    """Compute the loss as if all ranks had the same number of targets."""
    result = _summed(model, batch, *options)
    return result * batch.targets.numel() / max(1, int((batch.targets >= 0).sum()))


_summed = summed_loss


@distributed(world_size=2, timeout=150)
@mock.patch("fsdpctl.training.train_step.summed_loss", _mean_of_rank)
def train_with_means(rank: int, world_size: int, typed: list[str]) -> None:
    new_trainer(typed).run()


@pytest.mark.slow
@pytest.mark.parametrize("family", fast("llama", slow=["qwen3_moe"]))
def test_packed_chats_whose_answers_are_on_few_ranks(tmp_path, family):
    """A mean over the answers of each rank would be a different loss."""
    more = ["model=hf", "activation_checkpointing=full", *chats(tmp_path, family)]
    check_alike(tmp_path, 2, [1, 2], *more)
    right = figures(tmp_path / "shared-2")
    shutil.rmtree(tmp_path / "shared-2")
    train_with_means(typed=shared_args(tmp_path, 2, 2, *more, "train.self_check=off"))
    assert abs(figures(tmp_path / "shared-2")[0][1] / right[0][1] - 1) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_split_of_the_samples_has_the_same_losses(tmp_path, seed):
    """Samples are split over ranks, micro-batches and ranks that share a sample."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4])
    heads = 12
    length = draw.choice([33, 64, 130])
    shares = [each for each in (1, 2, 3, 4) if ranks % each == 0]
    check_alike(
        tmp_path, ranks, shares, f"model.num_heads={heads}", "model.hidden_size=48",
        f"model.num_kv_heads={draw.choice([1, 2, 3, 4, 6, 12])}", f"train.seq_len={length}",
        f"train.micro_batch_size={draw.choice([1, 2])}",
        f"accumulation={draw.choice(['every', 'last'])}",
        f"activation_checkpointing={draw.choice(['none', 'selective', 'full'])}",
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_resumes_with_another_number(tmp_path):
    """The figures of the resumed run differ only by rounding."""

    def run(folder: str, steps: int, shared: int) -> list[str]:
        return run_args(tmp_path, 2, *FP32, f"train.run_dir={tmp_path / folder}",
                     f"train.steps={steps}", f"{SHARED}={shared}")  # fmt: skip

    train_each(world_size=2, runs=[run("a", 2, 1), run("a", 4, 2), run("b", 4, 1)])
    for one, other in zip(figures(tmp_path / "a"), figures(tmp_path / "b"), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    code, out = invoke("data", "--run", str(tmp_path / "a"), "--step", "4", "--rank", "1")
    assert (code, out.count("(ranks 0, 1)")) == (0, 12)


@pytest.mark.parametrize(("more", "error"), [
    ([f"{SHARED}=3"], f"{SHARED}=3: expected a divisor of the 4 ranks"),
    ([f"{SHARED}=2", "engine=fsdp2"], f"{SHARED}=2: requires engine=fsdpctl, got engine=fsdp2"),
    ([f"{SHARED}=4", "model.num_heads=2", "model.num_kv_heads=2"],
     f"{SHARED}=4: expected a divisor of model.num_heads=2"),
    ([f"{SHARED}=2", "train.global_batch_size=1"], "expected at least 2, one sample per 2 ra"),
    ([f"{SHARED}=2", "launch.nproc_per_node=3"], f"{SHARED}=2: expected a divisor of the 3"),
])  # fmt: skip
def test_what_conflicts_is_rejected(tmp_path, more, error):
    with pytest.raises(UsageError, match=error):
        make_run_plan(prepare(compose_config(run_args(tmp_path, 4, *more))).config)


def test_ranks_that_share_samples_are_on_one_node():
    args = ["model=llama_tiny", "launch.nproc_per_node=3", "launch.nnodes=4", f"{SHARED}=2"]
    code, printed = invoke("estimate-memory", *args)
    assert code == 2
    assert "expected a divisor or a multiple of the 3 ranks of a node" in printed
