"""`fsdpctl --version`."""

import sys

import typer

from fsdpctl import __version__
from fsdpctl.cli.console import say


def print_version(wanted: bool) -> None:
    """Print versions and devices, and exit."""
    if not wanted:
        return
    import torch
    from torch.cuda import nccl

    say(f"fsdpctl {__version__}")
    say(f"python {sys.version.split()[0]}")
    say(f"torch {torch.__version__}")
    if torch.cuda.is_available():
        say(f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl.version()))}")
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            say(f"device {index}: {about.name}, {about.total_memory / (1 << 30):.0f} GiB")
    else:
        say("devices: CPU only")
    raise typer.Exit
