"""`python -m fsdpctl`, and what the installed command runs: first of all, what must not wait."""

import os
import signal
import sys

_UNLESS_SET = {
    "TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_WAIT_POLICY": "PASSIVE"
}  # fmt: skip


def _interrupted(number: int, frame: object) -> None:
    os._exit(130)  # nothing has begun; the command line has a handler of its own


def _open_standard_streams() -> None:
    """A closed one would become the first file that is opened, and be written to as the stream."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupted)
_open_standard_streams()


def main() -> None:
    """Run the command line."""
    # Libraries read these when they load, here and in all children. What matters in warnings of
    # transformers and of torch's C++, such as stacks where a launcher is lost, is checked and said
    # in a line. Threads of OpenMP that spin keep cores from others; GOMP_SPINCOUNT decides if set.
    for name, text in _UNLESS_SET.items():
        os.environ.setdefault(name, text)
    try:
        from fsdpctl.commands.app import main as run  # takes a moment

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
