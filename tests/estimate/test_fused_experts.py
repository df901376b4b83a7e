"""Experts as one operator, as Liger computes them."""

import torch
from torch import Tensor, nn

from fsdpctl.estimate.fused_experts import fuse_experts
from fsdpctl.estimate.operators import operators_of
from fsdpctl.estimate.trace import trace

TOKENS, WIDTH, INNER, COUNT, CHOSEN = 64, 32, 48, 4, 2


class Experts(nn.Module):
    def __init__(self, *, biased: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(COUNT, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(COUNT, WIDTH, INNER))
        if biased:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(COUNT, 2 * INNER))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x


def test_fused_experts_keep_the_products_before_the_gate_and_nothing_else_of_their_size():
    with torch.device("meta"):
        experts, x = Experts().bfloat16(), torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
        weights = torch.empty(TOKENS, CHOSEN, dtype=torch.bfloat16, requires_grad=True)
        index = torch.empty(TOKENS, CHOSEN, dtype=torch.int64)
    fuse_experts(experts)
    kept: list[tuple[int, ...]] = []
    gradients: list[torch.Size] = []
    for param in experts.parameters():
        param.register_hook(lambda gradient: gradients.append(gradient.shape))

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    def run() -> Tensor:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out: Tensor = experts(x.requires_grad_(), index, weights)
        loss = out.sum()
        loss.backward()
        return loss

    with operators_of("cuda", None):
        trace(experts, [], run, "cuda")
    rows = TOKENS * CHOSEN
    assert (rows, 2 * INNER) in kept
    assert {shape for shape in kept if rows in shape} == {(rows, 2 * INNER)}
    assert {param.shape for param in experts.parameters()} == set(gradients)


def test_experts_with_biases_or_adapters_stay_as_they_are():
    biased, adapted = Experts(biased=True), Experts()
    adapted.expert_adapters = nn.Linear(2, 2)
    for experts in (biased, adapted):
        fuse_experts(experts)
        assert "forward" not in vars(experts)
