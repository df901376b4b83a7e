"""What a rank tells its launcher's watch: where it is, and on demand what it waits for."""

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

_LOOKS_EVERY = 0.5


def answer_to_watch() -> None:
    """From now on beat, write stacks to standard error on SIGUSR2, and answer what is asked.

    Does nothing where no launcher of ours watches.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # also while a thread holds Python
    folder, local_rank = os.environ.get("FSDPCTL_FOLDER"), int(os.environ["LOCAL_RANK"])
    if folder is None:
        return
    RANK_STATUS.open(Path(folder) / "pulse", local_rank)
    RANK_STATUS.at("starting")
    threading.Thread(target=_answer, args=(Path(folder), local_rank), daemon=True).start()


def _answer(folder: Path, local_rank: int) -> None:
    """Once asked, write down which collectives this rank has begun."""
    while not (folder / "ask").exists():
        time.sleep(_LOOKS_EVERY)
    with contextlib.suppress(OSError):
        answer = folder / f"ask-{local_rank}"
        scratch = answer.with_suffix(".tmp")
        scratch.write_bytes(msgspec.json.encode(recorded()))
        scratch.replace(answer)
