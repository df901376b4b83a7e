"""A flat buffer of a unit, and its unreduced gradients.

Autograd leaves one gradient per parameter. The gradients are copied into a flat buffer and scaled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdpctl.comm.collectives import AllGatherInput, Handle
from fsdpctl.comm.flat_shard import FlatShard
from fsdpctl.comm.mesh import Mesh
from fsdpctl.engine.parameters import accumulated_grad
from fsdpctl.plan.layout import Span


@dataclass(frozen=True, slots=True)
class StoredParams:
    """The parameters in the compute dtype that are stored between steps.

    Masters of the same dtype are a view of these parameters.
    """

    span: Span  # elements of the flat buffer
    values: Tensor  # 1-D
    is_on_host: bool = False

    def view(self, span: Span) -> Tensor:
        return self.values[span.start - self.span.start : span.stop - self.span.start]


class FlatBuffer:
    """A flat buffer of a unit: its parameters, this rank's shard, and its unreduced gradients."""

    def __init__(
        self,
        shard: FlatShard,
        params: Sequence[nn.Parameter],
        full: Tensor,
        stored: StoredParams | None,
        reduce_dtype: torch.dtype,
    ) -> None:
        """Wrap the tensors of a rank.

        `full`, the flat buffer, is a 1-D view of the unshard buffer, readable while the unit is
        unsharded. `stored` has all parameters if the unit stays unsharded, else this rank's shard.
        Pass None if the masters serve as the stored parameters.
        """
        self.shard, self.layout = shard, shard.layout
        self.params = tuple(params)
        self.full, self.stored = full, stored
        self.reduce_dtype = reduce_dtype  # dtype in which gradients are added up
        # Unreduced sum of the micro-batches under `no_sync`, as long as `full`.
        self.held_gradients: Tensor | None = None
        self.params_with_grad: set[int] = set()  # indices, since `drop_gradients`
        self._padding = self.layout.padding
        # Sharded parameters read NaN. Codes (uint8) read 255: four such bytes are a float32 NaN.
        fill_value = float("nan") if full.dtype.is_floating_point else 255
        self.placeholder = torch.full((), fill_value, dtype=full.dtype, device=full.device)
        placeholders = [self.placeholder.expand(x.shape) for x in self.layout.params]
        self._sharded = list(zip(self.params, placeholders, strict=True))
        self._unsharded = list(zip(self.params, self.param_views(full), strict=True))

    @property
    def param_shard(self) -> Tensor:
        """This rank's shard of the parameters, from which the unit is gathered."""
        return self.shard.param.detach() if self.stored is None else self.stored.values

    @property
    def is_on_host(self) -> bool:
        return self.shard.is_on_host if self.stored is None else self.stored.is_on_host

    def start_param_sync(self, mesh: Mesh, *, is_copied: bool = False) -> Handle | None:
        """Start to copy changed masters into the stored parameters, on all ranks that need them.

        Masters of the same dtype are a view of the stored parameters. Pass `is_copied` if the host
        has copied this rank's masters. Returns None if nothing is in flight.
        """
        if self.stored is None:
            return None
        shard, values = self.shard, self.stored.values
        source: Tensor | None = None
        if shard.is_on_host:
            if not is_copied:
                self.stored.view(shard.span).copy_(shard.master)
            # All ranks must decide alike, or some would wait in a collective that others skip. So
            # the condition depends on layout and strategy, not on the size of this rank's span: an
            # uneven owner map may give one rank the full buffer, which other ranks then need.
            stays_unsharded = values is self.full
            if self.layout.shares_per_shard == 1 and not stays_unsharded:
                return None  # each rank stores its shard only
        elif shard.dtype != values.dtype:
            source = shard.master
        if mesh.replicas is not None and self.layout.shares_per_shard > 1:
            # Each replica has updated its share of the shard.
            gathered = AllGatherInput(values, self.layout.share_spans, source)
            return mesh.replicas.all_gather([gathered])
        if not shard.stores_all:  # masters are sharded, parameters are not
            return mesh.shard.all_gather([AllGatherInput(values, self.layout.shard_spans, source)])
        if source is not None:  # the same elements in another dtype
            values.copy_(source)
        return None

    def param_views(self, flat: Tensor) -> list[Tensor]:
        """Return the view of each parameter in `flat`, a tensor as long as the flat buffer."""
        param_spans = self.layout.param_spans
        return [flat[x.span.start : x.span.stop].view(x.param.shape) for x in param_spans]

    def use_unsharded(self) -> None:
        for param, view in self._unsharded:
            param.data = view

    def use_sharded(self) -> None:
        """Let the parameters read NaN and reject writes."""
        for param, placeholder in self._sharded:
            param.data = placeholder

    def collect_piece(self, piece: Span) -> Tensor:
        """Return the gradients of the elements `piece` of every owned span, concatenated.

        Missing gradients are zero. The parameters keep their gradients for the next pieces.
        """
        owned_numel = self.layout.owned_spans[0].numel  # spans are even if reductions are in pieces
        shape, dtype = (len(self.layout.owned_spans), piece.numel), self.reduce_dtype
        flat = torch.zeros(shape, dtype=dtype, device=self.full.device)
        targets, sources = [], []
        for param_span, param in zip(self.layout.param_spans, self.params, strict=True):
            gradient, span = accumulated_grad(param), param_span.span
            if gradient is None or not span.numel:
                continue
            values = gradient.reshape(-1)
            # The ranks in `range(first, end)` own elements of this parameter only. There can be
            # thousands of these ranks, so one copy serves all.
            first, end = -(-span.start // owned_numel), span.stop // owned_numel
            if first < end:
                inner = values[first * owned_numel - span.start : end * owned_numel - span.start]
                flat[first:end].copy_(inner.view(-1, owned_numel)[:, piece.start : piece.stop])
            # The ranks at both ends may own elements of other parameters too.
            for rank in {span.start // owned_numel, (span.stop - 1) // owned_numel}:
                overlap = span.intersect(piece.shift(rank * owned_numel))
                if overlap is not None and not first <= rank < end:
                    begin = overlap.start - piece.start - rank * owned_numel
                    targets.append(flat[rank, begin : begin + overlap.numel])
                    sources.append(values[overlap.start - span.start : overlap.stop - span.start])
        if targets:
            torch._foreach_copy_(targets, sources)
        return flat.view(-1)

    def flatten_gradients(self, scale: float) -> Tensor:
        """Return the gradients times `scale` in a flat buffer, with zeros for missing gradients."""
        flat = torch.empty(self.layout.numel, dtype=self.reduce_dtype, device=self.full.device)
        for gap in self._padding:
            flat[gap.start : gap.stop].zero_()
        targets, sources = [], []
        for view, param in zip(self.param_views(flat), self.params, strict=True):
            gradient = accumulated_grad(param)
            if gradient is None:
                view.zero_()
            elif scale != 1 and gradient.dtype == flat.dtype and flat.device.type == "cpu":
                torch.mul(gradient, scale, out=view)  # copied and scaled in one pass
            else:
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
            if scale != 1:
                torch._foreach_mul_(targets, scale)
        return flat

    def add_gradients(self, flat: Tensor, scale: float) -> None:
        """Add the parameters' gradients times `scale` to a flat buffer."""
        all_pairs = zip(self.param_views(flat), map(accumulated_grad, self.params), strict=True)
        pairs = [(view, gradient) for view, gradient in all_pairs if gradient is not None]
        if pairs:
            targets, gradients = (list(each) for each in zip(*pairs, strict=True))
            torch._foreach_add_(targets, gradients, alpha=scale)

    def clear_param_grads(self) -> None:
        """Remove the gradients from the parameters, once they are copied to a flat buffer."""
        if len(self.params_with_grad) < len(self.params):
            gradients = map(accumulated_grad, self.params)
            self.params_with_grad |= {i for i, x in enumerate(gradients) if x is not None}
        for param in self.params:
            param.grad = None

    def drop_gradients(self) -> None:
        for param in self.params:
            param.grad = None
        self.shard.grad = self.shard.offloaded_grad = None
        self.held_gradients = None
        self.params_with_grad.clear()
