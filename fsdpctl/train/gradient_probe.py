"""A rank's own gradient, looked at before the ranks' are added up."""

import torch
from torch import Tensor, nn


class GradientProbe:
    """The norm of the gradient where it leaves the embedding, over the passes of a step.

    All that goes wrong in a backward comes by there, on the rank where it does; in the sums over
    ranks nobody can tell whose it was. It costs one pass over a tensor as large as a hidden state.
    A gradient that overflows on its way into a parameter's own is not seen.
    """

    def __init__(self, module: nn.Module) -> None:
        """Watch the input embedding of `module`, if it says which that is."""
        self._norms: list[Tensor] = []
        find = getattr(module, "get_input_embeddings", None)
        if find is not None:
            find().register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._look)

    def _look(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))

    def take(self) -> Tensor | None:
        """A scalar; None where no gradient came by since the last time."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None
