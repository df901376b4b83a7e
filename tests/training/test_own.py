"""The module, loss and data of a script: any number of ranks trains like one process."""

import copy
import signal
import subprocess
import sys
import time
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding

from docs.examples.regression import Measurements, Model, squared_error
from fsdpctl.comm.world import World
from fsdpctl.commands import script
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model import NO_DECODER
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.order import samples_at
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.errors import ExitCode, FsdpctlError, StoppedError, UsageError
from fsdpctl.models.transformers_decoder import eval_mode
from fsdpctl.resolve.launchers import LaunchRole
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import make_run_plan, stored_plan
from fsdpctl.resolve.script_module import compose_task, make_task
from fsdpctl.run.directory import inspect_run_dir, prepare_run_dir
from fsdpctl.run.step_metrics import RESERVED_NAMES
from fsdpctl.training.assemble import make_trainer
from fsdpctl.training.script_loss import NamedSums, _to_device, script_loss
from fsdpctl.training.train_step import LaunchContext
from tests.distributed import distributed
from tests.training.ranks import CPU, lines

SIZE, STEPS, RATE = 10, 6, 1e-2
SETTINGS = [
    f"train.steps={STEPS}", f"train.global_batch_size={SIZE}", "launch.device=cpu",
    f"optimizer.lr={RATE}", "lr_scheduler=constant", "lr_scheduler.warmup_steps=0",
    "train.eval_every=2", "checkpoint.every=2", "checkpoint.mode=sync", "checkpoint.keep_last=0",
]  # fmt: skip


class Changing(nn.Module):
    """A module with statistics, dropout, and a parameter that only one kind of batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.model = nn.BatchNorm1d(2), Model(16, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, inputs: Tensor, time: Tensor) -> Tensor:
        out: Tensor = self.model(self.drop(self.norm(inputs)), time)
        return out


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


class Noisy(Measurements):
    """Samples with random numbers of torch and NumPy, which differ each time."""

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        result = super().__getitem__(number)
        return result | {"place": result["place"] + torch.rand(2) + np.random.rand()}


def trained(
    folder: Path, module: nn.Module, data: Any, *more: str, stop: Callable[[], bool] = bool,
    loss: Any = squared_error,
) -> dict[str, Tensor]:  # fmt: skip
    """Train to the end, or to a stop; return the weights and buffers of rank 0."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    task = make_task(module, loss, data, type(data)(23, seed=2), None)
    composed, args = compose_task(task, [*SETTINGS, f"train.run_dir={folder}", *more], None)
    launch = composed.config.launch
    opened = prepare(composed, LaunchRole(replace(launch, nproc_per_node=world_size)), task=task)
    seen = inspect_run_dir(opened.config, "auto")
    dist.barrier()
    if rank == 0:
        seen.run_dir.mkdir(exist_ok=True)
        prepare_run_dir(seen, make_run_plan(seen.config).config, args, {})
    dist.barrier()
    context = LaunchContext(stop, time.time(), lambda wait_for_all: wait_for_all())
    world = World(rank, rank, world_size, CPU)
    plan = stored_plan(make_run_plan(seen.config).config)
    trainer = make_trainer(plan, world, context, shows=False, task=task)
    try:
        trainer.run()
        assert not stop()
    except StoppedError:
        assert stop()
    state: dict[str, Tensor] = trainer.parts.model.state_dict()
    return state


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@distributed()
def test_ranks_train_like_one(rank: int, world_size: int, strategy: str, tmp_path: Path) -> None:
    args = [f"strategy={strategy}", "train.micro_batch_size=2", "accumulation=last"]
    folder = tmp_path / "run"
    torch.manual_seed(0)
    module, data = Model(16, 2), Measurements(37, seed=1)
    plain = copy.deepcopy(module)
    losses = trained(folder, module, data, *args)
    matrices = [each for each in plain.parameters() if each.ndim > 1]
    others = [each for each in plain.parameters() if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    for step in range(STEPS):
        numbers = samples_at(step * SIZE, SIZE, len(data), 0)
        samples = [data[int(number)] for number in numbers]
        loss, count = squared_error(plain, torch.utils.data.default_collate(samples))
        (loss / count).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        line = [each for each in lines(folder) if "grad_norm" in each][step] if rank == 0 else None
        if line is not None:
            assert line["loss_count"] == int(count)
            assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
            assert line["loss"] == pytest.approx(float(loss.detach() / count), rel=1e-5)
    expected = plain.state_dict()
    assert losses.keys() == expected.keys()
    for name, value in losses.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        samples = list(map(Measurements(23, seed=2).__getitem__, range(23)))
        loss, count = squared_error(plain, torch.utils.data.default_collate(samples))
    if rank == 0:
        validated = [each["val_loss"] for each in lines(folder) if "val_loss" in each]
        assert len(validated) == STEPS // 2
        assert validated[-1] == pytest.approx(float(loss / count), rel=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@distributed()
def test_an_interruption_changes_no_bit(rank: int, world_size: int, tmp_path: Path) -> None:
    def begin() -> nn.Module:
        torch.manual_seed(rank)  # all ranks start with the values of rank 0
        return Changing()

    data, polls = Noisy(37, seed=1), 0
    expected = trained(tmp_path / "whole", begin(), data, "checkpoint.keep_best=true")

    def soon() -> bool:
        nonlocal polls
        polls += 1
        return polls >= 2 + world_size  # after the third step, or before a validation

    for stop in (soon, bool):
        losses = trained(tmp_path / "cut", begin(), data, "checkpoint.keep_best=true", stop=stop)
    for name, value in losses.items():
        assert torch.equal(value, expected[name]), name
    if rank == 0:
        whole, cut = (
            [(x["step"], x.get("loss"), x.get("val_loss")) for x in lines(tmp_path / name)]
            for name in ("whole", "cut")
        )
        assert whole == cut


def measured(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, ...]:
    """Return the loss of the example and named sums of every type, one of them in training only."""
    total, count = squared_error(model, batch)
    size = len(batch["time"])
    sums = {"same": total, "size": size, "half": np.float32(size / 2), "known": count}
    return total, count, sums | ({"steps/in.training": True} if model.training else {})


@pytest.mark.parametrize(("world_size", "more"), [
    (1, ["precision=bf16", "strategy=no_shard"]), (2, ["accumulation=last"]),
    pytest.param(3, ["train.compile=true"], marks=pytest.mark.slow),
])  # fmt: skip
@distributed()
def test_named_sums_are_of_all_ranks_and_micro_batches_and_change_no_bit(
    rank: int, world_size: int, more: list[str], tmp_path: Path
) -> None:
    args, results = ["train.micro_batch_size=2", *more], []
    for name, loss in (("plain", squared_error), ("named", measured)):
        torch.manual_seed(0)
        trained(tmp_path / name, Model(16, 2), Measurements(37, seed=1), *args, loss=loss)
        results.append(lines(tmp_path / name) if rank == 0 else [])
    for line, plain in zip(*reversed(results), strict=True):
        assert {x: line[x] for x in ("loss", "val_loss", "grad_norm") if x in line} == {
            x: plain[x] for x in ("loss", "val_loss", "grad_norm") if x in plain
        }
        start = "" if "loss" in line else "val_"
        assert plain.keys() - {"val_loss"} <= RESERVED_NAMES
        assert line[f"{start}same"] == line[f"{start}loss"]
        assert line[f"{start}known"] == 1
        assert line[f"{start}size"] == 2 * line[f"{start}half"]
        assert ("val_steps/in.training" in line, "steps/in.training" in line) == (False, not start)
        if not start:
            assert line["size"] * line["loss_count"] == pytest.approx(SIZE)


@distributed(world_size=2)
def test_names_that_differ_between_ranks_or_passes_are_refused(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    calls = 0

    def named(name: Callable[[], str]) -> Any:
        return lambda model, batch: (*squared_error(model, batch), {name(): 1})

    def counting() -> str:
        nonlocal calls
        calls += 1
        return f"c{calls > 3}"

    for number, (name, message) in enumerate((
        (lambda: f"r{rank}", f"loss: rank {rank} has sums named r{rank}, rank {1 - rank} r"),
        (counting, "loss: expected sums named cFalse, as in its first call, got cTrue"),
    )):  # fmt: skip
        with pytest.raises(UsageError) as error:
            trained(tmp_path / str(number), Model(8, 1), Measurements(37, seed=1), loss=named(name))
        assert str(error.value).startswith(message)


GOOD: dict[str, Any] = {
    "module": Model(8, 1), "loss": squared_error, "data": Measurements(9, 0), "val_data": None,
    "collate": None,
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), [
    ({"module": Model}, r"module: expected a torch.nn.Module, got the class Model; pass an obj"),
    ({"module": nn.Embedding(4, 2, sparse=True)}, "sparse gradients are not supported"),
    ({"module": nn.Linear(2, 2, dtype=torch.complex64)}, "parameter weight is torch.complex64"),
    ({"module": nn.Linear(2, 2, device="meta")}, "parameter weight is on the meta device"),
    ({"module": nn.ReLU()}, "module: expected at least one trained parameter, got none"),
    ({"module": nn.BatchNorm1d(2).to(torch.float8_e5m2)}, "buffer running_mean is torch.float8"),
    ({"loss": 1}, "loss: expected a function, got int"),
    ({"collate": 1}, "collate_fn: expected a function, got int"),
    ({"data": iter([])}, "data: expected a map-style Dataset, with __getitem__ and __len__"),
    ({"val_data": []}, "val_data: expected at least one sample, got none"),
    ({"data": Stream()}, r"got Stream; pass a list of its samples: data=list\(samples\)"),
    ({"val_data": {"train": [1], "test": [2]}}, r"dict; pass one of its values.* \('train', "),
    ({"data": DataLoader(Stream())}, r"got DataLoader; pass its dataset: data=loader.dataset"),
    ({"data": (each for each in "ab")}, "got generator; pass a list of its samples"),
    ({"data": "samples.csv"}, "got str; pass the samples in this file"),
    ({"data": {1, 2}}, "got set; pass a list of its samples"),
])  # fmt: skip
def test_an_argument_that_cannot_work_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(FsdpctlError, match=message) as error:
        make_task(**GOOD | wrong)
    assert error.value.exit_code == ExitCode.USAGE


def test_a_script_that_is_refused_has_its_signal_handlers_again(monkeypatch, capsys) -> None:
    def refuse(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise FsdpctlError("refused")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("fsdpctl.resolve.script_module.make_task", refuse)
    with pytest.raises(SystemExit):
        script.train(module=nn.Linear(1, 1), loss=squared_error, data=[1])
    assert signal.getsignal(signal.SIGTERM) is before
    assert "refused" in capsys.readouterr().err


def test_a_dict_of_numbered_samples_is_data() -> None:
    assert make_task(**GOOD | {"data": {0: 1.0, 1: 2.0}}).data.fingerprint.startswith("2 samples")


@pytest.mark.parametrize(("args", "message"), [
    ("train.steps=1", "settings: expected a list of KEY=VALUE, got 'train.steps=1'"),
    ({"train.steps": 1}, "settings: expected a list of KEY=VALUE, got a dict; write ['train.s"),
    (None, "settings: expected a list of KEY=VALUE, got None"),
    (["model=gpt2"], "model=gpt2: only valid with a decoder"),
    (["data.path=a"], "data.path=a: only valid with a decoder"),
    (["train.seq_len=8"], "train.seq_len=8: only valid with a decoder"),
    (["train.sample_tokens=8"], "train.sample_tokens=8: only valid with a decoder"),
    (["train.context_parallel=2"], "train.context_parallel=2: only valid with a decoder"),
    (["engine=ddp"], "engine=ddp: only valid with a decoder"),
    (["cluster=h100"], "cluster=h100: only valid with a decoder"),
    (["strategy=auto"], "strategy=auto: selected by an estimate of a decoder; set a value"),
    (["train.stepz=1"], "train.stepz: no such key; did you mean train.steps?"),
])  # fmt: skip
def test_a_setting_of_decoders_is_named(args: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        compose_task(make_task(**GOOD), args, None)
    assert str(error.value).startswith(message)


def named(sums: Any) -> tuple[Any, ...]:
    return torch.ones((), requires_grad=True), 1, sums


@pytest.mark.parametrize(("result", "message"), [
    (1.0, "loss: expected a tuple (sum, count) or (sum, count, dict), got float"),
    ((torch.ones(2), 1), "loss: expected a sum, a tensor with one element, got shape [2]"),
    ((torch.ones(()), 1), "loss: the sum depends on no trained parameter; was it detached?"),
    ((torch.ones((), requires_grad=True), 1.5), "loss: expected a whole number as the count"),
    ((torch.ones((), requires_grad=True), -1), "loss: expected a whole number as the count"),
    ((torch.ones((), requires_grad=True), 1, {}, 1),
     "loss: expected a tuple (sum, count) or (sum, count, dict), got 4"),
    (named({"a": torch.ones((), dtype=torch.complex64)}), "loss: a: expected a number, or a tens"),
    (named({"a": 10**400}), "loss: a: expected a number, or a tensor with one element, got 1000"),
    (named([]), "loss: expected a dict of at most 100 named sums, got list"),
    (named({"a": torch.ones(2)}), "loss: a: expected a number, or a tensor with one elem"),
    (named({"a": "1"}), "loss: a: expected a number, or a tensor with one element, got '1'"),
    (named({"lr": 1}), "loss: lr: this name is used in metrics.jsonl; rename the sum"),
    (named({"val_a": 1}), "loss: 'val_a': expected as the name of a sum letters"),
    (named({1: 1}), "loss: 1: expected as the name of a sum letters"),
    (named({f"a{n}": 1 for n in range(101)}), "loss: expected a dict of at most 100 named sums"),
])  # fmt: skip
def test_a_loss_that_returns_something_else_is_named(result: Any, message: str) -> None:
    task = make_task(**GOOD | {"loss": lambda model, batch: result})
    batch = task.data.train.samples(1).script_batch([0])
    with pytest.raises(UsageError) as error:
        script_loss(shard_model(Model(8, 1), "no_shard"), batch, CPU, NamedSums())
    assert str(error.value).startswith(message)


class Named(NamedTuple):
    x: Tensor
    y: str


@dataclass(frozen=True, slots=True)
class Held:
    x: Tensor
    more: list[Tensor]


class Kept(UserDict[str, Tensor]):
    @property
    def x(self) -> Tensor:
        return self["x"]


class Moved:
    x: Tensor = torch.ones(2)

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)  # in place, returning nothing


@pytest.mark.parametrize("batch", [
    Named(torch.ones(2), "text"),
    Held(torch.ones(2), [torch.ones(1)]),
    Kept(x=torch.ones(2)),
    Moved(),
    OrderedDict(x=torch.ones(2).to_sparse(), y=np.ones(2)),
    BatchEncoding({"x": torch.ones(2)}),
], ids=lambda batch: type(batch).__name__)  # fmt: skip
def test_what_holds_the_tensors_of_a_batch_keeps_its_class(batch: Any) -> None:
    sent = _to_device(batch, torch.device("meta"))
    assert type(sent) is type(batch)
    assert (sent["x"] if isinstance(sent, OrderedDict) else sent.x).is_meta


def test_a_packed_sequence_keeps_its_sizes_on_the_cpu() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    sent = _to_device([packed], torch.device("meta"))[0]
    assert sent.data.is_meta
    assert sent.batch_sizes.device == CPU


@pytest.mark.parametrize("name", ["", "model.place", "model"])
def test_the_modes_of_a_script_stay(name: str) -> None:
    module = Changing()
    module.get_submodule(name).eval()
    modes = [each.training for each in module.modules()]
    (note,) = make_task(**GOOD | {"module": module}).notes
    assert f"{modes.count(False)} of its {len(modes)} modules are and stay in eval mode" in note
    with eval_mode(module):
        assert not any(each.training for each in module.modules())
    assert [each.training for each in module.modules()] == modes
    assert not make_task(**GOOD).notes


class Tabled(nn.Module):
    """A module whose own buffers, and a tensor of its forward, are float32, complex and integer."""

    table: Tensor
    turn: Tensor
    order: Tensor

    def __init__(self, norm: nn.Module, then: nn.Module) -> None:
        super().__init__()
        self.into, self.norm, self.then, self.out = nn.Linear(2, 4), norm, then, nn.Linear(4, 2)
        self.register_buffer("table", torch.linspace(-1, 1, 4) + 1e-3)
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("order", torch.tensor([3, 2, 1, 0]))

    def forward(self, inputs: Tensor, time: Tensor) -> Tensor:
        x = self.norm((self.into(inputs) + self.table)[:, self.order])
        turned = torch.view_as_complex(x.float().view(-1, 2, 2)) * self.turn
        out: Tensor = self.out(self.then(torch.view_as_real(turned).flatten(1)) * torch.ones(4))
        return out


def summed(model: Any, batch: Any) -> tuple[Tensor, int]:
    out = model(batch["place"], batch["time"])
    return nn.functional.mse_loss(out, torch.zeros(out.shape), reduction="sum"), len(out)


def in_bf16(module: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Train one step in bf16; return the state."""
    args = ["precision=bf16", "train.steps=1", "activation_checkpointing=full"]
    return trained(folder, module, Measurements(37, seed=1), *args, loss=summed)


@distributed(world_size=1)
def test_bf16_leaves_buffers_as_they_are(rank: int, world_size: int, tmp_path: Path) -> None:
    norms: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.BatchNorm1d(4),
        lambda: nn.LayerNorm(4),
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, 1e-5, 0.1, True, True), nn.Flatten()
        ),
    )
    for number, norm in enumerate(norms):
        module = Tabled(norm(), nn.GroupNorm(2, 4))
        before = {name: each.clone() for name, each in module.named_buffers()}
        result = in_bf16(module, tmp_path / str(number))
        assert {name: result[name].dtype for name in before} == {
            name: each.dtype for name, each in before.items()
        }
        for name in ("table", "turn", "order"):
            assert torch.equal(result[name], before[name])


@distributed(world_size=1)
def test_bf16_that_a_module_cannot_have_is_refused_with_what_helps(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    sources = (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Bilinear(4, 4, 4))
    for number, then in enumerate(sources):
        module = Tabled(nn.Identity(), then)
        if number:
            module.then.forward = lambda x, then=nn.Bilinear.forward: then(sources[1], x, x)
        with pytest.raises(UsageError, match=r"param_dtype=bfloat16: .*; set precision=fp32, or "):
            in_bf16(module, tmp_path / str(number))


def test_commands_that_need_a_decoder_reject_the_run_of_a_script() -> None:
    name = compose_task(make_task(**GOOD), [], None)[0].config.model.name
    for arg in (f"model={name}", "data=own"):
        with pytest.raises(UsageError, match=f"{arg}: {NO_DECODER}"):
            compose_config([arg])
    with pytest.raises(UsageError, match=f"runs/a: {NO_DECODER}"):
        config_of_checkpoint({"model": name}, "runs/a")


@pytest.mark.slow
def test_a_mistake_ends_a_script_in_one_line(tmp_path: Path) -> None:
    code = """
import fsdpctl
from docs.examples.regression import Measurements, Model
data = Measurements(9, 0)
fsdpctl.train(module=Model(), loss=lambda model, batch: 1, data=data, settings=["train.steps=1"])
"""
    command = [sys.executable, "-c", code]
    path = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.returncode == 2
    out = [each for each in done.stderr.splitlines() if not each.startswith("fsdpctl.train, ")]
    assert out == ["fsdpctl: loss: expected a tuple (sum, count) or (sum, count, dict), got int"]
