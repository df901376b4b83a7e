"""Runs a test body on several ranks of this machine, in a tenth of a second.

Ranks communicate with gloo, and with `on_devices` also with NCCL on emulated CUDA devices.

They are forked from a server that has imported torch and never used it. That is as fast as forking
pytest itself, whose children would hang once pytest has used OpenMP.
"""

import faulthandler
import functools
import importlib
import inspect
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import emulated

_context = multiprocessing.get_context("forkserver")
_PRELOADED = ["tests.preload"]
_context.set_forkserver_preload(_PRELOADED)
_DEVICES = 4

Body = Callable[..., None]


@functools.cache
def _emulated_server() -> ForkServer:
    """Start a second server, whose torch has emulated CUDA devices."""
    server = ForkServer()
    server.set_forkserver_preload(_PRELOADED)
    settings = emulated.environment(devices=_DEVICES, lag_us=500)
    with mock.patch.dict(os.environ, settings):
        server.ensure_running()
    return server


def distributed(
    world_size: int | None = None, timeout: float = 60.0, *, on_devices: bool = False
) -> Callable[[Body], Body]:
    """Run the decorated test on every rank, as `test(rank, world_size, **fixtures)`.

    Without a `world_size` the test takes it from its parameters. With `on_devices` each rank has an
    emulated CUDA device, the fixture `seed` orders its kernels, and a race fails the test.
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            ranks = world_size or fixtures.pop("world_size")
            if not on_devices:
                return _run(body, ranks, timeout, fixtures)
            if reason := emulated.missing():
                pytest.skip(reason)
            connect = _emulated_server().connect_to_new_process
            with mock.patch.object(forkserver, "connect_to_new_process", connect):
                return _run(body, ranks, timeout, fixtures)

        hidden = {"rank"} if world_size is None else {"rank", "world_size"}
        signature = inspect.signature(body)
        parameters = [each for name, each in signature.parameters.items() if name not in hidden]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def in_turn(**factors: Sequence[Any]) -> Callable[[Body], Body]:
    """Run the decorated body for every combination of `factors`, all on the same ranks.

    Starting ranks takes as long as a short body. An error has a note with its combination. A key
    may name several parameters, as in `a__b=[(1, 2), (3, 4)]`.
    """

    def decorate(body: Body) -> Body:
        names = [name for key in factors for name in key.split("__")]

        @functools.wraps(body)
        def every_case(**fixtures: Any) -> None:
            for chosen in itertools.product(*factors.values()):
                case: dict[str, Any] = {}
                for key, value in zip(factors, chosen, strict=True):
                    parts = key.split("__")
                    case.update(zip(parts, value if len(parts) > 1 else [value], strict=True))
                try:
                    body(**fixtures, **case)
                except BaseException as error:
                    error.add_note(f"with {case}")
                    raise

        signature = inspect.signature(body)
        parameters = [each for name, each in signature.parameters.items() if name not in names]
        every_case.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return every_case

    return decorate


def _run(body: Body, world_size: int, timeout: float, fixtures: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        ranks: list[BaseProcess] = []
        reports: dict[Connection, int] = {}
        for rank in range(world_size):
            ours, theirs = _context.Pipe(duplex=False)
            test_id = (body.__module__, body.__qualname__)
            process: BaseProcess = _context.Process(
                target=_rank_main,
                args=(theirs, test_id, (rank, world_size), Path(scratch), fixtures),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append(process)
            reports[ours] = rank
        try:
            _raise_first_failure(reports, time.monotonic() + timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{_stacks(ranks, Path(scratch))}") from None
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _raise_first_failure(reports: dict[Connection, int], deadline: float) -> None:
    """Raise the first failure, which causes those of other ranks."""
    pending = dict(reports)
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(pending.values())} did not finish")
        for report in ready:
            assert isinstance(report, Connection)
            rank = pending.pop(report)
            try:
                failure = report.recv()
            except EOFError:
                failure = "died without a report"
            if failure:
                raise AssertionError(f"rank {rank}:\n{failure}")


def _stacks(ranks: list[BaseProcess], scratch: Path) -> str:
    """Return the stack of each rank."""
    for process in ranks:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    files = sorted(scratch.glob("stack-*"))
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)


def _rank_main(
    report: Connection,
    test_id: tuple[str, str],
    rank_and_size: tuple[int, int],
    scratch: Path,
    fixtures: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    rank, world_size = rank_and_size
    on_device = "EMULATED_CUDA" in os.environ
    os.environ["EMULATED_CUDA_SEED"] = str(fixtures.get("seed", 0))
    stack = (scratch / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        store = FileStore(str(scratch / "rendezvous"), world_size)
        backend, device = "gloo", None
        if on_device:
            backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, device_id=device
        )
        module, name = test_id
        body = getattr(importlib.import_module(module), name).__wrapped__
        body(rank=rank, world_size=world_size, **fixtures)
        if on_device:
            torch.cuda.synchronize()
            problems = torch.cuda.emulated.problems()  # type: ignore[attr-defined]
            assert not problems, problems
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        report.send(traceback.format_exc())
    else:
        report.send(None)
