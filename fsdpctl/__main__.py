"""`python -m fsdpctl`, and what the installed command runs: first of all, what must not wait."""

import os
import signal


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
    # Its warnings would precede the one line of an error; what matters in them is checked.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Threads of OpenMP that wait would spin, on cores that other processes need; torch reads it
    # when it loads, here and in all children. GOMP_SPINCOUNT takes precedence.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from fsdpctl.commands.app import main as run  # takes a moment

    run()


if __name__ == "__main__":
    main()
