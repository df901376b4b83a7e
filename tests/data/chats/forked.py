"""Processes for templates, forked from one that has imported what they need."""

import functools
import multiprocessing
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

from fsdpctl.data.chats import workers

_context = multiprocessing.get_context("forkserver")


@functools.cache
def _server() -> ForkServer:
    server = ForkServer()
    server.set_forkserver_preload([__name__])
    server.ensure_running()
    return server


def _child(connection: "Connection[Any, Any]") -> None:
    sys.argv[1:] = [str(connection.fileno())]
    workers.main()


class Forked:
    """What is used of `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid, self.kill, self.wait = process.pid, process.kill, process.join

    def poll(self) -> int | None:
        return self._process.exitcode


def start() -> tuple[Forked, "Connection[Any, Any]"]:
    """Start a process as `workers._start` does, ten times as fast."""
    ours, theirs = _context.Pipe()
    process: BaseProcess = _context.Process(target=_child, args=(theirs,), daemon=True)
    connect = _server().connect_to_new_process
    with theirs, mock.patch.object(forkserver, "connect_to_new_process", connect):
        process.start()
    return Forked(process), ours
