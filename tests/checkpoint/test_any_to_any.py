"""Every strategy continues from a checkpoint of every other with any number of ranks.

The global batch is the same everywhere; its samples are on different ranks.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdpctl.checkpoint.load import load_into
from fsdpctl.checkpoint.manifest import tensor_key
from fsdpctl.checkpoint.publish import CheckpointMetadata
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.save import take_snapshot, write_checkpoint
from fsdpctl.checkpoint.training_progress import Progress
from fsdpctl.engine.shard_model import shard_model
from fsdpctl.engine.sharded_model import ShardedModel
from fsdpctl.optim.adamw import ShardedAdamW
from fsdpctl.plan.layout import Span
from fsdpctl.plan.strategy import STRATEGIES
from tests.checkpoint.test_round_trip import whole_tensors
from tests.distributed import distributed
from tests.engine.models import make_net, next_token_loss

DTYPES = {"float32": (torch.float32, 1e-5), "float64": (torch.float64, 1e-12)}
RANKS = (1, 2, 3, 4)
LOSSES = "losses"
Losses = list[float]


def copy_size(strategy: str, ranks: int) -> int | None:
    """Return the ranks per replica: hybrid strategies have several replicas if they can."""
    if not STRATEGIES[strategy].replicates:
        return None
    return {4: 2}.get(ranks, ranks if ranks == 3 else 1)


def make(strategy: str, ranks: int, dtype: torch.dtype) -> tuple[ShardedModel, ShardedAdamW]:
    size = copy_size(strategy, ranks)
    model = shard_model(make_net(tied=True, dtype=dtype), strategy, dp_shard_size=size)
    return model, ShardedAdamW(model, lr=1e-2)


def train(model: ShardedModel, optimizer: ShardedAdamW, steps: range) -> Losses:
    """Return the losses of batches of 12 samples, which the ranks share."""
    ranks = model.collectives
    losses = []
    for step in steps:
        batch = torch.randint(0, 17, (12, 6), generator=torch.Generator().manual_seed(step))
        loss = next_token_loss(model, batch.chunk(ranks.size)[ranks.rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        everyone = ranks.all_gather_values(float(loss))
        losses.append(sum(everyone) / len(everyone))
    return losses


@distributed()
def save_all(rank: int, world_size: int, folder: Path, dtype: str, strategies: list[str]) -> None:
    """Save a checkpoint of each strategy after two steps, and the losses of the next two steps."""
    for strategy in strategies:
        model, optimizer = make(strategy, world_size, DTYPES[dtype][0])
        train(model, optimizer, range(2))
        snapshot = take_snapshot(model, optimizer, rank, CheckpointMetadata(Progress(2)))
        write_checkpoint(folder / f"{strategy}-{world_size}", snapshot, model.collectives)
        losses = train(model, optimizer, range(2, 4))
        if rank == 0:
            torch.save(losses, folder / f"{strategy}-{world_size}.{LOSSES}")


@distributed(timeout=180)
def load_all(rank: int, world_size: int, folder: Path, dtype: str, strategies: list[str]) -> None:
    """Load every checkpoint with each of `strategies`; compare all bits of states, then losses."""
    tolerance = DTYPES[dtype][1]
    for strategy in strategies:
        for path in sorted(each for each in folder.iterdir() if each.is_dir()):
            source, _, count = path.name.rpartition("-")
            model, optimizer = make(strategy, world_size, DTYPES[dtype][0])
            load_into(CheckpointReader(path), model, optimizer)
            check_bits(model, optimizer, whole_tensors(path))
            expected: Losses = torch.load(path.with_suffix(f".{LOSSES}"))
            result = train(model, optimizer, range(2, 4))
            same_order = int(count) == world_size and not (
                STRATEGIES[source].replicates or STRATEGIES[strategy].replicates
            )
            allowed = 0.0 if same_order else tolerance
            for ours, theirs in zip(result, expected, strict=True):
                assert abs(ours - theirs) <= allowed * theirs, (path.name, strategy)


def check_bits(model: ShardedModel, optimizer: ShardedAdamW, whole: dict[str, Tensor]) -> None:
    result = list(held(model, optimizer))
    assert {key.partition("/")[0] for key, *_ in result} in (
        {"model", "exp_avg", "exp_avg_sq"}, set(),
    )  # fmt: skip
    for key, span, values in result:
        assert torch.equal(values, whole[key].view(-1)[span.start : span.stop])


def held(model: ShardedModel, optimizer: ShardedAdamW) -> Iterator[tuple[str, Span, Tensor]]:
    """Yield the parts of parameters and states that this rank stores."""
    for shard in model.flat_shards():
        for piece in shard.param_slices():
            key = tensor_key("model", piece.param.name)
            yield key, piece.in_param, shard.view(shard.master, piece.in_flat)
    for run, states in optimizer.span_states():
        for piece in run.shard.layout.param_slices(run.span):
            within = piece.in_flat.shift(-run.span.start)
            for kind in states.keys() - {"step"}:
                key = tensor_key(kind, piece.param.name)
                yield key, piece.in_param, states[kind][within.start : within.stop]


@pytest.fixture(scope="module", params=DTYPES)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    for ranks in RANKS:
        save_all(world_size=ranks, folder=folder, dtype=request.param, strategies=list(STRATEGIES))
    return request.param, folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_every_pair(saved, ranks):
    dtype, folder = saved
    load_all(world_size=ranks, folder=folder, dtype=dtype, strategies=list(STRATEGIES))
