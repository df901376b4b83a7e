"""What the launcher starts on every rank: `python -m fsdpctl.train.worker RUN_DIR [measure]`."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fsdpctl.comm.stores import Store

MODULE = "fsdpctl.train.worker"
MEASURE = "measure"  # as last argument: only steps, and nothing is shown

_PR_SET_PDEATHSIG = 1
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
_LOOKS_EVERY, _MOMENT = 1.0, 0.3  # seconds
_stop_signal: int | None = None
_has_begun = threading.Event()  # there is something to save


def _request_stop(number: int, frame: FrameType | None) -> None:
    global _stop_signal
    _stop_signal = number


def tie_to_launcher() -> None:
    """Have the kernel kill this worker when its launcher dies, however it dies.

    Its children go with it in the same way. There is no grace for saving: without its launcher a
    rank may be stopped, or its peers gone, and the last checkpoint is complete. Until the first
    step is done a request to stop ends the worker at once, wherever it waits or compiles.
    """
    for number in _STOPPING:
        signal.signal(number, signal.SIG_DFL)
    _die_with_parent()
    os.register_at_fork(after_in_child=_die_with_parent)
    if os.getppid() != int(os.environ.get("FSDPCTL_LAUNCHER", os.getppid())):
        sys.exit(1)  # it died before the kernel was told


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _heed_from_now_on(wait_for_all: Callable[[], None]) -> None:
    """There is something to save: a signal lets the step end, and saves.

    A rank that a signal has ended before it got here fails those that wait for it: they have had
    that signal too, or will in a moment, and end by it as well.
    """
    for number in _STOPPING:
        signal.signal(number, _request_stop)
    try:
        wait_for_all()
    except Exception:
        time.sleep(_MOMENT)
        if _stop_signal is not None:
            signal.signal(_stop_signal, signal.SIG_DFL)
            os.kill(os.getpid(), _stop_signal)
        raise
    _has_begun.set()


def _watch_the_start(run_dir: Path, seconds: float | None, started: float) -> None:
    """Until there is something to save, end this rank, and so the others, once that is asked for.

    What asks is no signal, and the thread that trains may compile or wait for as long as it takes.
    """
    from fsdpctl.errors import StoppedError
    from fsdpctl.train.requests import early_request

    while not _has_begun.wait(_LOOKS_EVERY):
        if (why := early_request(run_dir, seconds, started)) is not None:
            error = StoppedError(f"stopped before there was anything to save; {why}")
            report(error)
            _leave(error.exit_code)


def _ignore_stops() -> None:
    """The work is done: whoever asks now comes too late, and must not make a failure of it."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


def _keep_errors(logs: Path, rank: int) -> Path:
    """Send standard error to a file of this rank; it is removed when the rank ends well."""
    path = logs / f"rank-{rank:05d}.log"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    return path


def report(error: BaseException) -> None:
    """Leave the cause for the launcher, in the file that torch's agent reads."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def _train(run_dir: Path, store: "Store | None", *, only_measures: bool) -> None:
    import torch

    from fsdpctl.comm.world import joined_world
    from fsdpctl.models.kernels import using
    from fsdpctl.run.directory import read_config
    from fsdpctl.run.lock import RunLock
    from fsdpctl.train.assemble import make_trainer
    from fsdpctl.train.attention import settled
    from fsdpctl.train.parts import Outside

    config = read_config(run_dir)
    lock = RunLock(run_dir)
    lock.join()
    started = _launch_began()
    outside = Outside(lambda: _stop_signal is not None, started, _heed_from_now_on)
    if int(os.environ["RANK"]) == 0:
        about = (run_dir, config.launch.time_limit, started)
        threading.Thread(target=_watch_the_start, args=about, daemon=True).start()
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch refuses products
        torch.use_deterministic_algorithms(True)
    with joined_world(str(config.launch.device), config.launch.timeout, store) as world:
        trainer = None
        try:
            config, lines = settled(config, world)
            with using(config.model.attention):
                trainer = make_trainer(config, world, outside, shows=not only_measures, lines=lines)
                if only_measures:
                    trainer.measure()
                else:
                    trainer.run()
            _ignore_stops()
        except Exception as error:
            report(error)  # before anything that may have to wait
            if trainer is not None:
                trainer.leave()
            raise
    lock.release()


def _launch_began() -> float:
    """In seconds since the epoch; without the launcher's word it is when this process began."""
    import psutil

    return float(os.environ.get("FSDPCTL_STARTED") or psutil.Process().create_time())


def _leave(code: int) -> NoReturn:
    """End at once: the usual end of a process may wait for peers that wait for it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main() -> None:
    """Train as the run directory's config.yaml says; the exit code says how it ended."""
    tie_to_launcher()
    _work(Path(sys.argv[1]), only_measures=MEASURE in sys.argv[2:])


def become_rank(run_dir: Path, store: "Store") -> None:
    """The same in this process, which somebody else has started as the rank that RANK says.

    Args:
        run_dir: prepared by rank 0.
        store: where the ranks meet.
    """
    tie_to_launcher()
    _work(run_dir, store)


def _work(run_dir: Path, store: "Store | None" = None, *, only_measures: bool = False) -> None:
    rank, terminal = int(os.environ["RANK"]), os.dup(2)
    log = _keep_errors(run_dir / "logs", rank)
    from fsdpctl.errors import FsdpctlError
    from fsdpctl.train.standing import answer_to_watch

    answer_to_watch()
    try:
        _train(run_dir, store, only_measures=only_measures)
    except FsdpctlError as error:
        if store is not None and rank == 0:  # there is no launcher of ours to say it
            os.write(terminal, f"fsdpctl: {error}\n".encode())
        with contextlib.suppress(OSError):
            print(f"{socket.gethostname()}: {error}", file=sys.stderr)
        _leave(error.exit_code)
    except Exception as error:
        if store is not None:
            os.write(terminal, f"fsdpctl: rank {rank}: {error!r:.300}; see {log}\n".encode())
        with contextlib.suppress(OSError):
            traceback.print_exc()
        _leave(1)
    with contextlib.suppress(OSError):
        log.unlink(missing_ok=True)
    _leave(0)  # threads of torch's may abort a process whose interpreter ends beside them


if __name__ == "__main__":
    main()
