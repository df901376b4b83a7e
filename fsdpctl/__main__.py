"""The entry point of `python -m fsdpctl` and of the installed command.

Signals and standard streams are set up before the slow imports.
"""

import os
import signal
import sys

_DEFAULT_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_WAIT_POLICY": "PASSIVE"
}  # fmt: skip


def _interrupted(number: int, frame: object) -> None:
    os._exit(130)  # nothing has started; commands/app.py installs other handlers


def _open_standard_streams() -> None:
    """Open closed standard streams: the next opened file would get the stream's descriptor."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system assigns the lowest free descriptor.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupted)
_open_standard_streams()


def main() -> None:
    """Run the command line."""
    # Libraries read these variables when they are imported, here and in all child processes.
    # fsdpctl itself reports what matters in warnings of transformers and torch's C++, such as a
    # lost launcher. OpenMP threads that spin would keep cores busy; GOMP_SPINCOUNT overrides that.
    for name, text in _DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, text)
    try:
        from fsdpctl.commands.app import main as run  # slow to import

        run()
    except ImportError as error:
        package = (error.name or "fsdpctl").partition(".")[0]
        if package == "fsdpctl":
            raise
        from fsdpctl.io.packages import install_hint

        print(f"fsdpctl: {install_hint(package, error)}", file=sys.stderr)
        sys.exit(2)  # UsageError


if __name__ == "__main__":
    main()
