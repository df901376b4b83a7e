"""What a process that runs one test body after another has to be like between two."""

import functools
import gc
import importlib
import locale
import logging
import multiprocessing
import operator
import os
import resource
import signal
import socket
import sys
import threading
import time
import tracemalloc
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fsdpctl.comm.base import Collectives

_GRACE = 2.0  # seconds until what is ending has ended, such as threads and connections
_ENDING = {"threads", "open files", "processes"}
_HOOKS = importlib.import_module("torch.nn.modules.module")
_PATCHED: list[Any] = [
    torch, torch.Tensor, torch.cuda, torch.optim.Optimizer, nn.Module, nn.functional, _HOOKS, dist,
    distributed_c10d, distributed_c10d._world, os, signal, socket, sys, threading, time,
]  # fmt: skip
_KEPT = (torch.Tensor, nn.Module, torch.optim.Optimizer, Collectives, DeviceMesh)
_CHANGING = {
    "__warningregistry__", "__annotations__", "__slotnames__", "__msgspec_cache__", "_backend",
    "_member_map_", "_value2member_map_", "smart_apply",
}  # fmt: skip
_CACHE = type(functools.cache(print))
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
_NOTHING = "nothing"


def _flags() -> Iterator[Callable[[], object]]:
    """The switches of torch that can be read."""
    for name in dir(torch._C):
        if name.startswith(("_get_", "_len_torch_", "is_")) and "cache" not in name:
            read = getattr(torch._C, name)
            with suppress(RuntimeError, TypeError, ValueError):
                if isinstance(read(), bool | int | str):
                    yield read


_FLAGS = list(_flags())


def compiled() -> object:
    """Return how many frames Dynamo has seen, whose code it keeps."""
    return vars(sys.modules["torch._dynamo.convert_frame"])["FRAME_COUNTER"]


class Rest:
    """The state of this process when it is made."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        gc.freeze()  # what imported modules hold
        self.modules = len(sys.modules)  # it is of these
        self._values = _values()
        self._names = [(name, owner, dict(vars(owner))) for name, owner in _owners()]
        self._caches = [
            value
            for name, _, names in self._names
            for value in names.values()
            if name.startswith("fsdpctl") and isinstance(value, _CACHE)
        ]
        self._contents = [
            (f"{name}.{each}", value, copy(value))
            for name, _, names in self._names
            for each, value in names.items()
            if type(value) in (dict, OrderedDict, list, set)
            and each not in _CHANGING
            and name.startswith(("fsdpctl", "tests", _HOOKS.__name__))
        ]

    def renew(self) -> None:
        """Put back what a run leaves in its process."""
        torch.set_num_threads(1)
        sys.excepthook = sys.__excepthook__  # torch.distributed has one that names the rank
        for each in self._caches:
            each.cache_clear()
        for name, value, contents in self._contents:
            if name.startswith("fsdpctl") and not _has(value, contents):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(contents)

    def left(self) -> list[str]:
        """Name what differs now."""
        gc.collect()
        found = [*_kept(), *self._patched(), *self._changed()]
        gc.freeze()
        return found

    def _changed(self) -> Iterator[str]:
        ends = time.monotonic() + _GRACE
        while True:
            now, then = _values(), self._values
            changed = [name for name in {*now, *then} if now.get(name) != then.get(name)]
            if not {*changed} & _ENDING or time.monotonic() > ends:
                break
            time.sleep(0.01)
        for name in sorted(changed):
            if name.startswith("logger ") and name not in then and "fsdpctl" not in name:
                continue  # that of a library which the body was the first to import
            yield f"{name}: {then.get(name, _NOTHING)} before, {now.get(name, _NOTHING)} after"

    def _patched(self) -> Iterator[str]:
        for name, owner, then in self._names:
            now = vars(owner)
            if len(now) == len(then) and all(map(operator.is_, now.values(), then.values())):
                continue
            for each in {*now, *then} - _CHANGING:
                before, after = then.get(each, _NOTHING), now.get(each, _NOTHING)
                if before is not after and not (before is _NOTHING and _is_usual(after)):
                    yield f"{name}.{each}: {before!r} before, {after!r} after"
        for name, value, contents in self._contents:
            if not _has(value, contents):
                yield f"{name}: other contents"


def _values() -> dict[str, object]:
    loggers = {"root": logging.root, **logging.root.manager.loggerDict}
    return {
        **{f"os.environ[{name!r}]": value for name, value in os.environ.items()},
        **{f"torch._C.{read.__name__}": read() for read in _FLAGS},
        **{
            f"logger {name}": (each.level, each.handlers[:], each.propagate, each.disabled)
            for name, each in loggers.items()
            if isinstance(each, logging.Logger) and (each.level or each.handlers)
        },
        "signals": {each: signal.getsignal(each) for each in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "default dtype and device": (torch.get_default_dtype(), torch.get_default_device()),
        "threads of torch": torch.get_num_threads(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "process group": dist.is_initialized(),
        "working directory": os.getcwd(),
        "sys.path": [*sys.path],
        "warnings.filters": [*warnings.filters],
        "processors": os.sched_getaffinity(0),
        "limits": {each: resource.getrlimit(each) for each in _LIMITS},
        "locale": locale.setlocale(locale.LC_ALL),
        "tracemalloc": tracemalloc.is_tracing(),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), [*gc.callbacks]),
        "processes": [each.pid for each in multiprocessing.active_children()],
        "threads": {each.name for each in threading.enumerate()} - {"tqdm_monitor"},
        "open files": Counter(_open_files()),
    }


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            yield os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]


def _owners() -> Iterator[tuple[str, Any]]:
    """What may have been patched: modules, their classes, and objects that they hold."""
    for each in _PATCHED:
        yield getattr(each, "__name__", type(each).__name__), each
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("fsdpctl", "tests"):
            yield name, module
            for each, value in list(vars(module).items()):
                is_own = getattr(value, "__module__", None) == name and hasattr(value, "__dict__")
                if is_own and not isinstance(value, types.FunctionType):
                    yield f"{name}.{each}", value


def _is_usual(value: object) -> bool:
    """Return whether a first use sets it: a module, None, a step of optimizers that torch wraps."""
    if type(value) is types.FunctionType:
        return "hooked" in vars(value)
    return value is None or issubclass(type(value), types.ModuleType)


def _has(value: Any, contents: Any) -> bool:
    """Return whether these objects are the contents of `value`; they need not compare."""
    if isinstance(value, set) or len(value) != len(contents):
        return isinstance(value, set) and value == contents
    same = all(map(operator.is_, value, contents))
    if same and isinstance(value, dict):
        same = all(map(operator.is_, value.values(), contents.values()))
    return same


def _kept() -> Iterator[str]:
    """Name the objects that a body should have let go."""
    kinds: dict[type, bool] = {}
    for each in gc.get_objects():
        kind = type(each)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, _KEPT)
        if kinds[kind]:
            yield f"{kind.__name__} {[*getattr(each, 'shape', '')]} is alive"
