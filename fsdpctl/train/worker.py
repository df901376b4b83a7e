"""What the launcher starts on every rank: `python -m fsdpctl.train.worker RUN_DIR`."""

import ctypes
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_stop_signal: int | None = None


def _request_stop(number: int, frame: FrameType | None) -> None:
    global _stop_signal
    _stop_signal = number


def _tie_to_launcher() -> None:
    """Have the kernel ask this worker to stop when its launcher dies, however it dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, _request_stop)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ.get("FSDPCTL_LAUNCHER", os.getppid())):
            sys.exit(1)  # it died before the kernel was told


def _keep_errors(logs: Path, rank: int) -> Path:
    """Send standard error to a file of this rank; it is removed when the rank ends well."""
    path = logs / f"rank-{rank:05d}.log"
    file = path.open("wb", buffering=0)
    os.dup2(file.fileno(), 2)
    return path


def _report(error: BaseException) -> None:
    """Leave the cause for the launcher, in the file that torch's agent reads."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def _train(run_dir: Path) -> None:
    import torch

    from fsdpctl.comm.world import joined_world
    from fsdpctl.train.assemble import make_trainer
    from fsdpctl.train.run_dir import RunLock, read_config

    config = read_config(run_dir)
    lock = RunLock(run_dir)
    lock.join()
    torch.use_deterministic_algorithms(config.train.deterministic)
    with joined_world(str(config.launch.device), config.launch.timeout) as world:
        make_trainer(config, world, lambda: _stop_signal is not None).run()
    lock.release()


def main() -> None:
    """Train as the run directory's config.yaml says; the exit code says how it ended."""
    _tie_to_launcher()
    run_dir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    log = _keep_errors(run_dir / "logs", rank)
    from fsdpctl.errors import FsdpctlError

    try:
        _train(run_dir)
    except FsdpctlError as error:
        print(f"{type(error).__name__} on {socket.gethostname()}: {error}", file=sys.stderr)
        _report(error)
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        _report(error)
        sys.exit(1)
    log.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
