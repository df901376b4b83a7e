"""What one command refuses, every command refuses, in the same words."""

import itertools
import random
from collections.abc import Iterator

import pytest

from fsdpctl.config.auto import left_open
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.estimate.search import estimates_of
from fsdpctl.launch.begin import decide_run
from fsdpctl.plan.attention_kernels import KERNELS
from fsdpctl.plan.optimizers import STATE_DTYPES
from fsdpctl.plan.owners import OWNER_MAPS
from fsdpctl.plan.precision import SPLIT
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.launchers import Role
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.settle import settle
from fsdpctl.run.directory import look
from tests.commands.run import TINY, invoke, make_text

VALUES: dict[str, tuple[object, ...]] = {
    "engine": ("fsdpctl", "fsdp2", "ddp"), "strategy": (*STRATEGIES, "auto"),
    "strategy.dp_shard_size": (1, 2, 3, 4), "strategy.owner_map": OWNER_MAPS,
    "optimizer": ("adamw", "sgd", "muon"), "optimizer.lr": ("auto", 0.1),
    "optimizer.state_dtype": STATE_DTYPES,
    "strategy.offload": ("none", "states", "states,gradients", "states,params", "params", "all"),
    "optimizer.nesterov": ("false",), "optimizer.beta1": (0.5,),
    "precision": ("fp32", "tf32", "bf16", "bf16_true"),
    "precision.master_dtype": ("float32", "bfloat16", SPLIT),
    "precision.reduce_dtype": ("float32", "bfloat16"),
    "activation_checkpointing": ("none", "selective", "full"),
    "activation_checkpointing.offload": ("true",), "accumulation": ("every", "last"),
    "accumulation.steps": (1, 2, 3, 99), "train.micro_batch_size": ("auto", 1, 2, 99),
    "train.global_batch_size": ("auto", 1, 7), "train.global_batch_tokens": (10, 4096),
    "train.compile": ("true",), "train.deterministic": ("true",),
    "train.context_parallel": (2, 3, 4), "train.seq_len": (16, 100_000),
    "train.loss_chunk_tokens": (0, 7), "train.mlp_chunk_tokens": (0, 7),
    "model.attention": tuple(KERNELS), "model": ("gpt2",),
    "model.overrides.model_type": ("qwen3", "mistral"), "model.lora.rank": (2,),
    "model.trainable": ("norm", "nothing"), "model.base_dtype": ("nf4",),
    "model.router_aux_loss": ("global",), "launch.nproc_per_node": (1, 2, 4),
    "prefetch": ("none", "backward", "both"), "data.packing": ("true", "false"),
}  # fmt: skip
BASE = [*TINY, "launch.device=cpu", "train.global_batch_size=12", "train.steps=2"]
PAIRS = 20
NAMED = [
    ["optimizer=muon", "strategy=shard_optimizer", f"precision.master_dtype={SPLIT}"],
    ["optimizer=sgd", "optimizer.lr=0.1", f"precision.master_dtype={SPLIT}"],
    ["strategy.offload=states", "strategy=no_shard", "launch.share_memory=false"],
    ["engine=fsdp2", "launch.share_memory=true"],
    ["launch.nnodes=2", "launch.share_memory=true"],
    ["engine=fsdp2", "strategy.offload=states"],
    ["engine=ddp", "strategy=no_shard", "activation_checkpointing.offload=true"],
    ["engine=fsdp2", "model.lora.rank=2"],
    ["optimizer=sgd"],
    ["optimizer.momentum=0.9"],  # also as the default
    ["optimizer=sgd", "optimizer.lr=0.1", "optimizer.beta2=0.95"],
    ["prefetch=auto", "prefetch.forward=0"],
    ["prefetch=auto", "prefetch.backward=1"],
    ["train.global_batch_size=1"],
    ["train.micro_batch_size=7"],
]


def drawn(count: int, seed: int) -> list[list[str]]:
    draw = random.Random(seed)
    pairs = list(itertools.combinations(VALUES, 2))
    drawn = draw.sample(pairs, count)
    return [[f"{key}={draw.choice(VALUES[key])}" for key in pair] for pair in drawn]


def refusal(words: list[str], *, trains: bool) -> str:
    """Why a command refuses the settings; empty if it accepts them."""
    given = {each.partition("=")[0]: each for each in [*BASE, "launch.nproc_per_node=2", *words]}
    try:
        composed = compose_config(list(given.values()))
        if not trains:
            estimates_of(Estimator(), composed, every=False)
        else:
            opened = prepare(composed, Role(composed.config.launch))
            if not left_open(opened.config):
                settle(opened.config)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("cases", [
    pytest.param(NAMED, id="named"),
    pytest.param(drawn(PAIRS, 1), id="pairs", marks=pytest.mark.slow),
    pytest.param(drawn(200, 2), id="more pairs", marks=pytest.mark.slow),
])  # fmt: skip
def test_estimate_memory_refuses_what_train_refuses(cases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"data.path={make_text(tmp_path)}"
    seen = [
        (words, *(refusal([text, *words], trains=trains) for trains in (False, True)))
        for words in cases
    ]
    assert [each for each in seen if each[1] != each[2]] == []
    if cases is NAMED:
        assert all(estimated for _, estimated, _ in seen)


SIZED: dict[str, tuple[object, ...]] = {
    "strategy": (*STRATEGIES, "auto"),
    "activation_checkpointing": ("none", "selective", "full", "auto", None, None, None),
    "prefetch": ("none", "backward", "both", "auto", None, None, None),
    "train.micro_batch_size": (1, 2, "none", "auto", None, None, None),
    "accumulation.steps": (None, None, None, 2),
    "accumulation": ("every", "last"),
    "train.global_batch_size": (8, 12, 64),
    "train.seq_len": (16, 256),
    "launch.nproc_per_node": (1, 2, 4),
    "launch.share_memory": ("auto", "false"),
    "model.lora.rank": (None, None, 2),
    "optimizer": ("adamw", "muon"),
    "cluster.memory": (0.5015, 0.504, 0.51, 0.52, 0.56),  # of which the process takes up to 0.5
}


def sized(seed: int) -> Iterator[list[str]]:
    draw = random.Random(seed)
    while True:
        drawn = {key: draw.choice(values) for key, values in SIZED.items()}
        yield [f"{key}={value}" for key, value in drawn.items() if value is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(9, 1), pytest.param(110, 2, marks=pytest.mark.slow)])
def test_what_fits_by_the_estimate_fits_for_train_with_the_same_selection(
    count, seed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    base = [*TINY, f"data.path={make_text(tmp_path)}", "launch.device=cpu", "train.steps=2"]
    kinds, compared, drawn = set(), 0, sized(seed)
    while compared < count:
        words = next(drawn)
        given = {each.partition("=")[0]: each for each in [*base, *words]}
        codes = (
            invoke("estimate-memory", *given.values(), "--require-fit", "--json")[0],
            invoke("train", *given.values(), "--dry-run")[0],
        )
        assert codes in {(0, 0), (2, 2), (3, 3)}, words
        if codes == (2, 2):  # the tests above
            continue
        compared += 1
        composed, estimator = compose_config(list(given.values())), Estimator()
        ((found, ranking),) = estimates_of(Estimator(), composed, every=False)
        opened = prepare(composed, Role(composed.config.launch))
        seen = look(opened.config, "auto")
        plan, estimate, made = decide_run(seen, estimator, lambda line: None)
        assert (estimate.fits, estimate.peak_reserved) == (found.fits, found.peak_reserved), words
        assert (codes == (0, 0)) == found.fits
        assert plan.batches == found.batches, words
        assert bool(made) == (ranking is not None), words
        held = {name for name in given if name in SIZED and given[name] != f"{name}=auto"}
        for name in held & {"strategy", "activation_checkpointing", "prefetch"}:
            assert f"{name}={plan.config.value(name)}" == given[name]
        kinds.add((found.fits, ranking is None))
    assert len(kinds) > 2
