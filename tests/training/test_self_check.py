"""The check of the first step: each planted mistake is named, and a correct run passes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdpctl.data.batches import Batches
from fsdpctl.errors import SelfCheckError
from fsdpctl.models import attention, decoder_check
from fsdpctl.models.context_parallel import heads_to_tokens
from fsdpctl.models.packed_documents import PackedDocuments
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.run.environment import read_starts
from fsdpctl.training import assemble, decoder_loss, train_step, validation_loss
from fsdpctl.training.callbacks import self_check
from fsdpctl.training.learning_rate import lr_factor
from tests.commands.run import make_text
from tests.distributed import distributed
from tests.matrix import fast
from tests.models.decoders import save_decoder
from tests.training.chats import make_chat_model, make_chats
from tests.training.ranks import new_trainer, run_args

LAYER = "model.layers.1"


def _cut_off() -> Any:
    make = assemble.make_module

    def changed(config: Any) -> nn.Module:
        module = make(config)
        layer = module.get_submodule(LAYER)
        forward = layer.forward
        layer.forward = lambda x, **more: x + 0 * forward(x, **more).detach()
        return module

    return mock.patch.object(assemble, "make_module", changed)


def _divided(*options: Any, plain: Any = decoder_loss.summed_loss) -> Any:
    return plain(*options) / 2


@contextmanager
def _divided_everywhere() -> Iterator[None]:
    """Halve the loss in all modules that compute it."""
    with ExitStack() as stack:
        for module in (validation_loss, train_step, self_check):
            stack.enter_context(mock.patch.object(module, "summed_loss", _divided))
        yield


def _of_other_heads(mixed: torch.Tensor, context: Any) -> torch.Tensor:
    """Give a rank the heads of another rank."""
    return heads_to_tokens(mixed, context).roll(1, dims=1)


def _shifted_in_parts(*options: Any, plain: Any = Batches._read_rows) -> Any:
    """Shift the targets within a rank's tokens, as if these were a row."""
    batch = plain(*options)
    if batch.context is not None:
        batch.targets[:, :-1] = batch.tokens[:, 1:]
        batch.targets[:, -1] = batch.tokens[:, 0]
    return batch


def _shifted_positions() -> Any:
    """Give every rank the positions of rank 0."""

    def first(documents: PackedDocuments) -> torch.Tensor:
        assert documents.context is not None
        return documents.positions.chunk(documents.context.size, 1)[0]

    return mock.patch.object(PackedDocuments, "local_positions", property(first))


TEXT: dict[str, tuple[Callable[[], Any], str]] = {
    "cut off": (_cut_off, f"{LAYER}: no parameter has a gradient"),
    "divided": (lambda: mock.patch.object(train_step, "summed_loss", _divided), "gradient norm "),
    "divided everywhere": (_divided_everywhere, "gradient norm "),
}  # fmt: skip
SHARED: dict[str, tuple[Callable[[], Any], str]] = {
    "exchanged": (
        lambda: mock.patch.object(attention, "heads_to_tokens", _of_other_heads), "gradient norm "
    ),
    "shifted": (
        lambda: mock.patch.object(Batches, "_read_rows", _shifted_in_parts), "gradient norm "
    ),
    "positions": (_shifted_positions, "gradient norm "),
}  # fmt: skip


def _error_of(typed: list[str], folder: str, plant: Any) -> str:
    """Return the error of a run with a plant, or an empty string."""
    # The check of shared rows would detect some plants first.
    with plant, mock.patch.object(decoder_check, "_shared_rows_problem", return_value=""):
        trainer = new_trainer([*typed, f"train.run_dir={folder}"])
        try:
            trainer.run()
        except SelfCheckError as error:
            return str(error)
    return ""


@distributed(timeout=150)
def check(rank: int, world_size: int, typed: list[str], folder: str, names: list[str]) -> None:
    """Train with each plant and without one."""
    for name in names:
        plant, expected = {**TEXT, **SHARED}[name]
        result = _error_of(typed, f"{folder}/{name}", plant())
        assert expected in result, (name, result)
    assert not _error_of(typed, f"{folder}/none", mock.patch.dict({}))
    assert read_starts(Path(folder, "none"))[-1]["record"]["self_check"] == []


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["[offload:2,full:1]", "full:4", "[selective:3]"])
def test_blocks_of_several_treatments_pass(blocks, tmp_path):
    """The copy of the check has fewer blocks than these settings name."""
    more = ["train.steps=2", "train.self_check=auto", "model.num_layers=4"]
    typed = run_args(tmp_path, 2, *more, f"activation_checkpointing.blocks={blocks}")
    check(world_size=2, typed=typed, folder=str(tmp_path), names=[])


@pytest.mark.slow
def test_mistakes_are_found(tmp_path):
    more = ["train.steps=2", "train.self_check=auto"]
    check(world_size=2, typed=run_args(tmp_path, 2, *more), folder=str(tmp_path), names=list(TEXT))


@pytest.mark.slow
def test_mistakes_are_found_where_ranks_share_samples(tmp_path):
    more = ["train.steps=2", "train.self_check=auto", "train.context_parallel=2",
            "train.seq_len=128"]  # fmt: skip
    check(world_size=2, typed=run_args(tmp_path, 2, *more), folder=str(tmp_path), names=[*SHARED])


def _at_step(number: int, change: Callable[[float], float]) -> Any:
    """Change the learning rate of one step."""

    def factor(config: Any, at: int, steps: int) -> float:
        result = lr_factor(config, at, steps)
        return change(result) if at + 1 == number else result

    return mock.patch.object(train_step, "lr_factor", factor)


def _no_step(rank: int | None = None) -> Any:
    """Let the optimizer change nothing, on all ranks or on one."""
    if rank not in (None, torch.distributed.get_rank()):
        return mock.patch.dict({})
    return mock.patch.object(ShardedAdamW, "_step_spans", return_value=None)


def _skips_first() -> Any:
    plain, count = decoder_loss.summed_loss, iter(range(1_000))

    def planted(*options: Any) -> Any:
        return plain(*options) * (float("nan") if next(count) == 0 else 1)

    return mock.patch.object(train_step, "summed_loss", planted)


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
    "a rate below the bits of masters": ([], "precision=bf16_true optimizer.lr=1e-20", [1]),
    "masters of 24 bits": ([], "precision=bf16 precision.master_dtype=bfloat16+int8", []),
    "no check": ([_no_step], "train.self_check=off", []),
}  # fmt: skip


@distributed(timeout=150)
def check_unchanged(rank: int, world_size: int, typed: list[str], folder: str) -> None:
    for number, (name, (plants, more, expected)) in enumerate(UNCHANGED.items()):
        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            last = dict(arg.split("=", 1) for arg in [*typed, *more.split()])
            settings = [f"{key}={value}" for key, value in last.items()]
            assert not _error_of(settings, f"{folder}/{number}", mock.patch.dict({})), name
        written = read_starts(Path(folder, str(number)))[-1]["record"].get("self_check", [])
        results = [each.split()[2] for each in written if "changed no weight" in each]
        assert results == list(map(str, expected)), name


@pytest.mark.slow
def test_a_step_that_changes_no_weight_has_a_warning(tmp_path):
    typed = run_args(tmp_path, 2, "train.steps=3", "train.self_check=auto")
    check_unchanged(world_size=2, typed=typed, folder=str(tmp_path))


@distributed(world_size=1)
def test_documents_that_see_each_other_are_found(rank, world_size, tmp_path):
    chats = make_chats(tmp_path / "chats.jsonl")
    typed = [
        "model=hf", f"model.path={make_chat_model(tmp_path / 'model', 'llama')}", "data=chat",
        f"data.path={chats}", "train.seq_len=64", "train.global_batch_size=4", "train.steps=1",
        "launch.nproc_per_node=1", "launch.device=cpu", "data.val_fraction=0", "precision=fp32",
        f"train.run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    trainer = new_trainer(typed)
    trainer.samples = 4
    assert not [*self_check._find_leaks(trainer)]
    with mock.patch.object(decoder_loss, "documents_of", return_value={}):
        (leak,) = self_check._find_leaks(trainer)
        assert leak == "packed documents attend to each other; set data.packing=false"


# An encoder that a decoder does not run, and buffers that only building a module computes.
@pytest.mark.parametrize("family", fast(slow=["git", "phi4_multimodal", "afmoe"]))
@distributed(world_size=1)
def test_families_of_transformers_pass(rank, world_size, family, tmp_path):
    save_decoder(family, tmp_path / "model", vocab_size=320)
    typed = [
        "model=hf", f"model.path={tmp_path / 'model'}", "data=text",
        f"data.path={make_text(tmp_path)}", "data.val_fraction=0", "train.seq_len=16",
        "train.global_batch_size=2", "train.steps=1", "train.self_check=auto", "precision=fp32",
        "launch.nproc_per_node=1", "launch.device=cpu", "train.sample_tokens=0",
    ]  # fmt: skip
    assert not _error_of(typed, f"{tmp_path}/run", mock.patch.dict({}))
