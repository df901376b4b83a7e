"""The course of a step in the Trace Event Format, which Perfetto and chrome://tracing show."""

import json

from fsdpctl.predict.player import COMPUTE, Played

_MICRO = 1e6


def chrome_trace(played: Played, title: str) -> str:
    """A lane for what computes, and one for each queue of collectives."""
    lanes = sorted(
        {each.lane for each in played.stretches}, key=lambda lane: (lane != COMPUTE, lane)
    )
    numbers = {lane: number for number, lane in enumerate(lanes)}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in numbers.items()
    ]
    events += [
        {
            "ph": "X",
            "name": each.label,
            "cat": each.lane,
            "pid": 0,
            "tid": numbers[each.lane],
            "ts": round(each.began * _MICRO, 3),
            "dur": round((each.ended - each.began) * _MICRO, 3),
        }
        for each in played.stretches
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
