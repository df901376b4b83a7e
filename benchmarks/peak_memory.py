"""The peak bytes of tensors on a rank during a step, for each engine.

    python -m benchmarks.peak_memory --out benchmarks/results/peak-memory-cpu.json

Tensors that exist before a step are counted one by one. Allocations and frees during the step are
events of the profiler. gloo's threads free their copies late, and the profiler misses some of these
events, so the figures of an engine differ between steps. The report has the range of five steps.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks.contestants import CONTESTANTS, Step
from benchmarks.report import PAIRS, arguments, on_ranks, write_report
from benchmarks.step_time import DTYPES, make_decoder

# Width, blocks, vocabulary: blocks outweigh the vocabulary, and the other way round.
MODELS = {"blocks": (256, 6, 1000), "vocabulary": (256, 4, 16000)}
WARM_UP, STEPS = 3, 5


def _alive() -> int:
    """Return the bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, torch.nn.Parameter):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _highest(events: Any) -> int:
    """Return the largest sum of bytes that were allocated and not freed at any time."""
    changes: list[tuple[int, int]] = []

    def collect(nodes: Any) -> None:
        for node in nodes:
            if node.typed[0] == _EventType.Allocation:
                changes.append((node.start_time_ns, node.typed[1].alloc_size))
            collect(node.children)

    collect(events)
    now = highest = 0
    for _, change in sorted(changes):
        now += change
        highest = max(highest, now)
    return highest


def _peak_of(step: Step, tokens: Tensor, targets: Tensor) -> int:
    dist.barrier()
    before = _alive()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        step(tokens, targets)
    assert traced.profiler is not None
    assert traced.profiler.kineto_results is not None
    return before + _highest(traced.profiler.kineto_results.experimental_event_tree())


def measure(model: str, dtype: str) -> dict[str, dict[str, float]]:
    """Return the peaks on rank 0, in MB; collective."""
    device = torch.device("cpu")
    torch.manual_seed(dist.get_rank())
    tokens, targets = torch.randint(0, MODELS[model][2], (2, 2, 64)).unbind()
    results = {}
    for name in (name for pair in PAIRS.items() for name in pair):
        before = _alive()
        step = CONTESTANTS[name](make_decoder(*MODELS[model]), DTYPES[dtype], device)
        for _ in range(WARM_UP):
            step(tokens, targets)
        peaks = [(_peak_of(step, tokens, targets) - before) / 1e6 for _ in range(STEPS)]
        results[name] = {"least_mb": round(min(peaks), 3), "largest_mb": round(max(peaks), 3)}
        del step  # otherwise its memory counts for the next engine
    return results


def measure_all(rank: int) -> list[dict[str, Any]]:
    """Return a row for each model and dtype; collective."""
    return [_row(model, dtype, measure(model, dtype)) for model in MODELS for dtype in DTYPES]


def _row(model: str, dtype: str, result: dict[str, dict[str, float]]) -> dict[str, Any]:
    over = {
        f"{ours}_over_{theirs}": round(result[ours]["largest_mb"] / result[theirs]["largest_mb"], 4)
        for ours, theirs in PAIRS.items()
    }
    size = dist.get_world_size()
    return {"world_size": size, "model": model, "dtype": dtype, **over, "engines": result}


def main() -> None:
    """Measure, print and write."""
    options = arguments(world_sizes=(2, 4))
    results = [row for size in options.world_sizes for row in on_ranks(size, measure_all)[0]]
    print(*results, sep="\n")
    write_report(options.out, "peak_memory", results, backend="gloo", steps=STEPS)


if __name__ == "__main__":
    main()
