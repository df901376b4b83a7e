"""The rank's side of the launcher's watchdog: its status, and on demand its collectives."""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

import msgspec

from fsdpctl.comm.rank_status import RANK_STATUS
from fsdpctl.comm.recorder import recorded
from fsdpctl.io.files import replace

_POLL_SECONDS = 0.5


def serve_watchdog() -> None:
    """Publish this rank's status, write stacks to standard error on SIGUSR2, and answer queries.

    Does nothing without a watchdog of fsdpctl's launcher.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # also while a thread holds Python
    folder, local_rank = os.environ.get("FSDPCTL_FOLDER"), int(os.environ["LOCAL_RANK"])
    if folder is None:
        return
    RANK_STATUS.open(Path(folder) / "pulse", local_rank)
    RANK_STATUS.at("starting")
    threading.Thread(target=_answer, args=(Path(folder), local_rank), daemon=True).start()


def _answer(folder: Path, local_rank: int) -> None:
    """Wait for a query, and write the collectives that this rank has started."""
    while not (folder / "ask").exists():
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(OSError):
        replace(folder / f"ask-{local_rank}", msgspec.json.encode(recorded()))
