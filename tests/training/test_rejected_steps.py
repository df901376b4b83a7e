"""A non-finite or spiking step on one rank: all ranks reject and record the step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdpctl.checkpoint.training_progress import AcceptedStep, Progress
from fsdpctl.config.schema import KEYS
from fsdpctl.config.training import TrainConfig
from fsdpctl.data.batches import Batches
from fsdpctl.data.open_data import open_data
from fsdpctl.data.streams import TokenStream
from fsdpctl.optim.record import SpikeLimits, StepStats
from fsdpctl.plan.batch_plan import plan_batches
from fsdpctl.training.assemble import make_model
from fsdpctl.training.decoder_loss import summed_loss
from fsdpctl.training.rejected_steps import MIN_ACCEPTED, WINDOW, RejectionRule
from tests.commands.run import invoke
from tests.matrix import fast, matrix
from tests.reference import train_reference
from tests.training.ranks import CPU, Plants, lines, resolved, run_args, train

STEPS, BAD = 10, 6  # the batch of step 7; the newest checkpoint before it is that of step 4


def train_with_plants(
    folder: Path, typed: list[str], plants: Plants, **kwargs: Any
) -> tuple[dict[str, Tensor], str]:
    """Train with plants; return the last weights and the error."""
    ranks = int(next(arg for arg in typed if "nproc" in arg).split("=")[1])
    file = str(folder / "weights.pt")
    train(world_size=ranks, typed=typed, plants=plants, result=file, **kwargs)
    return torch.load(file), Path(f"{file}.error").read_text()


def reference(typed: list[str], numbers: list[int]) -> dict[str, Tensor]:
    """Train in one process like all ranks on numbered batches, one per step; return the state."""
    config = resolved(typed)
    ranks = config.launch.nproc_per_node or 0
    data = open_data(config.data)
    plan = plan_batches(config.train.global_batch_size, ranks)
    samples = data.train.samples(config.train.seq_len)
    batches = Batches(samples, plan, config.train.seed, data.vocab_size)
    nominal = plan.micro_batch_size * config.train.seq_len

    def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
        number, rank = tokens.tolist()
        batch = batches.training(number * plan.global_batch_size, rank, 0)
        return summed_loss(module, batch, CPU, config.train.loss_chunk_tokens or 0) / nominal

    inputs = [[[torch.tensor([each, rank])] for rank in range(ranks)] for each in numbers]
    module = make_model(config, CPU, strategy="no_shard").unwrap()
    return train_reference(module, loss_of, inputs)


def recorded(folder: Path) -> list[dict[str, Any]]:
    results = [line for line in lines(folder / "run") if "rejected_step" in line]
    return [{"step": each["step"], **each["rejected_step"]} for each in results]


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder / "run") if "loss" in line]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def typed_for(folder: Path, ranks: int, *more: str) -> list[str]:
    return run_args(folder, ranks, f"train.run_dir={folder / 'run'}", f"train.steps={STEPS}", *more)


SEEN = [each for each in range(STEPS) if each != BAD]


# With a lag of 1, as on CUDA, the next step is in flight when this one is checked.
@pytest.mark.slow
@matrix(what=["loss", "gradient"], lag=[0, 1])
@pytest.mark.parametrize("ranks", fast(2, slow=[3]))
def test_the_weights_are_those_of_one_process_without_the_rejected_step(tmp_path, ranks, what, lag):
    typed = typed_for(tmp_path, ranks, "train.on_nonfinite=skip")
    weights, error = train_with_plants(tmp_path, typed, {BAD: (what, 1)}, lag=lag)
    assert error == ""
    assert same(weights, reference(typed, SEEN))
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    (records,) = recorded(tmp_path)
    name = "nonfinite_loss" if what == "loss" else "nonfinite_grad"
    assert (records["step"], records["reason"], records["rank"]) == (BAD + 1, name, 1)
    assert ((records["action"], records["number"]), records["grad_norm"]) == (("skip", 1), "nan")
    assert set(records["rank_samples"]) < set(records["samples"])
    assert len(records["samples"]) == 12
    (last,) = (x for x in lines(tmp_path / "run") if x["step"] == STEPS and "loss" in x)
    assert last["samples"] == 12 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("what", fast("gradient", slow=["loss"]))
def test_a_run_stops_on_every_rank(tmp_path, what):
    _, error = train_with_plants(tmp_path, typed_for(tmp_path, 2), {BAD: (what, 1)})
    assert error.startswith(f"76 step {BAD + 1}: ")
    assert "rejected, training stops" in error
    assert ("rank 1" in error, [each["action"] for each in recorded(tmp_path)]) == (True, ["stop"])
    again = typed_for(tmp_path, 2, "train.on_nonfinite=skip")  # from step 4
    weights, error = train_with_plants(tmp_path, again, {BAD: (what, 1)})
    assert error == ""
    assert same(weights, reference(again, SEEN))
    assert [each["action"] for each in recorded(tmp_path)] == ["stop", "skip"]  # neither is removed


@pytest.mark.slow
def test_rejected_steps_are_counted_over_starts(tmp_path):
    typed = typed_for(tmp_path, 2, "train.on_nonfinite=skip", "train.max_skips=2")
    plants: Plants = {2: ("loss", 0), 5: ("gradient", 1), 8: ("loss", 1)}
    _, error = train_with_plants(tmp_path, typed, plants, stops_at=8)
    assert error.startswith("75 stopped at step 8 of")
    _, error = train_with_plants(tmp_path, typed, plants)
    assert error.startswith("76 step 9: ")
    assert "train.max_skips=2" in error
    assert [(e["number"], e["action"]) for e in recorded(tmp_path)] == [
        (1, "skip"), (2, "skip"), (3, "stop"),
    ]  # fmt: skip


SPIKES = ["train.spike_factor=20", "train.steps=48", "checkpoint.every=40"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loss spike", "gradient spike"])
def test_spikes_are_found_and_a_resumed_run_finds_the_same(tmp_path, what):
    ends = {}
    for name, options in {"whole": {}, "late": {"lag": 1}, "halves": {"stops_at": 42}}.items():
        folder = tmp_path / name
        folder.mkdir()
        typed = typed_for(folder, 2, "train.on_nonfinite=skip", *SPIKES)
        weights, error = train_with_plants(folder, typed, {44: (what, 1)}, **options)
        if name == "halves":
            assert error.startswith("75 stopped at step 42 of 48")
            weights, error = train_with_plants(folder, typed, {44: (what, 1)})
        assert error == ""
        ends[name] = weights, recorded(folder)
    weights, ((result), *others) = ends["whole"]
    assert not others
    assert result["reason"] == what.replace("gradient", "grad").replace(" ", "_")
    assert (result["step"], result["rank"], result["action"]) == (45, 1, "skip")
    value = result["loss"] if what == "loss spike" else result["grad_norm"]
    assert value > result["threshold"] > 0
    assert same(weights, ends["late"][0])
    assert ends["late"][1] == ends["whole"][1]
    expected = reference(typed_for(tmp_path, 2), [each for each in range(48) if each != 44])
    assert same(weights, expected)
    assert same(weights, ends["halves"][0])
    assert ends["halves"][1] == ends["whole"][1]


def figures(loss: float, norm: float = 1.0, *, was_applied: bool = True) -> StepStats:
    return StepStats(loss, norm, 1, was_applied, (), (loss, 1.0), (norm, 0.0))


def after(losses: list[float], **kwargs: Any) -> RejectionRule:
    numbers = RejectionRule(TrainConfig(spike_factor=5.0, **kwargs), Progress())
    for step, loss in enumerate(losses, start=1):
        assert numbers.evaluate(step, figures(loss), SpikeLimits()) is None
    return numbers


def test_a_limit_needs_32_values_and_knows_none_of_the_last_step():
    losses = [2.0 + 0.1 * (step % 2) for step in range(33)]
    assert after(losses[:32]).limits(33) == SpikeLimits()  # 31 of them are known
    assert after(losses).limits(34).loss == pytest.approx(2.05 + 5 * 1.4826 * 0.05)
    later = after([*losses, 1000.0])  # an accepted spike
    assert later.limits(35).loss == pytest.approx(after(losses).limits(35).loss)


def test_constant_values_have_a_limit_above_them():
    assert after([2.0] * 40).limits(41).loss == pytest.approx(2.0 + 5 * 1.4826 * 2e-3)


def test_a_fall_is_not_a_spike_and_rejected_steps_do_not_count():
    numbers = after([2.0 + 0.01 * (step % 3) for step in range(64)], on_nonfinite="skip")
    before = numbers.accepted
    limits = numbers.limits(66)
    assert limits.loss < 3.0
    assert numbers.evaluate(65, figures(9.0, was_applied=False), limits) is not None
    assert (numbers.accepted, numbers.evaluate(66, figures(0.001), limits)) == (before, None)
    assert numbers.accepted[-1] == AcceptedStep(66, 0.001, 0.0)


def test_only_the_last_steps_count():
    numbers = after([100.0] * 100 + [2.0] * 129)
    assert numbers.limits(230).loss < 3.0
    assert len(numbers.accepted) == WINDOW + 1


def test_the_help_and_the_page_tell_the_window():
    page = " ".join(Path("docs/long-runs.md").read_text().split())
    for text in (KEYS["train.spike_factor"].meaning, page):
        assert f"last {WINDOW} applied steps" in text
    assert f"fewer than {MIN_ACCEPTED} steps there is no threshold" in page


@pytest.mark.slow
def test_the_samples_of_a_bad_step_are_shown_as_text(tmp_path):
    typed = typed_for(tmp_path, 2, "train.on_nonfinite=skip", "strategy=shard_grad_op")
    train_with_plants(tmp_path, typed, {BAD: ("loss", 1)}, lag=1)
    code, out = invoke("data", "--run", str(tmp_path / "run"), "--step", str(BAD + 1))
    assert code == 0, out
    (records,) = recorded(tmp_path)
    assert "nonfinite_loss, on rank 1; skip" in out
    config = resolved(typed)
    stream = open_data(config.data).train
    assert isinstance(stream, TokenStream)
    length = config.train.seq_len
    for sample in records["samples"]:
        assert bytes(stream.tokens[sample * length : (sample + 1) * length + 1]).decode() in out
    assert (out.count("(rank 1)"), out.count("--- sample")) == (6, 12)
    only = invoke("data", "--run", str(tmp_path / "run"), "--step", str(BAD + 1), "--rank", "1")
    assert only[1].count("(rank 1)") == only[1].count("--- sample") == 6
    code, out = invoke("data", "--run", str(tmp_path / "run"), "--step", "2")
    assert (code, out.count("--- sample")) == (0, 12)
    code, out = invoke("data", "--run", str(tmp_path / "run"), "--step", "999")
    assert (code, out) == (
        2, f"--step 999: not found; {tmp_path / 'run'} has completed {STEPS} steps",
    )  # fmt: skip
