"""The public Python interface."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

import fsdpctl
from fsdpctl.errors import CheckpointError, EngineError, UsageError
from fsdpctl.plan.strategy import STRATEGIES
from tests.commands.run import invoke
from tests.distributed import distributed, in_turn
from tests.engine.events import gathered_nbytes
from tests.engine.models import make_net, next_token_loss, one_step, sharded, token_batches
from tests.engine.test_parity import largest_difference
from tests.matrix import WHOLE
from tests.reference import train_reference


def test_every_public_name_exists_and_is_documented():
    assert {*fsdpctl.__all__} < {*dir(fsdpctl)}
    for name in fsdpctl.__all__:
        assert getattr(fsdpctl, name).__doc__


@pytest.mark.slow
@WHOLE
@distributed(world_size=4)
def test_the_accumulator_returns_the_mean_of_full_and_partial_windows(rank, world_size, whole):
    batches = token_batches(2, world_size, micro_steps=3) + token_batches(1, world_size, 2)
    expected = train_reference(make_net(tied=True, dtype=torch.float64), next_token_loss, batches)
    strategies = list(STRATEGIES) if whole else ["full_shard", "hybrid_shard_optimizer"]
    for strategy in strategies:
        for reduce in ("every", "last"):
            model = sharded(strategy, dtype=torch.float64)
            optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
            accumulator = fsdpctl.GradAccumulator(model, steps=3, reduce=reduce)
            for of_ranks in batches:
                for batch in of_ranks[rank]:
                    assert not accumulator.ready
                    with accumulator.micro_step():
                        next_token_loss(model, batch).backward()
                accumulator.sync()
                assert accumulator.ready
                optimizer.step()
                optimizer.zero_grad()
                accumulator.ready = False
            assert largest_difference(model.state_dict(), expected) <= 1e-12, (strategy, reduce)


@distributed(world_size=4)
@in_turn(strategy=list(STRATEGIES))
def test_state_dict_and_load_state_dict_use_full_tensors(rank, world_size, strategy):
    model, plain = sharded(strategy), make_net(tied=True)
    assert largest_difference(model.state_dict(), plain.state_dict()) == 0.0
    other = {name: value + 1 for name, value in make_net(tied=True).state_dict().items()}
    other["head.weight"] = other["embed.weight"]
    model.load_state_dict(other)
    assert largest_difference(model.state_dict(), other) == 0.0
    plain.load_state_dict(other)
    batch = token_batches(1, 1)[0][0][0]
    assert torch.equal(model(batch), plain(batch))
    with pytest.raises(EngineError, match="norm.weight is missing"):
        model.load_state_dict({k: v for k, v in other.items() if k != "norm.weight"})
    with pytest.raises(EngineError, match="unknown nrom.weight; did you mean norm.weight?"):
        model.load_state_dict({**other, "nrom.weight": torch.zeros(13)})
    with pytest.raises(EngineError, match=r"norm.weight: expected .*, got \[3\]"):
        model.load_state_dict({**other, "norm.weight": torch.zeros(3)})


@pytest.mark.slow
@distributed(world_size=4)
@in_turn(strategy=list(STRATEGIES))
def test_full_parameters_are_unsharded_and_writable(rank, world_size, strategy):
    model = sharded(strategy)
    expected = make_net(tied=True).state_dict()
    with model.full_parameters():
        assert torch.equal(model.module.get_parameter("embed.weight"), expected["embed.weight"])
        with torch.no_grad():
            model.module.get_parameter("norm.weight").fill_(7.0)
    assert largest_difference(model.state_dict(), expected) == 0.0
    with model.full_parameters(writeback=True), torch.no_grad():
        model.module.get_parameter("norm.weight").fill_(float(rank + 3))
    assert (model.state_dict()["norm.weight"] == 3.0).all()
    model(token_batches(1, 1)[0][0][0])
    model.check_replicas()
    assert (model.unwrap().get_parameter("norm.weight") == 3.0).all()


@distributed(world_size=2)
@in_turn(strategy=["full_shard", "shard_grad_op"])
def test_full_parameters_free_the_memory_of_what_a_forward_gathered(rank, world_size, strategy):
    model = fsdpctl.shard_model(make_net(tied=False), strategy)
    at_rest = gathered_nbytes(model)
    model(token_batches(1, 1)[0][0][0])
    assert gathered_nbytes(model) > at_rest
    with model.full_parameters():
        assert gathered_nbytes(model) == at_rest


@distributed(world_size=2)
@in_turn(strategy=list(STRATEGIES))
def test_unwrap_returns_the_plain_module(rank: int, world_size: int, strategy: str) -> None:
    net = make_net(tied=True)
    model = fsdpctl.shard_model(net, strategy)
    batch = token_batches(1, 1)[0][0][0]
    expected = model(batch).detach()
    plain = model.unwrap()
    assert plain is net
    assert net.head.weight is net.embed.weight
    assert torch.equal(plain(batch), expected)
    plain(batch).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    plain.to(torch.float64)


@pytest.mark.slow
@distributed(world_size=4)
@in_turn(strategy=list(STRATEGIES))
def test_any_elementwise_optimizer_and_clipping_count_each_element_once(rank, world_size, strategy):
    model, plain = sharded(strategy), make_net(tied=True)
    optimizer = torch.optim.SGD(model.flat_parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for of_ranks in token_batches(3, world_size):
        next_token_loss(model, of_ranks[rank][0]).backward()
        norm = fsdpctl.clip_grad_norm_(model, 0.05)
        for other in of_ranks:
            (next_token_loss(plain, other[0]) / world_size).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        assert float(norm) > 0.05
        assert float(fsdpctl.clip_grad_norm_(model, 1.0)) == pytest.approx(0.05, rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    assert largest_difference(model.state_dict(), plain.state_dict()) <= 1e-6


@distributed(world_size=2)
def test_an_impossible_prefetch_raises_an_error(rank: int, world_size: int) -> None:
    model = fsdpctl.shard_model(make_net(tied=False), "full_shard")
    model.prefetch_forward_params()
    assert model.has_pending_prefetch
    with pytest.raises(EngineError, match="called twice"):
        model.prefetch_forward_params()
    expected = fsdpctl.shard_model(make_net(tied=False), "no_shard")
    batch = token_batches(1, 1)[0][0][0]
    assert torch.equal(model(batch), expected(batch))
    assert not model.has_pending_prefetch
    with pytest.raises(EngineError, match="no_shard has nothing to gather"):
        expected.prefetch_forward_params()


@pytest.mark.slow
@distributed(world_size=4)
@in_turn(strategy=list(STRATEGIES), bf16=[False, True])
def test_written_shards_reach_every_replica(rank, world_size, strategy, bf16):
    model = sharded(strategy, precision=fsdpctl.Precision(torch.bfloat16 if bf16 else None))
    numel = sum(shard.master.numel() for shard in model.flat_shards())
    message = rf"shape \[{numel}\], as this rank's shards have, got \[3\]"
    with pytest.raises(EngineError, match=message):
        model.update_shards(torch.zeros(3))
    model.update_shards(torch.full((numel,), 2.0))
    assert all((value == 2.0).all() for value in model.state_dict().values())
    plain = make_net(tied=True).to(torch.bfloat16 if bf16 else torch.float32)
    with torch.no_grad():
        for param in [*model.flat_parameters(), *plain.parameters()]:
            param.fill_(0.5)
    model.broadcast_updated_params()
    batch = token_batches(1, 1)[0][0][0]
    assert torch.equal(model(batch), plain(batch))
    model.check_replicas()


def scaled_step(model: fsdpctl.ShardedModel) -> None:
    optimizer = fsdpctl.ShardedAdamW(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(next_token_loss(model, token_batches(1, 1)[0][0][0])).backward()
    scaler.step(optimizer)


SLIPS = {
    "cast": (lambda model: model.half(), "moving or casting"),
    "its module cast": (lambda model: model.module.to(torch.float64), "moving or casting"),
    "frozen": (lambda model: model.requires_grad_(False), "requires_grad_ is not possible"),
    "copied": (lambda model: copy.deepcopy(model), "copying the model"),
    "pickled": (lambda model: pickle.dumps(model), "pickling the model"),
    "torch's optimizer": (
        lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(), "exist only while the",
    ),
    "no window": (lambda model: fsdpctl.GradAccumulator(model, 0), "expected at least 1"),
    "a typing error": (
        lambda model: fsdpctl.GradAccumulator(model, 2, reduce="lst"), "did you mean last",  # type: ignore[arg-type]
    ),
    "sharded twice": (lambda model: fsdpctl.shard_model(model), "sharded already"),
    "its module again": (lambda model: fsdpctl.shard_model(model.module), "sharded already"),
    "a module around it": (
        lambda model: fsdpctl.shard_model(torch.nn.Sequential(model.module)), "sharded already",
    ),
    "an optimizer of parameters": (
        lambda model: fsdpctl.ShardedAdamW(model.parameters()), "the model that shard_model",
    ),
    "clipped parameters": (
        lambda model: fsdpctl.clip_grad_norm_(model.parameters(), 1.0), "expected the model",
    ),
    "groups of parameters": (
        lambda model: fsdpctl.ShardedAdamW(model, param_groups=[{"params": []}]), "names of param",
    ),
    "shards of a list": (lambda model: model.update_shards([0.0]), "expected a 1-D tensor"),
    "a scaler": (lambda model: scaled_step(model), "use bf16, which needs no scaling"),
    "an average": (lambda model: torch.optim.swa_utils.AveragedModel(model), "copying the model"),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_common_mistakes_raise_errors_with_the_correct_call(slip):
    make, message = SLIPS[slip]
    model = fsdpctl.shard_model(make_net(tied=True), "full_shard")
    with pytest.raises((UsageError, EngineError), match=message):
        make(model)


@distributed(world_size=2)
@in_turn(strategy=["full_shard", "shard_grad_op"])
def test_the_modules_own_state_dict_is_refused_between_steps(rank, world_size, strategy):
    net = make_net(tied=True)
    model = fsdpctl.shard_model(net, strategy)
    for part in (net, net.blocks[0]):
        with pytest.raises(EngineError, match=r"call model.state_dict\(\)"):
            part.state_dict()
        with pytest.raises(EngineError, match="copying the module"):
            copy.deepcopy(part)
    whole = model.state_dict()
    with model.full_parameters():
        assert largest_difference(net.state_dict(), whole) == 0.0
        assert largest_difference(copy.deepcopy(net.norm).state_dict(), net.norm.state_dict()) == 0
    with pytest.raises(EngineError, match="synchronizes gradients itself"):
        torch.nn.parallel.DistributedDataParallel(model)
    assert largest_difference(copy.deepcopy(model.unwrap()).state_dict(), whole) == 0.0


def test_attributes_of_the_module_are_available():
    net = make_net(tied=True)
    net.config = {"width": 3}  # type: ignore[assignment]  # as those of transformers have
    model = fsdpctl.shard_model(net, "full_shard")
    assert model.config is net.config
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense
    assert not hasattr(model, "_nonsense")


@distributed(world_size=2)
def test_parameter_groups_by_name(rank: int, world_size: int) -> None:
    model = fsdpctl.shard_model(make_net(tied=True), "full_shard")
    groups = [{"names": ["blocks.1.up.weight"], "lr": 0.0, "weight_decay": 0.0}]
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2, param_groups=groups)
    before = model.state_dict()
    one_step(model, optimizer, token_batches(1, world_size)[0][rank][0])
    after = model.state_dict()
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == ["blocks.1.up.weight"]
    with pytest.raises(UsageError, match=r"did you mean blocks.1.up.weight?"):
        fsdpctl.ShardedAdamW(model, param_groups=[{"names": ["blocks.1.up.wait"]}])


@distributed(world_size=2)
def test_save_and_load_return_what_was_given(rank: int, world_size: int, tmp_path: Path) -> None:
    model = fsdpctl.shard_model(make_net(tied=True), "full_shard")
    optimizer = fsdpctl.ShardedAdamW(model, lr=1e-2)
    one_step(model, optimizer, token_batches(1, world_size)[0][rank][0])
    fsdpctl.save_checkpoint(tmp_path / "c", model, optimizer, extra={"epoch": 3})
    other = fsdpctl.shard_model(make_net(tied=True), "no_shard")
    its_optimizer = fsdpctl.ShardedAdamW(other, lr=1e-2)
    plain: Any = make_net(tied=True)
    with pytest.raises(UsageError, match="expected a sharded model, got "):
        fsdpctl.load_checkpoint(tmp_path / "c", plain)
    assert fsdpctl.load_checkpoint(tmp_path / "c", other, its_optimizer) == {"epoch": 3}
    batch = token_batches(2, world_size)[1][rank][0]
    one_step(model, optimizer, batch)
    one_step(other, its_optimizer, batch)
    assert largest_difference(model.state_dict(), other.state_dict()) == 0.0
    with pytest.raises(UsageError, match="already exists"):
        fsdpctl.save_checkpoint(tmp_path / "c", model, optimizer)


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "SGD without states": lambda params: torch.optim.SGD(params, lr=1e-2),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
}


@distributed(world_size=2)
@in_turn(name=list(OPTIMIZERS))
def test_an_optimizer_on_flat_parameters_resumes_anywhere(rank, world_size, name, tmp_path):
    model = fsdpctl.shard_model(make_net(tied=True), "full_shard")
    optimizer = OPTIMIZERS[name](model.flat_parameters())
    batches = [of_ranks[rank][0] for of_ranks in token_batches(4, world_size)]
    for batch in batches[:2]:
        one_step(model, optimizer, batch)
    fsdpctl.save_checkpoint(tmp_path / name, model, optimizer)
    other = fsdpctl.shard_model(make_net(tied=True), "no_shard")
    its_optimizer = OPTIMIZERS[name](other.flat_parameters())
    fsdpctl.load_checkpoint(tmp_path / name, other, its_optimizer)
    for batch in batches[2:]:
        one_step(model, optimizer, batch)
        one_step(other, its_optimizer, batch)
    assert largest_difference(model.state_dict(), other.state_dict()) == 0.0


def test_a_scheduler_resumes_with_its_learning_rate(tmp_path):
    def make():
        model = fsdpctl.shard_model(make_net(tied=True), "full_shard")
        optimizer = fsdpctl.ShardedAdamW(model, lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    batch = token_batches(1, 1)[0][0][0]
    model, optimizer, scheduler = make()
    for _ in range(5):
        one_step(model, optimizer, batch)
        scheduler.step()
    extra = {"scheduler": scheduler.state_dict()}
    fsdpctl.save_checkpoint(tmp_path / "c", model, optimizer, extra=extra)
    out = invoke("inspect-checkpoint", str(tmp_path / "c"))[1]
    assert out.splitlines()[0].endswith("a custom model, optimizer step 5")
    with pytest.raises(CheckpointError, match="/d: not found$"):
        fsdpctl.load_checkpoint(tmp_path / "d", model)
    other, its_optimizer, its_scheduler = make()
    loaded = fsdpctl.load_checkpoint(tmp_path / "c", other, its_optimizer)
    its_scheduler.load_state_dict(loaded["scheduler"])
    for _ in range(3):
        one_step(model, optimizer, batch)
        scheduler.step()
        one_step(other, its_optimizer, batch)
        its_scheduler.step()
        rates = ([g["lr"] for g in each.param_groups] for each in (optimizer, its_optimizer))
        assert next(rates) == next(rates)
    assert its_optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert largest_difference(model.state_dict(), other.state_dict()) == 0.0


def test_an_optimizer_of_another_model_is_not_saved(tmp_path):
    model = fsdpctl.shard_model(make_net(tied=True), "full_shard")
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    with pytest.raises(UsageError, match="expected ShardedAdamW"):
        fsdpctl.save_checkpoint(tmp_path / "c", model, stranger)


@pytest.mark.parametrize(("arguments", "message"), [
    ((torch.nn.Linear,), r"got the class Linear; pass an object of it, Linear\(…\)"),
    (([torch.nn.ReLU()],), "module: expected a torch.nn.Module, got list"),
    ((torch.nn.Linear(2, 2), "FULL_SHARD"), "strategy=FULL_SHARD: .*did you mean full_shard"),
    ((torch.nn.Linear(2, 2), ShardingStrategy.SHARD_GRAD_OP), "did you mean shard_grad_op"),
    ((torch.nn.Linear(2, 2), None), "strategy=None: expected one of no_shard"),
    *(
        ((torch.nn.Linear(2, 2), fsdpctl.Sharding(units=units)), 'expected "auto" or a list of')  # type: ignore[arg-type]
        for units in ("blocks", torch.nn.Linear, ["Linear"], [])
    ),
])  # fmt: skip
def test_what_cannot_be_sharded_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fsdpctl.shard_model(*arguments)


@pytest.mark.parametrize(("name", "args", "message"), [
    ("precision", "bf16", r"precision: expected a fsdpctl.Precision, got 'bf16'; pass"),
    ("precision", torch.bfloat16, r"got torch.bfloat16; pass precision=fsdpctl.Precision\(…\)"),
    ("prefetch", 2, "prefetch: expected a fsdpctl.Prefetch, got 2"),
])  # fmt: skip
def test_arguments_of_another_type_are_named(name: str, args: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fsdpctl.shard_model(torch.nn.Linear(2, 2), **{name: args})


@pytest.mark.parametrize("dtype", ["bfloat", torch.float8_e5m2, torch.complex64, int])
def test_an_unknown_dtype_is_named(dtype: Any) -> None:
    with pytest.raises(UsageError, match=r"master_dtype=.*: expected one of float32, bfloat16"):
        fsdpctl.Precision(master_dtype=dtype)


def test_dtypes_may_be_names() -> None:
    by_name = fsdpctl.Precision("bfloat16").buffer_dtypes("float32")
    assert by_name == fsdpctl.Precision(torch.bfloat16).buffer_dtypes("float32")
