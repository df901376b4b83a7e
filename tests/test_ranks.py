"""Ranks that run several bodies: what one body leaves fails it, and reaches no other."""

import logging
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from fsdpctl.comm.collectives import collectives_for
from fsdpctl.engine.gradients import GradientReducer
from fsdpctl.models import norms
from fsdpctl.training import step
from tests import distributed as distributed_tests
from tests.distributed import distributed

_HELD: dict[str, object] = {}

LEAKS: dict[str, Callable[[], object]] = {
    "Tensor [3] is alive": lambda: _HELD.update(it=torch.ones(3)),
    "Linear [] is alive": lambda: logging.root.__dict__.update(it=nn.Linear(2, 3)),
    "Collectives [] is alive": lambda: _HELD.update(it=collectives_for(torch.device("cpu"))),
    "test_ranks._HELD: other contents": lambda: _HELD.update(it=1),
    "fsdpctl.training.step.summed_loss": lambda: vars(step).update(summed_loss=print),
    "GradientReducer.do": lambda: setattr(GradientReducer, "do", print),
    "torch.compile": lambda: vars(torch).update(compile=print),
    "_global_forward_hooks": lambda: register_module_forward_hook(print),
    "os.environ['LEFT']": lambda: os.environ.update(LEFT="1"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "_len_torch_function_stack": lambda: torch.set_default_device("meta"),
    "is_grad_enabled": lambda: torch.autograd.grad_mode.set_grad_enabled(False),
    "_get_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "_get_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "_get_cublas_allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "hooks of saved": lambda: torch._C._autograd._push_saved_tensors_default_hooks(abs, abs),
    "logger fsdpctl": lambda: logging.getLogger("fsdpctl").setLevel(1),
    "signals": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
    "warnings.filters": lambda: warnings.simplefilter("ignore"),
    "working directory": lambda: os.chdir("/"),
    "sys.path": lambda: sys.path.append("/"),
    "threads": lambda: threading.Thread(target=time.sleep, args=[99], daemon=True).start(),
    "limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
    "open files": lambda: os.open("/", os.O_RDONLY),
}


@distributed(world_size=1)
def leak(rank: int, world_size: int, name: str) -> None:
    LEAKS[name]()


@distributed()
def note_process(rank: int, world_size: int, folder: Path) -> None:
    assert not _HELD
    assert () not in norms._known
    assert torch.ones(1).dtype == torch.float32
    (folder / str(rank)).write_text(str(os.getpid()))


@distributed(world_size=1)
def fill_registry(rank: int, world_size: int) -> None:
    norms._known[()] = None


@distributed(world_size=1, fresh=True)
def note_fresh_process(rank: int, world_size: int, folder: Path) -> None:
    (folder / "fresh").write_text(str(os.getpid()))
    _HELD.update(it=1)


@distributed(world_size=2)
def end(rank: int, world_size: int, how: str) -> None:
    assert rank or how != "fails"
    if rank == 0 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and how == "compiles":
        torch.compile(torch.neg, backend="eager")(torch.ones(1))


def processes(folder: Path, ranks: int = 2) -> list[str]:
    note_process(world_size=ranks, folder=folder)
    return [(folder / str(rank)).read_text() for rank in range(ranks)]


@pytest.mark.parametrize("name", LEAKS)
def test_what_a_body_leaves_fails_it_by_name_and_reaches_no_other(name: str, tmp_path: Path):
    with pytest.raises(AssertionError, match="leak leaves in its process") as found:
        leak(name=name)
    assert name in str(found.value)
    processes(tmp_path, ranks=1)


@pytest.mark.parametrize("how", ["fails", "dies", "compiles"])
def test_ranks_stay_until_one_fails_dies_or_compiles(how: str, tmp_path: Path) -> None:
    before = processes(tmp_path)
    assert processes(tmp_path) == before
    if how == "compiles":
        end(how=how)
    else:
        with pytest.raises(AssertionError, match="rank [01]:"):
            end(how=how)
    after = processes(tmp_path)
    assert not {*before} & {*after}
    waiting = distributed_tests._waiting[0].process
    waiting.kill()
    waiting.join()
    assert len({*after, *processes(tmp_path)}) == 3


def test_fresh_ranks_are_used_once(tmp_path: Path) -> None:
    before, fresh = processes(tmp_path), []
    for _ in range(2):
        note_fresh_process(folder=tmp_path)
        fresh.append((tmp_path / "fresh").read_text())
    assert len({*before, *fresh}) == 4
    assert processes(tmp_path) == before


def test_ranks_of_few_are_those_of_many_and_find_registries_as_they_were(tmp_path: Path) -> None:
    before = processes(tmp_path)
    fill_registry()
    assert processes(tmp_path, ranks=1) == before[:1]
    assert processes(tmp_path) == before
