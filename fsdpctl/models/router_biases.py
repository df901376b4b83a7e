"""Balancing of experts by biases of their routers, instead of a loss.

Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024, algorithm 1:
after each step, the bias of an expert that got fewer tokens than the mean grows by a constant, and
that of an expert that got more shrinks by it. Routers add biases to scores to choose experts only.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdpctl.errors import UsageError
from fsdpctl.models.experts import Counts

_NAMES = ("correction_bias", "expert_bias")


def bias_places(module: nn.Module) -> list[tuple[nn.Module, nn.Module, str]]:
    """Return the experts of each layer with a bias, and the owner and the name of that buffer."""
    found = []
    for block in module.modules():
        experts = block._modules.get("experts")
        owners = [
            (owner, name)
            for owner in block.modules()
            for name, _ in owner.named_buffers(recurse=False)
            if name.endswith(_NAMES)
        ]
        if experts is not None and len(owners) == 1:
            found.append((experts, *owners[0]))
    return found


class RouterBiases:
    """Counts the tokens of every expert in training, and updates the biases after a step."""

    def __init__(self, module: nn.Module, rate: float) -> None:
        """Hook the experts of `module`, whose biases change by `rate` in a step.

        Raises:
            UsageError: If its routers have no biases that can be updated.
        """
        self.counted: Tensor | None = None  # (tokens,): whether each token counts; None: all do
        self._rate = rate
        self._places = bias_places(module)
        self._counts: dict[int, Tensor] = {}  # of a step, by layer
        if not self._places:
            are_params = any(name.endswith(_NAMES) for name, _ in module.named_parameters())
            reason = (
                "not supported for biases that are parameters"
                if are_params
                else "only valid with a model whose routers have biases"
            )
            raise UsageError(f"model.router_bias_update={rate:g}: {reason}")
        for number, (experts, _, _) in enumerate(self._places):
            experts.register_forward_pre_hook(partial(self._count, number))

    def _count(self, number: int, experts: nn.Module, args: tuple[Any, ...]) -> None:
        recomputes = torch._C._current_graph_task_id() != -1
        chosen = next(each for each in args if not each.is_floating_point())
        if not experts.training or recomputes or chosen.is_meta:
            return
        weights = torch.ones(chosen.shape, dtype=torch.float32, device=chosen.device)
        if self.counted is not None:
            weights *= self.counted.view(-1, 1)
        self._count_of(number).index_add_(0, chosen.flatten(), weights.flatten())

    def _count_of(self, number: int) -> Tensor:
        """Return the tokens of each expert of a layer so far."""
        if number not in self._counts:
            _, owner, name = self._places[number]
            bias: Tensor = getattr(owner, name)
            self._counts[number] = torch.zeros(
                bias.numel(), dtype=torch.float32, device=bias.device
            )
        return self._counts[number]

    @torch.no_grad()
    def update(self, reduce: Counts | None, found_inf: Tensor | None = None) -> None:
        """Update all biases by the counts since the last call. Collective.

        Args:
            reduce: Sums a tensor over all ranks.
            found_inf: A scalar that is not zero if the step was skipped, and the biases stay.
        """
        of_layers = [self._count_of(number) for number in range(len(self._places))]
        counts = torch.cat(of_layers)
        counts = counts if reduce is None else reduce(counts)
        rate = torch.full((), self._rate, device=counts.device)
        if found_inf is not None:
            rate = torch.where(found_inf == 0, rate, 0.0)
        sums = counts.split([len(each) for each in of_layers])
        for (_, owner, name), of_layer in zip(self._places, sums, strict=True):
            bias: Tensor = getattr(owner, name)
            bias.add_((of_layer.mean() - of_layer).sign().mul_(rate).view_as(bias))
        self._counts.clear()
