"""A profile of one GPU, as `fsdpctl profile-device` writes it for step-time predictions.

    python -m benchmarks.gpu_profile --out benchmarks/results/gpu-profile.json

`--small` observes a single small model.
"""

import json
import os
from dataclasses import asdict
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import HashStore

from benchmarks.report import arguments
from fsdpctl.comm.world import joined_world
from fsdpctl.tools import profile_worker
from fsdpctl.tools.observe import LARGE, SMALL


def main() -> None:
    """Measure the device with one rank, and write the profile."""
    words = arguments(small=False)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    models = SMALL[:1] if words.small else LARGE
    with (
        joined_world("cuda", 600.0, HashStore()) as world,
        patch.object(profile_worker, "LARGE", models),
    ):
        name = torch.cuda.get_device_name()
        found = profile_worker.measure(world.device, name, lambda line: print(line, flush=True))
        words.out.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
