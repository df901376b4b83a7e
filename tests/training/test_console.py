"""Output of a run: a terminal or pipe that is closed does not end the run."""

import errno
import os
import resource
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest

from fsdpctl.errors import FsdpctlError
from fsdpctl.io.output import LenientStream
from fsdpctl.io.terminal import LenientConsole, append_to_log
from fsdpctl.io.texts import printable
from tests.commands.run import command, environment


class Gone:
    """A terminal that went away."""

    encoding = "utf-8"

    def __init__(self, number: int) -> None:
        self.number = number
        self.descriptor = os.dup(1)

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EDQUOT, errno.EAGAIN])
def test_lost_output_is_reported_unless_its_reader_has_left(number):
    output = LenientStream(gone := Gone(number))  # type: ignore[arg-type]
    output.write("a line")
    lost = pytest.raises(FsdpctlError, match=f"^standard output: {os.strerror(number)}; ")
    with nullcontext() if number == errno.EPIPE else lost:
        output.check()
    os.close(gone.descriptor)


def test_text_that_the_encoding_lacks_is_reported(tmp_path):
    with open(tmp_path / "out", "w", encoding="ascii") as file:
        output = LenientStream(file)
        output.write("ž")
        with pytest.raises(FsdpctlError, match="set PYTHONUTF8=1"):
            output.check()


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE, errno.ENOSPC, errno.EBADF])
def test_a_stream_that_fails_is_silent_from_then_on(monkeypatch, number):
    gone = Gone(number)
    monkeypatch.setattr(sys, "stdout", gone)
    LenientConsole().print("a line")
    assert os.path.samefile(f"/proc/self/fd/{gone.descriptor}", os.devnull)
    os.close(gone.descriptor)


def test_a_stream_that_is_closed_is_silent(monkeypatch):
    file = open(os.devnull, "w")  # noqa: SIM115  # it is closed on purpose
    file.close()
    monkeypatch.setattr(sys, "stdout", file)
    LenientConsole().print("a line")
    assert not LenientConsole().is_terminal
    monkeypatch.setattr(sys, "stdout", None)
    LenientConsole().print("a line")
    assert not LenientConsole().is_terminal


def test_lines_are_kept_with_their_time_where_there_is_room(tmp_path):
    append_to_log(tmp_path / "log", "one\ntwo \x1b[2J")
    out = (tmp_path / "log").read_text().splitlines()
    assert [line[20:] for line in out] == ["one", "two \N{REPLACEMENT CHARACTER}[2J"]
    append_to_log(tmp_path / "no" / "log", "one")
    append_to_log(tmp_path, "one")


def test_what_steers_a_terminal_is_not_printed():
    assert printable("a\tb\n\x1b]0;x\x07\x9b") == "a\tb\n�]0;x��"


@pytest.mark.slow
@pytest.mark.parametrize(("args", "unbuffered"), [
    (("--help",), ""), (("list", "--json"), "1"), (("list",), ""),
])  # fmt: skip
def test_a_full_disk_is_an_error_and_a_reader_that_exits_is_none(tmp_path, args, unbuffered):
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, 100))
    read, write = os.pipe()
    os.close(read)
    places = tmp_path / "some", "/dev/full", write
    some, full, gone = (open(each, "wb") for each in places)  # noqa: SIM115  # closed below
    done = []
    for file, limited in ((some, limit), (full, None), (gone, None)):
        with file:
            done += [
                subprocess.run(
                    command(*args), stdout=file, stderr=subprocess.PIPE, preexec_fn=limited,
                    env=environment() | {"PYTHONUNBUFFERED": unbuffered}, text=True, check=False,
                )
            ]  # fmt: skip
    assert [each.returncode for each in done] == [1, 1, 0]
    assert (tmp_path / "some").stat().st_size == 100
    for each, why in zip(done, ("File too large", "No space left on device"), strict=False):
        assert f"fsdpctl: standard output: {why}; what was" in each.stderr
    assert "standard output" not in done[2].stderr
