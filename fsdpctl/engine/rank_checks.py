"""Comparisons between ranks: parameters with gradients, gathered units, and replicated values."""

import torch
from torch import Tensor

from fsdpctl.comm.collectives import Handle
from fsdpctl.comm.flat_shard import compare_replicas, integer_view
from fsdpctl.engine.runtime import Runtime
from fsdpctl.errors import ModuleError


class StepCheck:
    """An all-reduce per step that finds parameters without a gradient, and other gather orders.

    The all-reduce sums a presence bit per parameter and a fingerprint of the gathers in float64. It
    starts with the last backward of a step, to overlap with the last reductions. The number of
    backwards per step is that of the previous step. If the all-reduce has not started when the
    optimizer needs it, it starts then. Only without a gradient, the host waits for the device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._in_flight: tuple[int, Handle] | None = None  # with this rank's fingerprint
        self._sums: Tensor | None = None  # counts, then the sum of the fingerprints
        self._pending_check: tuple[int, Tensor, torch.cuda.Event] | None = None
        params = (x for buffer in runtime.trained_buffers for x in buffer.layout.params)
        self._names = [param.name for param in params]
        # The last element is for the fingerprint.
        count = len(self._names) + 1
        self._all_present = torch.ones(count, dtype=torch.float64, device=runtime.device)
        self._num_backwards = 0  # backwards with reductions since the last optimizer step
        self._expected_backwards = 1  # number of such backwards in the previous step
        runtime.on_last_reduction = self.on_last_reduction

    def on_last_reduction(self) -> None:
        """Count a backward whose last reductions have started."""
        self._num_backwards += 1
        if self._num_backwards >= self._expected_backwards:
            self._start()

    def _start(self) -> None:
        if self._in_flight is not None:
            self._in_flight[1].wait()  # the result is unused, but the collective uses its memory
        handle = self._runtime.mesh.world.start_all_reduce(self._local_values())
        self._in_flight, self._sums = (self._runtime.fingerprint, handle), None

    def params_without_grad(self) -> frozenset[str]:
        """Complete the step's all-reduce; return the names of parameters without any gradient.

        ModuleError if ranks gathered units in different orders. Collective.
        """
        if self._num_backwards:
            if self._in_flight is None:
                self._start()
            self._expected_backwards, self._num_backwards = self._num_backwards, 0
        if self._in_flight is not None:
            (fingerprint, handle), self._in_flight = self._in_flight, None
            self._sums = handle.wait()
            self._check(fingerprint, self._sums)
        if self._runtime.has_all_gradients or self._sums is None:
            return frozenset()
        *counts, _ = self._sums.tolist()
        pairs = zip(self._names, counts, strict=True)
        return frozenset(name for name, count in pairs if not count)

    def _local_values(self) -> Tensor:
        runtime = self._runtime
        fingerprint = float(runtime.fingerprint)
        if runtime.has_all_gradients:
            values = self._all_present.clone()
            values[-1:].fill_(fingerprint)
            return values
        buffers = runtime.trained_buffers
        present = [float(i in x.params_with_grad) for x in buffers for i in range(len(x.params))]
        bits = torch.tensor([*present, fingerprint], dtype=torch.float64)
        is_on_cuda = runtime.device.type == "cuda"
        return (bits.pin_memory() if is_on_cuda else bits).to(runtime.device, non_blocking=True)

    def _check(self, fingerprint: int, sums: Tensor) -> None:
        """Compare the fingerprints; on CUDA in the next step, so that the host does not wait."""
        runtime = self._runtime
        expected = fingerprint * runtime.mesh.world.size
        runtime.fingerprint = 0  # gathers since the all-reduce started are not compared
        if not runtime.strategy.shards_params:
            return
        if not sums.is_cuda:
            _check_fingerprint(expected, sums[-1])
            return
        self.finish_check()
        total = sums[-1].to("cpu", non_blocking=True)
        self._pending_check = expected, total, torch.cuda.current_stream().record_event()

    def finish_check(self) -> None:
        """Complete the last comparison of `_check`. Call it before saving a checkpoint."""
        if self._pending_check is not None:
            (expected, total, arrived), self._pending_check = self._pending_check, None
            arrived.synchronize()
            _check_fingerprint(expected, total)


def _check_fingerprint(expected: int, total: Tensor) -> None:
    if int(total) != expected:
        raise ModuleError(
            "the ranks ran the model's units in different orders, so all-gathers of different "
            "units were matched; every rank must call the same units in the same order"
        )


@torch.no_grad()
def check_replicas(runtime: Runtime) -> None:
    """Compare values that several ranks store by their checksums. Collective."""
    mesh = runtime.mesh
    if runtime.strategy.shards_params and mesh.replicas is None:
        return
    shard_index = mesh.shard.rank if runtime.strategy.shards_params else 0
    compare_replicas(mesh.world, shard_index, _checksums(runtime))


def _checksums(runtime: Runtime) -> dict[str, tuple[int, ...]]:
    names, sums = [], []
    for buffer in runtime.buffers:
        shard, stored = buffer.shard, buffer.stored
        replicated = [] if stored is None else [(stored.span, stored.values)]
        has_replicas = runtime.strategy.shards_params and shard.layout.shares_per_shard == 1
        if shard.stores_all or has_replicas:
            replicated.append((shard.span, shard.master))
            if shard.remainder is not None:
                replicated.append((shard.span, shard.remainder))
        for span, values in replicated:
            bits = integer_view(values)
            for piece in buffer.layout.param_slices(span):
                span_in_values = piece.in_flat.shift(-span.start)
                names.append(piece.param.name)
                sums.append(bits[span_in_values.start : span_in_values.stop].sum(dtype=torch.int64))
    checksums: dict[str, tuple[int, ...]] = {}
    for name, checksum in zip(names, torch.stack(sums).tolist() if sums else (), strict=True):
        checksums[name] = (*checksums.get(name, ()), checksum)
    return checksums
