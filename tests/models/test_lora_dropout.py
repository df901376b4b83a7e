"""Dropout of the inputs of adapters: its mask comes from a seed, and no dropped input is kept."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpctl.config.model import LoraConfig
from fsdpctl.models.lora import LoraLinear
from fsdpctl.models.lora_dropout import dropout_linear
from fsdpctl.models.transformers_decoder import eval_mode
from tests.matrix import fast

DROPOUT, WIDTH, ROWS = 0.25, 64, 512


def _adapted(dropout: float = DROPOUT) -> LoraLinear:
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(WIDTH, 24).requires_grad_(False), LoraConfig(4, dropout=dropout))
    layer.add_module("lora_A", nn.Linear(WIDTH, 4, bias=False))
    layer.add_module("lora_B", nn.Linear(4, 24, bias=False))
    return layer


def _mask() -> Tensor:
    """Return the next mask, times its scale."""
    seed = int(torch.empty((), dtype=torch.int64).random_())
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(ROWS, WIDTH).bernoulli_(1 - DROPOUT, generator=generator) / (1 - DROPOUT)


def _again(layer: LoraLinear) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(layer, x, use_reentrant=False)


_WAYS: dict[str, Callable[[LoraLinear], Callable[[Tensor], Tensor]]] = {
    "plain": lambda layer: layer, "recomputed": _again, "compiled": torch.compile,
    "compiled and recomputed": lambda layer: torch.compile(_again(layer)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch's warnings about its own code
@pytest.mark.parametrize("way", fast("plain", "recomputed", slow=list(_WAYS)[2:]))
def test_forward_and_backward_have_one_mask(way):
    layer, x = _adapted(), torch.randn(ROWS, WIDTH, requires_grad=True)
    sent = torch.randn(ROWS, 24)
    torch.manual_seed(1)
    trained = [x, layer.lora_A.weight, layer.lora_B.weight]
    result = torch.autograd.grad(_WAYS[way](layer)(x), trained, sent)
    torch.manual_seed(1)
    added = layer.lora_B(layer.lora_A(x * _mask()))
    out = nn.functional.linear(x, layer.weight, layer.bias) + layer.scale * added
    expected = torch.autograd.grad(out, trained, sent)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_share_of_the_inputs_is_dropped_and_the_mean_stays():
    torch.manual_seed(2)
    weight = torch.eye(WIDTH)
    draws = torch.stack([dropout_linear(torch.ones(ROWS, WIDTH), weight, 0.1) for _ in range(8)])
    assert set(draws.unique().tolist()) == {0.0, torch.tensor(1 / 0.9).item()}
    share = (draws == 0).float()
    assert share.mean().item() == pytest.approx(0.1, abs=0.002)
    assert draws.mean().item() == pytest.approx(1, abs=0.002)
    # Every element is dropped equally often, and calls are independent.
    assert share.mean((0, 1)).sub(0.1).abs().max().item() < 5 * (0.09 / (8 * ROWS)) ** 0.5
    assert (share[0] * share[1]).mean().item() == pytest.approx(0.01, abs=0.003)


def test_layers_keep_their_common_input_only():
    layers, x = [_adapted() for _ in range(3)], torch.randn(ROWS, WIDTH, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] == (ROWS,) and tensor.shape[-1] == WIDTH:
            saved[tensor.untyped_storage()._cdata] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = [layer(x) for layer in layers]
    assert list(saved) == [x.untyped_storage()._cdata], len(out)


def test_evaluation_drops_nothing_and_draws_no_number():
    layer, without, x = _adapted(), _adapted(0), torch.randn(3, WIDTH)
    state = torch.get_rng_state()
    with eval_mode(layer):
        assert torch.equal(layer(x), without(x))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(layer(x), layer(x))
