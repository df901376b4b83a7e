"""Back to the newest checkpoint, without a new start."""

from pathlib import Path

from fsdpctl.checkpoint.folders import newest_checkpoint
from fsdpctl.checkpoint.load import load_checkpoint
from fsdpctl.checkpoint.manifest import Progress
from fsdpctl.checkpoint.pretrained import whole_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.comm.rank_status import RANK_STATUS, READING
from fsdpctl.config.model_path import CHECKPOINTS
from fsdpctl.train.parts import TrainingParts


def load_newest(parts: TrainingParts) -> Progress | None:
    """Bring model and optimizer to where the newest complete checkpoint was. Collective.

    None where there is none. No checkpoint may be on its way.

    Raises:
        CheckpointError: it is damaged.
    """
    newest = newest_checkpoint(parts.run_dir / CHECKPOINTS)
    # Decided once: a file system of a cluster may not show all ranks the same.
    (folder, *_) = parts.model.collectives.gather_objects("" if newest is None else str(newest))
    if not folder:
        return None
    RANK_STATUS.at(READING)
    parts.model.rest()
    reader = CheckpointReader(Path(folder))
    return load_checkpoint(reader, parts.model, parts.optimizer, whole_weights(reader))
