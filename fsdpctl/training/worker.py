"""The program of each rank: `python -m fsdpctl.training.worker RUN_DIR [measure]`."""

import contextlib
import ctypes
import faulthandler
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

from fsdpctl.errors import STOP_SIGNALS
from fsdpctl.io.activity import DISPLAY
from fsdpctl.io.files import open_nofollow
from fsdpctl.io.texts import one_line

if TYPE_CHECKING:
    from fsdpctl.comm.world import Store, World
    from fsdpctl.resolve.run_plan import RunPlan
    from fsdpctl.resolve.script_module import ScriptTask

MODULE = "fsdpctl.training.worker"
MEASURE_ONLY = "measure"  # last argument: run only steps, without output
# Environment variables.
STATUS_FILE = "FSDPCTL_STATUS_FILE"  # the file with the status of this host's ranks
STARTED = "FSDPCTL_STARTED"  # when the launch began, in seconds since the epoch; for a time limit
LAUNCHER = "FSDPCTL_LAUNCHER"  # process ID

_PR_SET_PDEATHSIG = 1

_STOP_FILE_SECONDS = 1.0  # between polls of the file STOP
_ANSWER_SECONDS = 0.5  # between polls for a watchdog's request
_SIGNAL_SECONDS = 0.3  # in which a signal reaches all ranks
_stop_signal: int | None = None
_can_save = threading.Event()  # a step is completed


def _request_stop(signum: int, frame: FrameType | None) -> None:
    global _stop_signal
    _stop_signal = signum


def die_with_launcher() -> None:
    """Have the kernel kill this worker, and its children, when its launcher exits.

    The worker then exits without saving: a peer may be gone, and the last checkpoint is complete.
    """
    # Until the first step is completed, a stop request ends the worker at once, even in a wait.
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    _die_with_parent()
    os.register_at_fork(after_in_child=_die_with_parent)
    if os.getppid() != int(os.environ.get(LAUNCHER, os.getppid())):
        sys.exit(1)  # the launcher exited before the call above


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _handle_signals(wait_for_all: Callable[[], None]) -> None:
    """From now on, let the worker complete the step and save after a stop signal.

    If a signal has ended another rank, the barrier fails; this rank then ends by the same signal.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, _request_stop)
    try:
        wait_for_all()
    except Exception:
        time.sleep(_SIGNAL_SECONDS)
        if _stop_signal is not None:
            signal.signal(_stop_signal, signal.SIG_DFL)
            os.kill(os.getpid(), _stop_signal)
        raise
    _can_save.set()


def _watch_for_early_stop(run_dir: Path, seconds: float | None, started: float) -> None:
    """Until a step is completed, end all ranks on a STOP file or at the time limit."""
    from fsdpctl.errors import StoppedError
    from fsdpctl.training.requests import take_stop_reason

    while not _can_save.wait(_STOP_FILE_SECONDS):
        if (reason := take_stop_reason(run_dir, seconds, started)) is not None:
            error = StoppedError(f"stopped before there was anything to save ({reason})")
            report_error(error)
            _exit_now(error.exit_code)


def _redirect_stderr(logs: Path, rank: int) -> Path:
    """Redirect standard error to a log file, which is removed if the rank succeeds."""
    path = logs / f"rank-{rank:05d}.log"
    with contextlib.suppress(OSError), open_nofollow(path, "wb", num_folders=1) as file:
        os.dup2(file.fileno(), 2)
    return path


def report_error(error: BaseException) -> None:
    """Write the error to the file that torch's agent reads for the launcher."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def _join_and_train(
    run_dir: Path, store: "Store | None", task: "ScriptTask | None", *, only_measures: bool
) -> None:
    import psutil
    import torch

    from fsdpctl.comm.world import joined_world
    from fsdpctl.resolve.run_plan import stored_plan
    from fsdpctl.run.directory import read_config
    from fsdpctl.run.heartbeat import RunLock

    lock = RunLock(run_dir)
    try:
        plan = stored_plan(read_config(run_dir))
        lock.join()
    except Exception as error:
        report_error(error)
        raise
    config = plan.config
    started = float(os.environ.get(STARTED) or psutil.Process().create_time())
    if int(os.environ["RANK"]) == 0:
        args = (run_dir, config.launch.time_limit, started)
        threading.Thread(target=_watch_for_early_stop, args=args, daemon=True).start()
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch
        torch.use_deterministic_algorithms(True)
    with joined_world(str(config.launch.device), config.launch.timeout, store) as world:
        _run(plan, world, started, task, only_measures=only_measures)
    lock.release()


def _run(
    plan: "RunPlan",
    world: "World",
    started: float,
    task: "ScriptTask | None",
    *,
    only_measures: bool,
) -> None:
    from fsdpctl.models.attention_kernels import tf32_matmuls, use_kernel
    from fsdpctl.models.custom_ops import fuse_kernels
    from fsdpctl.training.assemble import make_trainer
    from fsdpctl.training.callbacks.memory import write_snapshot
    from fsdpctl.training.train_step import LaunchContext

    context = LaunchContext(
        stop_requested=lambda: _stop_signal is not None, started=started,
        on_first_step=_handle_signals,
    )  # fmt: skip
    options = {"shows": not only_measures, "only_measures": only_measures}
    trainer, config = None, plan.config
    try:
        with (
            use_kernel(config.model.attention),
            tf32_matmuls(to_tf32=config.uses_tf32),
            fuse_kernels(config.launch.device if config.train.compile else None),
        ):
            trainer = make_trainer(plan, world, context, task=task, **options)
            trainer.run()
        for signum in STOP_SIGNALS:  # the run is complete: a late signal must not make it fail
            signal.signal(signum, signal.SIG_IGN)
    except Exception as error:
        if not only_measures:
            write_snapshot(error, Path(str(config.train.run_dir)), world.rank)
        report_error(error)  # first, because the following calls may wait for other ranks
        if trainer is not None:
            trainer.finish_pending()
        raise


def _exit_now(code: int) -> NoReturn:
    """Exit without Python's shutdown, which may wait for peers that wait for this rank."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def start_status() -> None:
    """Publish this rank's status, write stacks on SIGUSR2, and answer a watchdog."""
    from fsdpctl.comm.rank_status import STATUS_PAGE

    # The handler also runs while a thread holds the interpreter lock.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if (path := os.environ.get(STATUS_FILE)) is not None:
        STATUS_PAGE.open(Path(path), int(os.environ["LOCAL_RANK"]))
    STATUS_PAGE.at("starting")
    threading.Thread(target=_answer_watchdog, daemon=True).start()


def _answer_watchdog() -> None:
    from fsdpctl.comm.rank_status import STATUS_PAGE

    while not STATUS_PAGE.answer_request():
        time.sleep(_ANSWER_SECONDS)


def main() -> None:
    """Train as config.yaml configures, and exit with the code of the outcome."""
    die_with_launcher()
    _run_and_exit(Path(sys.argv[1]), only_measures=MEASURE_ONLY in sys.argv[2:])


def become_rank(run_dir: Path, store: "Store", task: "ScriptTask | None" = None) -> None:
    """Train as rank `RANK` of another launcher, in a prepared run; ranks connect by `store`.

    This process exits with the run. With the `task` of a script, it exits only if the run fails.
    """
    # A script that is the only rank may have no launcher to exit with.
    if task is None or os.environ["WORLD_SIZE"] != "1":
        die_with_launcher()
    _run_and_exit(run_dir, store, task)


def _run_and_exit(
    run_dir: Path,
    store: "Store | None" = None,
    task: "ScriptTask | None" = None,
    *,
    only_measures: bool = False,
) -> None:
    rank, terminal = int(os.environ["RANK"]), os.dup(2)
    if rank == 0 and not only_measures:
        DISPLAY.start(sys.stdout, f"starting {os.environ['WORLD_SIZE']} ranks")
    log = _redirect_stderr(run_dir / "logs", rank)
    from fsdpctl.comm.rank_status import FINISHING, STATUS_PAGE
    from fsdpctl.errors import FsdpctlError, SignalError

    start_status()
    try:
        _join_and_train(run_dir, store, task, only_measures=only_measures)
    except FsdpctlError as error:
        if store is not None and rank == 0:  # no launcher of fsdpctl prints the error
            os.write(terminal, f"fsdpctl: {one_line(str(error))}\n".encode())
        with contextlib.suppress(OSError):
            print(f"{socket.gethostname()}: {error}", file=sys.stderr)
        _exit_now(error.exit_code)
    except SignalError as error:  # raised in a script before there is anything to save
        os.write(terminal, f"fsdpctl: {error} before there was anything to save\n".encode())
        _exit_now(error.exit_code)
    except Exception as error:
        if store is not None:
            os.write(terminal, f"fsdpctl: rank {rank}: {error!r:.300}; see {log}\n".encode())
        with contextlib.suppress(OSError):
            traceback.print_exc()
        _exit_now(1)
    with contextlib.suppress(OSError):
        log.unlink(missing_ok=True)
    if task is not None:
        STATUS_PAGE.at(FINISHING)  # the watchdog must not kill a script that continues
        STATUS_PAGE.close()
        os.dup2(terminal, 2)
        return
    _exit_now(0)  # torch's threads may abort a process while its interpreter shuts down


if __name__ == "__main__":
    main()
