"""Short trainings of the engine on CUDA devices, compared with CPU ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsdpctl.checkpoint.staging import StagingMemory
from fsdpctl.engine.build import Sharding
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.optim.record import record_step
from fsdpctl.plan.precision import Precision
from fsdpctl.plan.step_plan import Prefetch
from fsdpctl.plan.strategy import STRATEGIES, Offload
from tests.engine.events import gathered_nbytes
from tests.engine.models import WIDE, make_net, next_token_loss, token_batches
from tests.engine.odd import checkpoint_all, freeze_all_but_vectors, in_four_bits

BF16 = torch.bfloat16
PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(param_dtype=BF16),
    "bf16_true": Precision(BF16, BF16, BF16),  # for a model in bf16
    "24 bits": Precision(BF16, torch.float32, BF16, has_remainders=True),
}
STEPS = 3


@dataclass(frozen=True)
class Case:
    strategy: str = "full_shard"
    depth: int = 1  # prefetched units, in forward and in backward
    window: str = "one"  # "one" micro-batch per step, or two: "every" one or the "last" reduces
    precision: str = "fp32"
    recomputes: bool = False
    in_part: bool = False  # trains only vectors: two buffers per unit
    four_bits: bool = False  # trains adapters over matrices in NF4
    wide: bool = False  # an embedding that is reduced in pieces
    owner_map: str = "even"
    overlaps: bool = True  # updates arrive during the next forward
    offload: str = "none"  # states in host memory, as strategy.offload
    sends: bool = False  # recomputes, with the inputs of blocks on the host
    looks: bool = False  # evaluates before each step, and writes to masters after a forward
    saves: bool = False  # copies the masters as a checkpoint does, while training goes on

    @property
    def tolerance(self) -> float:
        """Return the tolerance of losses: gloo and NCCL add up ranks in different orders."""
        return 1e-6 if self.precision == "fp32" else 2e-2

    def model(self, device: torch.device, world_size: int) -> ShardedModel:
        net = make_net(tied=False, vocab=WIDE if self.wide else 17)
        if self.four_bits:
            net = in_four_bits()
        if self.precision == "bf16_true":
            net.bfloat16()
        if self.in_part:
            freeze_all_but_vectors(net)
        if self.recomputes or self.sends:
            checkpoint_all(net.blocks, "full", offload=self.sends)
        half = world_size // 2 if STRATEGIES[self.strategy].replicates else None
        offload = Offload.parse(self.offload)
        if half == 1:
            offload &= Offload.PARAMS  # states must be sharded
        sharding = Sharding(
            self.strategy, dp_shard_size=half or None, owner_map=self.owner_map,
            prefetch=Prefetch(self.depth, self.depth), precision=PRECISIONS[self.precision],
            offload=offload,
        )  # fmt: skip
        model = shard_model(net.to(device), sharding)
        model.overlap_param_gather = self.overlaps
        return model

    def train(self, rank: int, world_size: int, device: torch.device) -> Tensor:
        """Return losses and gradient norms of steps, and the last loss; the host never waits."""
        torch.manual_seed(0)
        model = self.model(device, world_size)
        optimizer = ShardedAdamW(model, lr=1e-2)
        count = 1 if self.window == "one" else 2
        results: list[Tensor] = []
        of_steps = [
            [to_device(batch, device) for batch in of_ranks[rank]]
            for of_ranks in token_batches(STEPS + 1, world_size, count)
        ]
        records = []
        for step, batches in enumerate(of_steps[:STEPS]):
            with refusing_host_waits() if step and device.type == "cuda" else nullcontext():
                loss_sum = torch.zeros((), device=device)
                for number, batch in enumerate(batches, start=1):
                    holds = self.window == "last" and number < count
                    with model.no_sync() if holds else nullcontext():
                        loss = next_token_loss(model, batch).float()
                        (loss / count).backward()
                    loss_sum += loss.detach() * 15
                if self.looks:
                    with torch.no_grad():
                        next_token_loss(model, batches[-1])
                tokens = torch.full((), 15 * count, device=device)
                record = record_step(
                    model, loss_sum=loss_sum, tokens=tokens, nominal_tokens=15 * count * world_size,
                    max_grad_norm=0.05,
                )  # fmt: skip
                optimizer.step(grad_scale=record.grad_scale, found_inf=record.found_inf)
                optimizer.zero_grad()
                if model.can_prefetch:
                    model.prefetch_forward_params()
                with torch.no_grad():
                    results.append(next_token_loss(model, batches[0]).detach().float())
                records.append(record)
        for record in records:
            figures = record.stats()
            results += [torch.tensor(figures.loss), torch.tensor(figures.grad_norm)]
        results.append(torch.tensor(float(gathered_nbytes(model))))
        if self.saves:
            results += saved(model, optimizer)
        if self.looks:
            written(model, of_steps[STEPS][0])
        last = next_token_loss(model, of_steps[STEPS][0]).detach().float()
        return torch.stack([each.cpu() for each in (*results, last)])

    def check(self, rank: int, world_size: int) -> None:
        """Check that a device has the losses and the memory of the CPU."""
        result = self.train(rank, world_size, torch.device("cuda", rank))
        expected = self.train(rank, world_size, torch.device("cpu"))
        torch.testing.assert_close(result, expected, rtol=self.tolerance, atol=self.tolerance)


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """Copy a batch as the trainer does."""
    if device.type == "cpu":
        return batch
    return batch.pin_memory().to(device, non_blocking=True)


def saved(model: ShardedModel, optimizer: ShardedAdamW) -> list[Tensor]:
    """Return sums of copied masters, which were written to after the copy."""
    masters = [shard.master for shard in model.flat_shards()]
    copies = StagingMemory().copy(masters)
    for master in masters:
        master.mul_(2.0)
    optimizer.zero_grad()
    return [copy.float().sum() for copy in copies]


def written(model: ShardedModel, batch: Tensor) -> None:
    """Write to the masters while the device may still run a forward."""
    with torch.no_grad():
        next_token_loss(model, batch)
    for shard in model.flat_shards():
        shard.master.mul_(2.0)
    model.broadcast_updated_params()


@contextmanager
def refusing_host_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def every_case() -> list[Case]:
    """Return each strategy with each value of the other fields, and special combinations."""
    results = []
    for name, row in STRATEGIES.items():
        plain = Case(name)
        results += [replace(plain, precision=each) for each in PRECISIONS]
        results += [replace(plain, window=each) for each in ("every", "last")]
        results += [replace(plain, recomputes=True), replace(plain, in_part=True)]
        results += [replace(plain, sends=True, precision=each) for each in ("fp32", "bf16")]
        results += [replace(plain, sends=True, window="every")]
        results += [replace(plain, overlaps=False), replace(plain, wide=True)]
        results += [replace(plain, four_bits=True, precision=each) for each in ("fp32", "bf16")]
        if row.shards_params:
            results += [replace(plain, depth=depth) for depth in (0, 2)]
            results += [replace(plain, precision="bf16", wide=True, window="last")]
    results += [
        Case(name, offload=offload, precision=precision, window=window)
        for name, row in STRATEGIES.items()
        if row.shards_optimizer
        for offload in ("states", "states,gradients")
        for precision in ("fp32", "bf16", "24 bits")
        for window in ("one", "every")
    ]
    able = [
        Case(name, offload="params")
        for name, row in STRATEGIES.items()
        if row.shards_params and not row.shards_over_replicas
    ]
    for rests in able:
        results += [
            replace(rests, offload=offload, precision=precision, window=window)
            for offload, precision, window in (
                ("states,params", "bf16", "one"), ("states,params", "fp32", "every"),
                ("all", "fp32", "one"), ("all", "bf16", "every"), ("all", "24 bits", "every"),
            )
        ]  # fmt: skip
        results += [replace(rests, four_bits=True, precision=each) for each in ("fp32", "bf16")]
        results += [replace(rests, in_part=True, depth=depth) for depth in (0, 1, 2)]
        results += [replace(rests, in_part=True, sends=True, window="last")]
        results += [replace(rests, offload="all", looks=True, wide=True)]
    maps = ("round_robin", "contiguous", "balanced")
    return results + [Case("shard_optimizer", owner_map=each) for each in maps]
