"""Which parameters had gradients on any rank, and whether all ranks gathered alike."""

import torch
from torch import Tensor

from fsdpctl.comm.base import Handle
from fsdpctl.engine.runtime import Runtime
from fsdpctl.errors import EngineError


class Presence:
    """Adds up once a step what every rank knows, in float64: presence bits, and a fingerprint.

    The all-reduce begins with the last backward of a step, beside its last reductions. Which one
    that is, is known from the step before; what is not under way when the optimizer asks begins
    then. Nothing here makes the host wait for a device, unless a parameter had no gradient.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._started: tuple[int, Handle] | None = None  # with which fingerprint
        self._sums: Tensor | None = None  # what came of it: counts, and that of the fingerprints
        self._unchecked: tuple[int, Tensor, torch.cuda.Event] | None = None
        units = runtime.units.values()
        self._buffers = [buffer for unit in units for buffer in unit.trained_buffers]
        self._names = [param.name for b in self._buffers for param in b.layout.params]
        self._all_present = torch.ones(
            len(self._names) + 1, dtype=torch.float64, device=runtime.device
        )
        self._num_backwards = 0  # that reduced, since the optimizer last asked
        self._usual_number = 1  # of them, between two steps
        runtime.when_all_is_sent = self.backward_ends

    def backward_ends(self) -> None:
        """The last gradients of a backward are on their way."""
        self._num_backwards += 1
        if self._num_backwards >= self._usual_number:
            self._start()

    def _start(self) -> None:
        if self._started is not None:
            self._started[1].wait()  # nobody asked; its memory must not be used again before
        handle = self._runtime.mesh.world.start_all_reduce(self._own())
        self._started, self._sums = (self._runtime.gatherer.fingerprint, handle), None

    def absent_everywhere(self) -> frozenset[str]:
        """Names of the trainable parameters that had a gradient on no rank. Collective.

        Raises:
            EngineError: the ranks did not gather the same units in the same order.
        """
        if self._num_backwards:
            if self._started is None:
                self._start()
            self._usual_number, self._num_backwards = self._num_backwards, 0
        if self._started is not None:
            (fingerprint, handle), self._started = self._started, None
            self._sums = handle.wait()
            self._check(fingerprint, self._sums)
        if self._runtime.has_all_gradients or self._sums is None:
            return frozenset()
        *counts, _ = self._sums.tolist()
        pairs = zip(self._names, counts, strict=True)
        return frozenset(name for name, count in pairs if not count)

    def _own(self) -> Tensor:
        """This rank's presence bits and fingerprint."""
        if self._runtime.has_all_gradients:
            own = self._all_present.clone()
            own[-1:].fill_(float(self._runtime.gatherer.fingerprint))
            return own
        present = [
            float(index in buffer.present)
            for buffer in self._buffers
            for index in range(len(buffer.params))
        ]
        fingerprint = float(self._runtime.gatherer.fingerprint)
        bits = torch.tensor([*present, fingerprint], dtype=torch.float64)
        is_on_cuda = self._runtime.device.type == "cuda"
        return (bits.pin_memory() if is_on_cuda else bits).to(
            self._runtime.device, non_blocking=True
        )

    def _check(self, fingerprint: int, sums: Tensor) -> None:
        """Whether all ranks had this fingerprint.

        On CUDA the fingerprint is looked at a step later, when it has long arrived.
        """
        runtime = self._runtime
        expected = fingerprint * runtime.mesh.world.size
        runtime.gatherer.fingerprint = 0
        if not runtime.strategy.shards_params:
            return
        if not sums.is_cuda:
            _check_fingerprint(expected, sums[-1])
            return
        self.settle()
        found = sums[-1].to("cpu", non_blocking=True)
        self._unchecked = expected, found, torch.cuda.current_stream().record_event()

    def settle(self) -> None:
        """Look at what has not been looked at yet, before something is done that lasts.

        Raises:
            EngineError: the ranks did not gather the same units in the same order.
        """
        if self._unchecked is not None:
            (before, found, arrived), self._unchecked = self._unchecked, None
            arrived.synchronize()
            _check_fingerprint(before, found)


def _check_fingerprint(expected: int, found: Tensor) -> None:
    if int(found) != expected:
        raise EngineError(
            "the ranks ran the model's units in different orders, so what they gathered was mixed "
            "up: every rank must call the same units in the same order"
        )
