"""What is printed while a run goes on ends nothing."""

import errno
import os
import sys

import pytest

from fsdpctl.io.console import PatientConsole, journal
from fsdpctl.io.texts import printable


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


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE, errno.ENOSPC, errno.EBADF])
def test_a_stream_that_fails_is_silent_from_then_on(monkeypatch, number):
    gone = Gone(number)
    monkeypatch.setattr(sys, "stdout", gone)
    PatientConsole().print("a line")
    assert os.path.samefile(f"/proc/self/fd/{gone.descriptor}", os.devnull)
    os.close(gone.descriptor)


def test_a_stream_that_is_closed_is_silent(monkeypatch):
    file = open(os.devnull, "w")  # noqa: SIM115  # it is closed on purpose
    file.close()
    monkeypatch.setattr(sys, "stdout", file)
    PatientConsole().print("a line")
    assert not PatientConsole().is_terminal
    monkeypatch.setattr(sys, "stdout", None)
    PatientConsole().print("a line")
    assert not PatientConsole().is_terminal


def test_lines_are_kept_with_their_time_where_there_is_room(tmp_path):
    journal(tmp_path / "log", "one\ntwo \x1b[2J")
    said = (tmp_path / "log").read_text().splitlines()
    assert [line[20:] for line in said] == ["one", "two \N{REPLACEMENT CHARACTER}[2J"]
    journal(tmp_path / "no" / "log", "one")
    journal(tmp_path, "one")


def test_what_steers_a_terminal_is_not_printed():
    assert printable("a\tb\n\x1b]0;x\x07\x9b") == "a\tb\n�]0;x��"
