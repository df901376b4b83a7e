"""The check of the first step: each planted mistake is named, and a correct run passes."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdpctl.data.batches import Batches
from fsdpctl.engine.precision import Precision
from fsdpctl.errors import SelfCheckError
from fsdpctl.models import attention
from fsdpctl.models.context import to_tokens
from fsdpctl.models.row_documents import Documents
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.schedule import lr_factor
from fsdpctl.train import assemble, loss, small_run, step
from fsdpctl.train.callbacks import self_check
from tests.cli.run import make_text
from tests.distributed import distributed
from tests.matrix import fast
from tests.models.decoders import save_decoder
from tests.train.chats import make_chat_model, make_chats
from tests.train.ranks import made, words

LAYER = "model.layers.1"


def _frozen(module: nn.Module) -> None:
    module.get_parameter(f"{LAYER}.mlp.down_proj.weight").requires_grad_(False)


def _cut_off(module: nn.Module) -> None:
    layer = module.get_submodule(LAYER)
    forward = layer.forward
    layer.forward = lambda x, *more: x + 0 * forward(x, *more).detach()


def _moments_in(dtype: torch.dtype) -> Any:
    plain = ShardedAdamW.__init__

    def changed(*args: Any, **named: Any) -> None:
        plain(*args, **{**named, "state_dtype": dtype})

    return mock.patch.object(ShardedAdamW, "__init__", changed)


def _module_with(change: Callable[[nn.Module], None]) -> Any:
    make = assemble.make_module

    def changed(config: Any) -> nn.Module:
        module = make(config)
        change(module)
        return module

    return mock.patch.object(assemble, "make_module", changed)


def _divided(*about: Any, plain: Any = loss.summed_loss) -> Any:
    return plain(*about) / 2


@contextmanager
def _divided_everywhere() -> Iterator[None]:
    """The loss is divided in the function itself."""
    with ExitStack() as stack:
        for module in (loss, step, self_check, small_run):
            stack.enter_context(mock.patch.object(module, "summed_loss", _divided))
        yield


def _counted_twice(*args: Any, **named: Any) -> Any:
    from fsdpctl.optim.record import record_step

    return record_step(*args, **{**named, "tokens": 2 * named["tokens"]})


def _balance(decoder: Any, *about: Any, plain: Any = TransformersDecoder._balance) -> Any:
    return plain(decoder, *about).detach()


def _unbalanced_in_chunks(
    decoder: Any, tokens: Any, targets: Any = None, chunk: int | None = None, *more: Any,
    plain: Any = TransformersDecoder.forward, **named: Any,
) -> Any:  # fmt: skip
    setting = "none" if chunk else decoder._aux_loss
    with mock.patch.object(decoder, "_aux_loss", setting):
        return plain(decoder, tokens, targets, chunk, *more, **named)


def _of_other_heads(mixed: torch.Tensor, context: Any) -> torch.Tensor:
    """The heads of a rank in the place of another rank's."""
    return to_tokens(mixed, context).roll(1, dims=1)


def _shifted_in_parts(*about: Any, plain: Any = Batches._gather) -> Any:
    """The targets of a rank's tokens, as if these were a row."""
    batch = plain(*about)
    if batch.context is not None:
        batch.targets[:, :-1] = batch.tokens[:, 1:]
        batch.targets[:, -1] = batch.tokens[:, 0]
    return batch


def _first_positions(documents: Documents) -> torch.Tensor:
    """The positions of the first rank."""
    assert documents.context is not None
    return documents.positions.chunk(documents.context.size, 1)[0]


TEXT: dict[str, tuple[Callable[[], Any], str]] = {
    "frozen": (lambda: _module_with(_frozen), f"{LAYER}.mlp.down_proj.weight: is frozen"),
    "cut off": (lambda: _module_with(_cut_off), f"{LAYER}: no parameter has a gradient"),
    "masters": (
        lambda: mock.patch.object(Precision, "dtype_of_master", return_value=torch.bfloat16),
        "master_dtype is bfloat16; precision.master_dtype=float32",
    ),
    "moments": (
        lambda: _moments_in(torch.bfloat16),
        "exp_avg is bfloat16; expected float32 (optimizer.state_dtype=auto)",
    ),
    "divided": (lambda: mock.patch.object(step, "summed_loss", _divided), "gradient norm "),
    "divided everywhere": (_divided_everywhere, "gradient norm "),
    "counted": (
        lambda: mock.patch.object(step, "record_step", _counted_twice),
        "loss over 384 tokens; expected 192",
    ),
}  # fmt: skip
SHARED: dict[str, tuple[Callable[[], Any], str]] = {
    "exchanged": (lambda: mock.patch.object(attention, "to_tokens", _of_other_heads), "gradient n"),
    "shifted": (lambda: mock.patch.object(Batches, "_gather", _shifted_in_parts), "gradient norm "),
    "positions": (
        lambda: mock.patch.object(Documents, "own_positions", property(_first_positions)),
        "gradient norm ",
    ),
}  # fmt: skip
CHATS: dict[str, tuple[Callable[[], Any], str]] = {
    "leak": (
        lambda: mock.patch.object(loss, "_documents", return_value={}),
        "packed documents see each other",
    ),
    "auxiliary": (
        lambda: mock.patch.object(TransformersDecoder, "_balance", _balance),
        "the auxiliary loss of the routers has no gradient",
    ),
    "auxiliary in chunks": (
        lambda: mock.patch.object(TransformersDecoder, "forward", _unbalanced_in_chunks),
        "the auxiliary loss of the routers has no gradient",
    ),
}


def _found(typed: list[str], folder: str, plant: Any) -> str:
    """Return the error of a run with a plant, or an empty string."""
    with plant:
        trainer = made([*typed, f"train.run_dir={folder}"])
        try:
            trainer.run()
        except SelfCheckError as error:
            return str(error)
    return ""


@distributed(timeout=150)
def check(rank: int, world_size: int, typed: list[str], folder: str, names: list[str]) -> None:
    """Train with each plant and without one."""
    for name in names:
        plant, expected = {**TEXT, **SHARED, **CHATS}[name]
        found = _found(typed, f"{folder}/{name}", plant())
        assert expected in found, (name, found)
    assert not _found(typed, f"{folder}/none", mock.patch.dict({}))
    lines = Path(f"{folder}/none/metrics.jsonl").read_text().splitlines()
    written = [line for line in map(json.loads, lines) if "self_check" in line]
    assert [each["self_check"] for each in written] == [[]]


def test_mistakes_are_found(tmp_path):
    more = ["train.steps=2", "train.self_check=auto"]
    check(world_size=2, typed=words(tmp_path, 2, *more), folder=str(tmp_path), names=list(TEXT))


def test_mistakes_are_found_where_ranks_share_samples(tmp_path):
    more = ["train.steps=2", "train.self_check=auto", "train.context_parallel=2",
            "train.seq_len=128"]  # fmt: skip
    check(world_size=2, typed=words(tmp_path, 2, *more), folder=str(tmp_path), names=list(SHARED))


@distributed(timeout=150)
def check_moments(
    rank: int, world_size: int, typed: list[str], folder: str, kinds: list[str]
) -> None:
    """Train with the moments of each kind, and with float32 in place of 8 bits."""
    for number, kind in enumerate(kinds):
        more = [*typed, *kind.split()]
        assert not _found(more, f"{folder}/{number}", mock.patch.dict({})), kind
    found = _found(
        [*typed, "optimizer.state_dtype=int8"], f"{folder}/8", _moments_in(torch.float32)
    )
    assert "exp_avg is float32; expected int8 (optimizer.state_dtype=int8)" in found


def test_moments_may_have_every_dtype(tmp_path):
    kinds = [
        "optimizer.state_dtype=int8", "optimizer.state_dtype=bfloat16", "optimizer=sgd",
        "optimizer=muon strategy=shard_optimizer", "precision=bf16_true",
    ]  # fmt: skip
    typed = words(tmp_path, 2, "train.steps=2", "train.self_check=auto")
    check_moments(world_size=2, typed=typed, folder=str(tmp_path), kinds=kinds)


def _at_step(number: int, change: Callable[[float], float]) -> Any:
    """Change the learning rate of one step."""

    def factor(config: Any, at: int, steps: int) -> float:
        found = lr_factor(config, at, steps)
        return change(found) if at + 1 == number else found

    return mock.patch.object(step, "lr_factor", factor)


def _no_step(rank: int | None = None) -> Any:
    """Let the optimizer change nothing, on all ranks or on one."""
    if rank not in (None, torch.distributed.get_rank()):
        return mock.patch.dict({})
    return mock.patch.object(ShardedAdamW, "_step_runs", return_value=None)


def _skips_first() -> Any:
    plain, count = loss.summed_loss, iter(range(1_000))

    def planted(*about: Any) -> Any:
        return plain(*about) * (float("nan") if next(count) == 0 else 1)

    return mock.patch.object(step, "summed_loss", planted)


# Plants, settings, and the steps with a warning.
UNCHANGED: dict[str, tuple[list[Callable[[], Any]], str, list[int]]] = {
    "nothing changes": ([_no_step], "", [1]),
    "nothing changes after a first rate of 0": (
        [_no_step, lambda: _at_step(1, lambda lr: 0.0)], "", [2]
    ),
    "nothing changes after a skipped step": (
        [_no_step, _skips_first], "train.on_nonfinite=skip train.self_check=warn", [2]
    ),
    "a first rate of 0": ([lambda: _at_step(1, lambda lr: 0.0)], "", []),
    "a skipped step": ([_skips_first], "train.on_nonfinite=skip train.self_check=warn", []),
    "one rank changes nothing": ([lambda: _no_step(1)], "strategy=full_shard", []),
    "a rate below the bits of masters": (
        [], "precision=bf16_true optimizer=sgd optimizer.lr=1e-20", [1]
    ),
    "masters of 24 bits": ([], "precision=bf16 precision.master_dtype=bfloat16+int8", []),
    "no check": ([_no_step], "train.self_check=off", []),
}  # fmt: skip


@distributed(timeout=150)
def check_unchanged(rank: int, world_size: int, typed: list[str], folder: str) -> None:
    for number, (name, (plants, more, expected)) in enumerate(UNCHANGED.items()):
        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            last = dict(word.split("=", 1) for word in [*typed, *more.split()])
            settings = [f"{key}={value}" for key, value in last.items()]
            assert not _found(settings, f"{folder}/{number}", mock.patch.dict({})), name
        lines = Path(f"{folder}/{number}/metrics.jsonl").read_text().splitlines()
        written = [each for each in map(json.loads, lines) if "self_check" in each]
        found = [each["step"] for each in written if "changed no weight" in str(each)]
        assert found == expected, name


def test_a_step_that_changes_no_weight_has_a_warning(tmp_path):
    typed = words(tmp_path, 2, "train.steps=3", "train.self_check=auto")
    check_unchanged(world_size=2, typed=typed, folder=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_mistakes_are_found_with_packed_chats(tmp_path, family):
    chats = make_chats(tmp_path / "chats.jsonl")
    model = make_chat_model(tmp_path / "model", family)
    kind = ["model=transformers", "model.router_aux_loss=global"] * (family == "mixtral")
    typed = [
        *(kind or ["model=hf"]), f"model.path={model}", "data=chat", f"data.path={chats}",
        "train.seq_len=64", "train.global_batch_size=4", "train.steps=2", "train.self_check=auto",
        "launch.nproc_per_node=2", "launch.device=cpu", "data.val_fraction=0",
        "train.sample_tokens=0", "precision=fp32", "train.loss_chunk_tokens=32",
    ]  # fmt: skip
    names = list(CHATS) if kind else ["leak"]
    check(world_size=2, typed=typed, folder=str(tmp_path), names=names)


# Parameters that transformers freezes, an encoder that a decoder does not run, and buffers that
# only building a module computes.
@pytest.mark.parametrize(
    "family",
    fast(slow=["ernie4_5_moe", "git", "marian", "pegasus", "apertus", "phi4_multimodal", "afmoe"]),
)
@distributed(world_size=1)
def test_families_of_transformers_pass(
    rank: int, world_size: int, family: str, tmp_path: Path
) -> None:
    save_decoder(family, tmp_path / "model", vocab_size=320)
    typed = [
        "model=transformers", f"model.path={tmp_path / 'model'}", "data=text",
        f"data.path={make_text(tmp_path)}", "data.val_fraction=0", "train.seq_len=16",
        "train.global_batch_size=2", "train.steps=1", "train.self_check=auto", "precision=fp32",
        "launch.nproc_per_node=1", "launch.device=cpu", "train.sample_tokens=0",
    ]  # fmt: skip
    assert not _found(typed, f"{tmp_path}/run", mock.patch.dict({}))
