"""Properties of a predicted step for any model and machine."""

from dataclasses import dataclass, replace

import pytest

from fsdpctl.config.compose import compose_config
from fsdpctl.errors import UsageError
from fsdpctl.estimate.cluster_specs import device_of
from fsdpctl.estimate.estimator import Estimator, StepPrediction
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.predict.hardware import GROUPED, NETWORK_LINKS, NODE_LINKS, CollectiveKind, GroupShape
from fsdpctl.predict.model_pass import Work, WorkKind
from fsdpctl.predict.simulator import Transfer
from fsdpctl.resolve.launchers import ESTIMATE_ROLE
from fsdpctl.resolve.prepare import prepare
from fsdpctl.resolve.run_plan import RunPlan, make_run_plan

TINY = (
    "model.num_layers=6 model.hidden_size=512 model.intermediate_size=1536 model.num_heads=8 "
    "model.num_kv_heads=8 model.vocab_size=4096 cluster=h100 launch.nnodes=2 train.seq_len=512 "
    "train.micro_batch_size=1 train.global_batch_size=16"
)
PREDICTOR = Estimator()


def planned(*args: str) -> RunPlan:
    named = {arg.partition("=")[0]: arg for arg in [*TINY.split(), *args]}
    return make_run_plan(prepare(compose_config(list(named.values())), ESTIMATE_ROLE).config)


def step(*args: str) -> StepPrediction:
    return PREDICTOR.predict(planned(*args))


@dataclass(frozen=True)
class Free:
    """A device that takes no time."""

    step_overhead: float = 0.0
    host_seconds: float = 0.0
    unit_seconds: float = 0.0

    def seconds(self, work: Work) -> float:
        return 0.0

    def copy_seconds(self, nbytes: float) -> float:
        return 0.0

    def optimizer_seconds(self, nbytes: float, moments: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Instant:
    """A network that takes no time."""

    def transfer(self, kind: CollectiveKind, nbytes: float, group: GroupShape) -> Transfer:
        return Transfer(NODE_LINKS, 0.0, 0.0, nbytes)


@dataclass(frozen=True)
class Plain:
    """A network without latency, on which rings send nbytes (n - 1) / n at 1 GB/s."""

    def transfer(self, kind: CollectiveKind, nbytes: float, group: GroupShape) -> Transfer:
        passes = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        sent = passes * nbytes * (group.ranks - 1) / group.ranks
        return Transfer(NODE_LINKS, 0.0, sent / 1e9, sent)


def on(monkeypatch: pytest.MonkeyPatch, device: object = None, network: object = None) -> None:
    if device is not None:
        monkeypatch.setattr("fsdpctl.estimate.estimator.device_of", lambda config: device)
    if network is not None:
        monkeypatch.setattr("fsdpctl.estimate.estimator.network_of", lambda config: network)


ALL = pytest.mark.parametrize("strategy", STRATEGIES)


@ALL
def test_without_communication_a_step_takes_its_computation(strategy, monkeypatch):
    on(monkeypatch, network=Instant())
    prediction = step(f"strategy={strategy}")
    assert prediction.exposed_communication == 0.0
    parts = prediction.simulated.seconds_by_phase.values()
    assert prediction.seconds == pytest.approx(sum(parts), rel=1e-9)


@ALL
def test_without_computation_a_step_takes_its_transfers(strategy, monkeypatch):
    on(monkeypatch, Free(), Plain())
    prediction = step(f"strategy={strategy}")
    sent = prediction.simulated.sent_bytes[NODE_LINKS]
    assert prediction.seconds == pytest.approx(sent / 1e9, rel=1e-6)
    assert prediction.seconds == pytest.approx(prediction.exposed_communication, rel=1e-9)


@ALL
def test_more_bandwidth_is_never_slower(strategy):
    def seconds(rate: int) -> float:
        links = (f"cluster.inter_bandwidth={rate}", f"cluster.intra_bandwidth={9 * rate}")
        return step(f"strategy={strategy}", *links).seconds

    assert seconds(10) <= seconds(1)


@pytest.mark.parametrize(("cluster", "gain"), [("h100", 989 / 2 / 67), ("a100_80", 8), ("t4", 1)])
def test_tf32_is_faster_in_products_alone(cluster, gain):
    config = planned(f"cluster={cluster}", "precision=fp32").config
    ieee, tf32 = device_of(config), device_of(config.changed({"precision": "tf32"}))
    assert tf32.peak_rates[4] == pytest.approx(gain * ieee.peak_rates[4])
    for name, share in ieee.attention_efficiency.items():
        rate = tf32.attention_efficiency[name] * tf32.peak_rates[4]
        assert rate == pytest.approx(share * ieee.peak_rates[4])


@pytest.mark.parametrize(("plain", "narrow"), [
    ([], ["optimizer.state_dtype=int8"]), ([], ["precision.master_dtype=bfloat16+int8"]),
    *((["model.lora.rank=2"], ["model.lora.rank=2", f"model.base_dtype={each}"])
      for each in ("nf4", "int8")),
])  # fmt: skip
def test_narrow_states_and_weights_cost_a_fifth_of_their_time_in_fused_kernels(plain, narrow):
    def cost(*more: str) -> float:
        size = ("model.hidden_size=8192", "model.intermediate_size=16384", "train.seq_len=2048")
        args = ("launch.nnodes=1", "strategy=no_shard", *size, *more)
        return step(*args, *narrow).seconds - step(*args, *plain).seconds

    eager = cost()
    assert eager > 0
    assert cost("train.compile=true") < 0.2 * eager


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "shard_grad_op"])
def test_more_prefetch_is_never_slower(strategy):
    times = [
        step(f"strategy={strategy}", f"prefetch.forward={n}", f"prefetch.backward={n}",
             "cluster.inter_bandwidth=5").seconds
        for n in (0, 1, 2)
    ]  # fmt: skip
    assert times[0] > times[1] * 1.01
    assert times[2] <= times[1] * 1.001


@ALL
def test_fewer_bytes_are_never_slower(strategy):
    wide = step(f"strategy={strategy}", "cluster.inter_bandwidth=2")
    narrow = step(f"strategy={strategy}", "cluster.inter_bandwidth=2", "precision=bf16_true")
    assert sum(narrow.simulated.sent_bytes.values()) < sum(wide.simulated.sent_bytes.values())
    assert narrow.seconds <= wide.seconds


@dataclass(frozen=True)
class TwoSpeeds:
    """A network without latency, whose rings are slower where they leave a node."""

    inter: float  # rate between nodes, relative to the rate within a node

    def transfer(self, kind: CollectiveKind, nbytes: float, group: GroupShape) -> Transfer:
        plain = Plain().transfer(kind, nbytes, group)
        share = self.inter * group.ranks_per_node if group.nodes > 1 else 1.0
        return replace(plain, seconds=plain.seconds / min(1.0, share))


@pytest.mark.parametrize("inter", [0.02, 0.05, 0.08, 0.1, 0.2, 0.8])
def test_replicas_win_exactly_if_the_links_are_slow_enough(inter, monkeypatch):
    on(monkeypatch, Free(), TwoSpeeds(inter))
    result = {name: step(f"strategy={name}") for name in ("full_shard", "hybrid_shard")}
    # Per byte: two gathers and a reduction of twice as wide gradients; replicas add an eighth.
    full = 4 * (15 / 16) / min(1.0, 8 * inter)
    hybrid = 4 * (7 / 8) + 2 * 2 * (1 / 2) / 8 / min(1.0, inter)
    assert (result["hybrid_shard"].seconds < result["full_shard"].seconds) == (hybrid < full)


def test_micro_batches_beyond_the_third_are_counted():
    few, more = (step(f"train.global_batch_size={16 * n}").seconds for n in (4, 8))
    once = step("train.global_batch_size=48").seconds
    assert more - few == pytest.approx(4 * (few - once), rel=1e-6)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_pytorchs_engines_send_at_least_as_much(engine):
    strategy = {"fsdp2": "full_shard", "ddp": "no_shard"}[engine]
    long = ["train.seq_len=8192", "model.max_seq_len=8192"]  # so that the host limits neither
    ours, theirs = (step(f"engine={e}", f"strategy={strategy}", *long) for e in ("fsdpctl", engine))
    sent, sent_by_ours = (x.simulated.sent_bytes[NETWORK_LINKS] for x in (theirs, ours))
    assert sent >= 0.95 * sent_by_ours
    assert theirs.seconds >= 0.95 * ours.seconds


@pytest.mark.parametrize(("strategy", "again"), [("full_shard", 5 / 18), ("shard_grad_op", 0)])
def test_reentrant_checkpoints_gather_again_what_forward_has_freed(strategy, again):
    """Five of six blocks are gathered thrice; a reduction in float32 counts as two gathers."""
    args = ["engine=fsdp2", f"strategy={strategy}", "activation_checkpointing=full"]
    args += ["launch.nnodes=1", "train.global_batch_size=8", "model.vocab_size=8"]
    programs = ("engine.program=fsdpctl", "engine.program=reentrant")
    once, twice = (step(*args, each).simulated.sent_bytes[NODE_LINKS] for each in programs)
    assert twice / once == pytest.approx(1 + again, rel=0.1)


def test_groups_of_few_rows_and_rows_that_are_added_in_turn_take_longer():
    device = device_of(planned("cluster=b300").config)
    grouped = [
        Work(GROUPED, WorkKind.MATMUL, 2 * 32 * rows * 4096**2, 0, 2, (32, rows, 4096, 4096))
        for rows in (640, 1 << 20)
    ]
    few, many = (work.flops / device.seconds(work) for work in grouped)
    assert few / many == pytest.approx(640 / 1240, rel=0.01)
    adds = Work("index_put", WorkKind.MEMORY, 0, 1000, 2)
    in_turn = adds._replace(dims=(0, 0, 0, 1064))
    for each in (device, device_of(planned("cluster=h100").config)):
        assert each.seconds(in_turn) - each.seconds(adds) == pytest.approx(1000 * 13e-6)
        fused = replace(each, is_compiled=True)
        assert fused.seconds(in_turn) == fused.seconds(adds)


def test_a_machine_without_specs_is_rejected():
    with pytest.raises(UsageError, match="cluster.flops and cluster.memory_bandwidth required"):
        step("cluster=local", "launch.device=cpu", "launch.nnodes=1")
