"""The norm of a rank's own gradient, before gradients are summed over ranks."""

import torch
from torch import Tensor, nn


class GradientProbe:
    """The norm of the gradient at the output of the embedding, over the micro-batches of a step.

    A non-finite value in a backward pass arrives there on the rank where it occurs; the sum over
    ranks no longer shows the rank. It costs one read of a tensor as large as a hidden state.
    A gradient that overflows only in a parameter's own gradient is not detected.
    """

    def __init__(self, module: nn.Module) -> None:
        """Watch the input embedding of `module`, if it has `get_input_embeddings`."""
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
        """Return the norm since the last call as a scalar, or None without a gradient."""
        norms, self._norms = self._norms, []
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None
