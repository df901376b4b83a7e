"""What PyTorch's FSDP 1 keeps of recomputed blocks, and the estimate of it."""

import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdpctl.config.compose import compose_config
from fsdpctl.estimate.estimator import Estimator
from fsdpctl.resolve.open import plan_on_cluster
from tests.distributed import distributed

TOKENS, WIDTH, BLOCKS = 1000, 64, 6


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, 4 * WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.adapter(self.frozen(x).relu()))


class _Model(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._reentrant)
        return x.sum()


class _Hidden(TorchDispatchMode):
    """Counts the tensors that exist and have the size of a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and result.numel() == TOKENS * WIDTH:
            storage = result.untyped_storage()
            gone = partial(lambda key, _: self.live.pop(key, None), id(storage))
            self.live.setdefault(id(storage), weakref.ref(storage, gone))
        return result


def _hidden_states(*, reentrant: bool) -> int:
    """Return how many exist in the backward of the first block."""
    model, found = _Model(reentrant=reentrant), list[int]()
    first = model.blocks[0].get_submodule("adapter")
    units = {*model.blocks, *(block.get_submodule("adapter") for block in model.blocks)}
    policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda each: each in units)
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu")
    )
    with _Hidden() as hidden:
        first.register_forward_pre_hook(lambda *_: found.append(len(hidden.live)))
        sharded(torch.randn(TOKENS, WIDTH).requires_grad_()).backward()
    return found[-1]


@pytest.mark.filterwarnings("ignore")
@distributed(2)
def test_fsdp_1_keeps_inputs_and_their_gradients_with_reentrant_checkpoints(rank, world_size):
    plain, kept = _hidden_states(reentrant=False), _hidden_states(reentrant=True)
    print(plain, kept)
    assert kept - plain == 2 * (BLOCKS - 1) - 1


def test_an_estimate_with_kept_inputs_has_two_hidden_states_of_each_later_block():
    sizes = ["model.num_layers=24", "train.seq_len=2048", "train.micro_batch_size=8"]
    words = ["model=llama_tiny", "cluster=2xh100", "model.lora.rank=4", *sizes]

    def kept_inputs(*more: str) -> list[tuple[int, int]]:
        peak = Estimator().estimate(plan_on_cluster(compose_config([*words, *more]))).step.peak
        found = (each for each in peak.largest if each.what == "kept input")
        return [(each.count, each.nbytes) for each in found]

    count = 2 * 22 - 1  # at the peak, in the second block: the first one's norms keep less
    keeps = ("engine.program=transformers_reentrant", "activation_checkpointing=full")
    assert kept_inputs(*keeps) == [(count, count * 8 * 2048 * 128 * 2)]
    assert kept_inputs(keeps[0]) == kept_inputs(keeps[1]) == []
