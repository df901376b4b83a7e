"""Moments, by the clock of what computes."""

import time

import torch

Mark = float | torch.cuda.Event


def mark(*, on_cuda: bool) -> Mark:
    """Now: by the host's clock, or on CUDA where the current stream is, at no cost to the host."""
    if not on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before: Mark, after: Mark) -> float:
    """From one to the other; on CUDA the device must have got there."""
    if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
        milliseconds: float = before.elapsed_time(after)
        return milliseconds / 1e3
    assert isinstance(before, float)
    assert isinstance(after, float)
    return after - before
