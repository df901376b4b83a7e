"""Models of transformers without code in fsdpctl train on two ranks as in one process."""

import pytest
import torch
import transformers as hf

from fsdpctl.engine.shard_model import shard_model
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from tests.distributed import distributed
from tests.engine.models import one_step
from tests.engine.test_parity import largest_difference
from tests.models.tiny import LEFT_OUT, TASKS, batch_of, loss_of, make_tiny
from tests.reference import train_reference

STEPS = 3
STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard"]
ZOO = [
    pytest.param(task, family, id=f"{task} {family}")
    for task, families in TASKS.items()
    for family in families
    if family not in LEFT_OUT[task]
]


def test_the_zoo_is_large():
    assert len(ZOO) > 200


@pytest.mark.slow
@pytest.mark.parametrize("task, family", ZOO)
@distributed(world_size=2, timeout=240)
def test_models_of_transformers_train_as_in_one_process(rank, world_size, task, family):
    hf.logging.set_verbosity_error()
    generator = torch.Generator().manual_seed(1)
    batches = [[[batch_of(task, generator)] for _ in range(world_size)] for _ in range(STEPS)]
    plain = make_tiny(task, family)
    names = {name for name, param in plain.named_parameters() if param.numel()}
    expected = train_reference(plain, loss_of, batches)
    for strategy in STRATEGIES:
        model = shard_model(make_tiny(task, family), strategy)
        optimizer = ShardedAdamW(model, lr=1e-2)
        for of_ranks in batches:
            one_step(model, optimizer, of_ranks[rank][0], loss_of)
        trained = model.state_dict()
        ours, theirs = ({n: state[n] for n in names} for state in (trained, expected))
        assert largest_difference(ours, theirs) <= 1e-12, strategy


@pytest.mark.slow
@pytest.mark.parametrize("task, family, error", [
    ("masked", "squeezebert", "computes with its weight, which is not gathered"),
    ("causal", "rwkv", "the module writes to its own parameters in forward"),
])  # fmt: skip
@distributed(world_size=2)
def test_unsupported_models_are_rejected(rank, world_size, task, family, error):
    model = shard_model(make_tiny(task, family), "full_shard")
    with pytest.raises(EngineError, match=error):
        loss_of(model, batch_of(task, torch.Generator()))
