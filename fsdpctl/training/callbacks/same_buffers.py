"""Buffers of a script's module, such as running statistics, as those of rank 0 after each step."""

from fsdpctl.engine.build import move_buffers
from fsdpctl.training.callback import Callback, TrainingRun


class SameBuffers(Callback):
    """Gives all ranks the buffers of rank 0, which checkpoints have, as DistributedDataParallel.

    So they are the same after a resume.
    """

    def launched(self, run: TrainingRun) -> None:
        move_buffers(run.parts.model.module, run.parts.device, run.parts.model.collectives)
