"""A rank that measures this machine together with others; rank 0 writes the profile."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from json import dumps
from math import sqrt
from pathlib import Path
from statistics import median

import torch

from fsdpctl.comm.base import Collectives, Gathering, Handle, Reduction
from fsdpctl.comm.collectives import collectives_for
from fsdpctl.comm.world import joined_world
from fsdpctl.plan.layout import EvenParts, Span
from fsdpctl.predict.hardware import CollectiveKind
from fsdpctl.predict.profile import VERSION, MeasuredPoint, Profile
from fsdpctl.tools.observe import LARGE, SMALL, device_seconds, observe_models, observe_sizes
from fsdpctl.train.worker import report, tie_to_launcher

MODULE = "fsdpctl.tools.profile_worker"
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = [4 * _KIB, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB]
_OVERLAPPED = 16 * _MIB  # of a collective that is measured during computation
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_SIDES = {"cpu": 256, "cuda": 4096}  # of matrices whose products take longer than their launch
_ROUNDS = 15
_APART, _MEETINGS = (0.004, 0.008, 0.016), 8  # seconds between meetings, and how many


def measure(device: torch.device, name: str, say: Callable[[str], None]) -> Profile:
    """Measure this machine with all its ranks at the same time. Collective."""
    world = collectives_for(device)
    dtype = _DTYPES[device.type]
    models = LARGE if device.type == "cuda" else SMALL
    operators, host_seconds_per_operator = observe_models(models, device, dtype, world.barrier, say)
    say("copies and the optimizer")
    sizes = [size for size in _SIZES if size >= 64 * _KIB]
    memory_copy = observe_sizes(sizes, partial(_copy, device), device, world.barrier)
    optimizer_step = observe_sizes(sizes, partial(_adamw, device), device, world.barrier)
    collectives: dict[str, list[MeasuredPoint]] = {}
    slowdown = drift = 0.0
    if world.size > 1:
        for kind in CollectiveKind:
            say(f"{kind.value} among {world.size} ranks")
            run = partial(_waiting, kind, world, device)
            collectives[kind.value] = observe_sizes(_SIZES, run, device, world.barrier)
        say("computation during a collective")
        slowdown = _overlap(world, device)
        say("drift between ranks")
        drift = _drift(world, device)
    return Profile(
        version=VERSION,
        device=name,
        is_cuda=device.type == "cuda",
        dtype=str(dtype).removeprefix("torch."),
        ranks=world.size,
        torch=torch.__version__,
        operators=operators,
        host_seconds_per_operator=host_seconds_per_operator,
        memory_copy=memory_copy,
        optimizer_step=optimizer_step,
        collectives=collectives,
        compute_slowdown=slowdown,
        comm_slowdown=slowdown,
        drift=drift,
    )


def _copy(device: torch.device, nbytes: int) -> Callable[[], object]:
    """Return a copy that reads half of the bytes and writes half."""
    source = torch.ones(nbytes // 8, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _adamw(device: torch.device, nbytes: int) -> Callable[[], object]:
    param = torch.nn.Parameter(torch.ones(nbytes // 4, device=device))
    param.grad = torch.ones_like(param)
    return torch.optim.AdamW([param], fused=True).step


def _collective(
    kind: CollectiveKind, world: Collectives, device: torch.device, nbytes: int
) -> Callable[[], Handle | Reduction]:
    """Return a function that starts a collective of all ranks on `nbytes`."""
    whole = torch.zeros(nbytes // 4, device=device)
    if kind is CollectiveKind.ALL_REDUCE:
        return partial(world.start_all_reduce, whole)
    parts = EvenParts(whole.numel() // world.size, world.size)
    whole = whole[: parts[-1].stop]
    if kind is CollectiveKind.GATHER:
        return partial(world.all_gather, [Gathering(whole, parts)])
    # Sending only; the additions are part of the computation.
    return partial(world.reduce_scatter, [(Span(0, whole.numel()), whole)], parts, torch.float32)


def _waiting(
    kind: CollectiveKind, world: Collectives, device: torch.device, nbytes: int
) -> Callable[[], object]:
    start = _collective(kind, world, device, nbytes)
    return lambda: start().wait()


def _product(device: torch.device) -> Callable[[], object]:
    side, dtype = _SIDES[device.type], _DTYPES[device.type]
    left = torch.randn(side, side, device=device, dtype=dtype)
    return partial(torch.mm, left, left)


def _overlap(world: Collectives, device: torch.device) -> float:
    """Return the share of speed that computation and a collective lose when they overlap."""
    multiply = _product(device)
    gather = _collective(CollectiveKind.GATHER, world, device, _OVERLAPPED)
    gather().wait()
    alone = _timed(world, device, lambda: gather().wait())
    one = _timed(world, device, multiply)
    # As long as the collective by rank 0's clock, because all ranks must do the same.
    products = max(1, int(world.gather_objects(alone / one)[0]))

    def both() -> None:
        handle = gather()
        for _ in range(products):
            multiply()
        handle.wait()

    together = _timed(world, device, both)
    return min(0.9, max(0.0, 1.0 - max(alone, products * one) / together))


def _drift(world: Collectives, device: torch.device) -> float:
    """Return the seconds by which ranks drift apart, per root of a second since a barrier."""
    multiply = _product(device)
    meet = _waiting(CollectiveKind.GATHER, world, device, _SIZES[0])

    def apart(seconds: float, *, meets: bool) -> None:
        for _ in range(_MEETINGS):
            for _ in range(max(1, int(seconds / one))):
                multiply()
            if meets:
                meet()

    one = float(world.gather_objects(_timed(world, device, multiply))[0])
    meeting = _timed(world, device, meet)
    drifts = []
    for seconds in _APART:
        alone = _timed(world, device, partial(apart, seconds, meets=False))
        together = _timed(world, device, partial(apart, seconds, meets=True))
        lost = (together - alone) / _MEETINGS - meeting
        drifts.append(max(0.0, lost) / sqrt(seconds))
    return median(drifts)


def _timed(world: Collectives, device: torch.device, run: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        world.barrier()
        times.append(device_seconds(run, device))
    return median(times)


def main(kind: str, out: str) -> None:
    """Measure a kind of device, and write the profile to a file on rank 0."""
    tie_to_launcher()
    try:
        with joined_world(kind, 600.0) as world:
            name = torch.cuda.get_device_name(world.device) if kind == "cuda" else "cpu"
            is_main = world.rank == 0
            say = partial(print, file=sys.stderr, flush=True) if is_main else lambda line: None
            found = measure(world.device, name, say)
            if is_main:
                Path(out).write_text(dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    except Exception as error:
        report(error)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
