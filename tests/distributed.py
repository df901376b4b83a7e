"""Runs a test body on several ranks of this machine.

They talk by gloo, and if the test asks for that on emulated CUDA devices by NCCL too.

Ranks are forked from a server that has imported torch and never used it: as cheap as a fork of
pytest itself, which would hang once pytest has used OpenMP. They stay for the next body, which has
a process group of its own, unless one of them failed, died or compiled something. A body fails if
it leaves its process in another state than before (tests/at_rest.py).
"""

import faulthandler
import functools
import importlib
import inspect
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """A second server, whose torch has emulated CUDA devices."""
    server = ForkServer()
    server.set_forkserver_preload(_PRELOADED)
    settings = emulated.environment(devices=_DEVICES, lag_us=500)
    with mock.patch.dict(os.environ, settings):
        server.ensure_running()
    return server


def distributed(
    world_size: int | None = None,
    timeout: float = 60.0,
    *,
    on_devices: bool = False,
    fresh: bool = False,
) -> Callable[[Body], Body]:
    """Run the decorated test on every rank, as `test(rank, world_size, **fixtures)`.

    Without a `world_size` the test takes it from its parameters. With `on_devices` each rank has an
    emulated CUDA device, the fixture `seed` orders its kernels, and a race fails the test. `fresh`
    ranks have run nothing and run nothing else: for what the process counts or the system holds.
    Those on devices are, whose streams, clocks and memory are those of the process.
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            ranks = world_size or fixtures.pop("world_size")
            if not on_devices:
                return _run(body, ranks, timeout, fixtures, fresh=fresh)
            if reason := emulated.missing():
                pytest.skip(reason)
            connect = _emulated_server().connect_to_new_process
            with mock.patch.object(forkserver, "connect_to_new_process", connect):
                return _run(body, ranks, timeout, fixtures, fresh=True)

        hidden = {"rank"} if world_size is None else {"rank", "world_size"}
        signature = inspect.signature(body)
        kept = [each for name, each in signature.parameters.items() if name not in hidden]
        test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
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
        def every_case(**given: Any) -> None:
            for chosen in itertools.product(*factors.values()):
                case: dict[str, Any] = {}
                for key, value in zip(factors, chosen, strict=True):
                    parts = key.split("__")
                    case.update(zip(parts, value if len(parts) > 1 else [value], strict=True))
                try:
                    body(**given, **case)
                except BaseException as error:
                    error.add_note(f"with {case}")
                    raise

        signature = inspect.signature(body)
        kept = [each for name, each in signature.parameters.items() if name not in names]
        every_case.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return every_case

    return decorate


@dataclass(frozen=True, slots=True)
class _Rank:
    process: BaseProcess
    orders: Connection


always_fresh = False  # the ranks of the running test: those of slow ones, where a start is nothing
_waiting: list[_Rank] = []  # for the next body; the first ones of a body are these


def _ranks(count: int, *, fresh: bool) -> list[_Rank]:
    ranks = [] if fresh else [each for each in _waiting if each.process.is_alive()][:count]
    while len(ranks) < count:
        ours, theirs = _context.Pipe()
        process: BaseProcess = _context.Process(target=_rank_main, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        ranks.append(_Rank(process, ours))
    return ranks


def _run(
    body: Body, world_size: int, timeout: float, fixtures: dict[str, Any], *, fresh: bool
) -> None:
    where, fresh = (body.__module__, body.__qualname__), fresh or always_fresh
    ranks = _ranks(world_size, fresh=fresh)
    others = [each for each in _waiting if each not in ranks]
    stay = False
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for number, rank in enumerate(ranks):
                rank.orders.send((fresh, where, (number, world_size), Path(scratch), fixtures))
            reports = {each.orders: number for number, each in enumerate(ranks)}
            stay = _all_stay(reports, time.monotonic() + timeout)
        except TimeoutError as error:
            processes = [each.process for each in ranks]
            raise TimeoutError(f"{error}\n{_stacks(processes, Path(scratch))}") from None
        finally:
            if not fresh:
                _waiting[:] = [*ranks, *others] if stay else others
            for rank in [] if stay else ranks:
                rank.process.kill()
                rank.process.join()


def _all_stay(reports: dict[Connection, int], deadline: float) -> bool:
    """Return whether the ranks may run another body.

    The first rank to fail is the cause; the others fail because of it.
    """
    stay = True
    pending = dict(reports)
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(pending.values())} did not finish")
        for report in ready:
            assert isinstance(report, Connection)
            rank = pending.pop(report)
            try:
                failure, stays = report.recv()
            except (EOFError, ConnectionResetError):
                failure, stays = "died without a report", False
            if failure:
                raise AssertionError(f"rank {rank}:\n{failure}")
            stay = stay and stays
    return stay


def _stacks(ranks: list[BaseProcess], scratch: Path) -> str:
    """Where each rank hangs."""
    for process in ranks:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    files = sorted(scratch.glob("stack-*"))
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)


def _rank_main(orders: Connection) -> None:
    from tests import at_rest

    rest: at_rest.Rest | None = None
    while True:
        try:
            fresh, *order = orders.recv()
        except EOFError:
            return
        module, name = order[0]
        importlib.import_module(module)
        if rest is None or rest.modules != len(sys.modules):
            rest = at_rest.Rest()
        compiled = at_rest.compiled()
        failure = _outcome(*order)
        order.clear()
        rest.renew()
        stays = not (fresh or failure or at_rest.compiled() != compiled)
        if stays and (left := rest.left()):
            failure = f"{name} leaves in its process:\n" + "\n".join(left[:20])
        orders.send((failure, stays))


def _outcome(
    where: tuple[str, str],
    place: tuple[int, int],
    scratch: Path,
    fixtures: dict[str, Any],
) -> str | None:
    """Run the body in a new process group; return the traceback if it fails."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    rank, world_size = place
    torch.manual_seed(rank)
    random.seed(rank)
    on_device = "EMULATED_CUDA" in os.environ
    if on_device:
        os.environ["EMULATED_CUDA_SEED"] = str(fixtures.get("seed", 0))
    stack = (scratch / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    try:
        store = FileStore(str(scratch / "rendezvous"), world_size)
        backend, device = "gloo", None
        if on_device:
            backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, device_id=device
        )
        module, name = where
        body = getattr(importlib.import_module(module), name).__wrapped__
        body(rank=rank, world_size=world_size, **fixtures)
        for each in fixtures.values():
            if isinstance(each, pytest.MonkeyPatch):
                each.undo()
        if on_device:
            torch.cuda.synchronize()
            problems = torch.cuda.emulated.problems()  # type: ignore[attr-defined]
            assert not problems, problems
        dist.barrier()
        dist.destroy_process_group()
        return None
    except BaseException:
        return traceback.format_exc()
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        stack.close()
