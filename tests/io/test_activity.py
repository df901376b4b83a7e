"""Activities: a terminal and a log show them, a quiet process does not."""

import io
import os
import pty
import re
import time
from collections.abc import Iterator

import pytest

from fsdpctl.io import activity
from fsdpctl.io.activity import BYTES, Display


@pytest.fixture
def display(monkeypatch) -> Iterator[Display]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(activity, "_LOG_DELAY", 0.05)
    monkeypatch.setattr(activity, "_TERMINAL_DELAY", 0.05)
    monkeypatch.setattr(activity, "_REDRAW_INTERVAL", 0.01)
    result = Display()
    yield result
    result.stop()


def wait_for(text: str, stream: io.StringIO) -> None:
    end = time.monotonic() + 20
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.01)


def test_a_log_gets_lines_at_growing_distances(display):
    log = io.StringIO()
    display.start(log, "fsdpctl train")
    wait_for("fsdpctl train, 0:00\n", log)
    with display.doing("tokenizing", "conversations", 30) as advance:
        advance(12)
        wait_for("tokenizing: 12 of 30 conversations, 0:00\n", log)
        with display.doing("exporting", BYTES, 3 << 30) as more:
            more(1 << 30)
            wait_for("exporting: 1.00 GiB of 3.00 GiB, 0:00\n", log)
        began = time.monotonic()
        while time.monotonic() < began + 1.5:
            time.sleep(0.01)
    assert log.getvalue().count("tokenizing") <= 1 + 6  # 0.05, 0.15, 0.35, 0.75, 1.55 s


def test_output_counts_as_a_sign_of_life(display, monkeypatch):
    monkeypatch.setattr(activity, "_LOG_DELAY", 1.0)
    log = io.StringIO()
    display.before_output("a line\n")
    display.start(log, "working")
    for _ in range(150):
        display.before_output("a line\n")
        time.sleep(0.01)
    assert log.getvalue() == ""
    wait_for("working, 0:0", log)


def test_nothing_is_shown_after_the_start_or_if_quiet(display, monkeypatch):
    log = io.StringIO()
    display.start(log, "starting")
    wait_for("starting", log)
    display.end_startup()
    time.sleep(0.1)
    text = log.getvalue()
    time.sleep(0.3)
    assert log.getvalue() == text
    monkeypatch.setenv("FSDPCTL_QUIET", "1")
    silent = Display()
    with silent.doing("working"):
        silent.start(log, "starting")
        time.sleep(0.3)
    assert log.getvalue() == text


def test_a_terminal_gets_one_line_that_output_replaces(display):
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        display.start(stream, "starting")
        with display.doing("validating", "batches", 9) as advance:
            advance(2)
            time.sleep(0.5)
            display.before_output("step 1\n")
            time.sleep(0.02)
            seen = os.read(leader, 1 << 16).decode()
    assert re.search(r"\r\x1b\[2K. validating: 2 of 9 batches, 0:00", seen)
    assert "\n" not in seen
    os.close(leader)


def test_no_line_is_drawn_into_a_line_that_is_being_written(display):
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        display.start(stream, "generating")
        display.before_output("Once upon a ")
        time.sleep(0.3)
        stream.write("end")
        stream.flush()
        assert os.read(leader, 1 << 16) == b"end"
    os.close(leader)


def test_a_bar_shows_activities_itself(display):
    notes: list[str] = []
    display.start(io.StringIO(), "starting")
    display.attach_bar(notes.append)
    with display.doing("saving"):
        end = time.monotonic() + 20
        while not any(note.startswith("saving") for note in notes):
            assert time.monotonic() < end
    display.attach_bar(None)


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_only_the_first_process_of_a_launcher_shows_its_start(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    assert activity.is_first_process()
    monkeypatch.setenv(name, "0")
    assert activity.is_first_process()
    monkeypatch.setenv(name, "3")
    assert not activity.is_first_process()
