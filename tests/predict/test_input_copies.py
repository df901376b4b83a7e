"""The predicted copies of offloaded inputs: expected times and copied bytes."""

from itertools import pairwise

import pytest
import torch

from fsdpctl.training.assemble import make_model, make_optimizer
from tests.predict.test_host_steps import (
    DOWN,
    UP,
    Even,
    Host,
    copied_bytes,
    on_host,
    planned,
    predicted,
)
from tests.predict.test_properties import Free, Instant
from tests.predict.timeline import COMPUTE, spans
from tests.train_step import train_step

ON_DEVICE = "cluster=h100 strategy=full_shard precision=bf16 activation_checkpointing=full"
OFFLOADED = f"{ON_DEVICE} activation_checkpointing.offload=true"
INPUT = 16 * 32 * 2  # bytes of an input: positions, width, bf16; three of four blocks offload it
TWO = "accumulation.steps=2 train.global_batch_size=4"


def test_copies_that_take_no_time_cost_nothing(monkeypatch):
    on_host(monkeypatch, Host(), Even(), Instant())
    assert predicted(OFFLOADED).seconds == pytest.approx(predicted(ON_DEVICE).seconds, rel=1e-9)


def test_a_device_that_takes_no_time_waits_for_each_input_twice(monkeypatch):
    on_host(monkeypatch, Host(down=INPUT, up=INPUT / 2), Free(), Instant())
    for more, passes in (("", 1), (TWO, 2), ("accumulation.steps=5 train.global_batch_size=10", 5)):
        prediction = predicted(f"{OFFLOADED} {more}")
        assert prediction.seconds == pytest.approx(passes * 3 * (1 + 2))
        assert prediction.exposed_communication == pytest.approx(prediction.seconds)
        sent = prediction.simulated.sent_bytes  # of at most three passes
        assert sent[DOWN] == sent[UP] == min(passes, 3) * 3 * INPUT


def test_an_input_returns_while_the_block_after_it_is_recomputed(monkeypatch):
    on_host(monkeypatch, Host(down=INPUT * 1e6, up=INPUT * 1e6), Even(per_operator=1e-3), Instant())
    prediction = predicted(OFFLOADED)
    assert prediction.seconds == pytest.approx(predicted(ON_DEVICE).seconds, rel=1e-9)
    starts = {each.label: each.start for each in spans(prediction.simulated, COMPUTE)}
    layers = [f"model.layers.{number}" for number in range(4)]
    copies = (spans(prediction.simulated, queue) for queue in (DOWN, UP))
    down, up = ({each.label: each.start for each in of_queue} for of_queue in copies)
    assert list(down) == [f"input of {each}" for each in layers[:3]]
    for layer, after in pairwise(layers):
        assert down[f"input of {layer}"] == pytest.approx(starts[f"forward {layer}"])
        assert up[f"input of {layer}"] == pytest.approx(starts[f"backward {after}"])


def test_a_faster_link_is_never_slower():
    times = [
        predicted(f"{OFFLOADED} cluster.pcie_bandwidth={rate}").seconds for rate in (0.0005, 1, 50)
    ]
    assert times[0] > 1.2 * times[1] >= 1.2 * times[2]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_rank_copies_the_bytes_that_are_priced(passes):
    args = f"{OFFLOADED} launch.device=cpu launch.nproc_per_node=1 train.global_batch_size={passes}"
    args += f" accumulation.steps={passes}"
    config = planned(args).config
    model = make_model(config, torch.device("cpu"), trains=True)
    optimizer = make_optimizer(config, model)
    with copied_bytes() as copied:
        train_step(config, model, optimizer)
    sent = predicted(args).simulated.sent_bytes
    assert sum(copied) == sent[DOWN] + sent[UP] > 0
