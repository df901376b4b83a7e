"""Made-up variants for reports."""

from dataclasses import replace
from typing import Any

from fsdpctl.commands.compare.measure import summarized
from fsdpctl.commands.compare.report import ComparisonInfo
from fsdpctl.commands.compare.row import FAILED, Round, Row

MIB = 1 << 20
ABOUT = ComparisonInfo(
    "measured", "llama_tiny, 16 tokens per sample", "2 ranks of some CPU",
    "3 rounds of 8 steps per variant", "fsdpctl compare strategy=a,b", {"torch": "9.9"},
    {"processor": "<some> CPU"}, "2026-01-01",
)  # fmt: skip


def round_at(speed: float, **about: Any) -> Round:
    """Return the summary of a run at `speed` tokens per second with 1,000 tokens per step."""
    seconds = 1000 / speed
    figures: dict[str, Any] = {
        "run_dir": None, "tokens_per_second": speed,
        "tokens_per_second_quartiles": (0.9 * speed, 1.1 * speed), "step_seconds": seconds,
        "compute_seconds": 0.7 * seconds, "exposed_communication_seconds": 0.2 * seconds,
        "optimizer_seconds": 0.08 * seconds, "data_seconds": 0.02 * seconds, "mfu": None,
        "peak_engine_bytes": 9 * MIB, "peak_tensor_bytes": None, "peak_reserved_bytes": None,
        "final_loss": 2.5,
    }  # fmt: skip
    return Round(**{**figures, **about})


def measured(name: str, *speeds: float, memory: float = 50, **about: Any) -> Row:
    """Return a variant that ran at these speeds, before it is summarized."""
    rounds = tuple(
        round_at(speed, run_dir=f"runs/{name}/round-{at + 1}", **about)
        for at, speed in enumerate(speeds)
    )
    return Row(
        {"strategy": name}, name, world_size=2, sent_bytes_per_step=3 * MIB, rounds=rounds,
        estimated_peak_engine_bytes=9 * MIB, estimated_peak_tensor_bytes=int(memory * MIB),
        memory_bytes=100 * MIB,
    )  # fmt: skip


def failed(name: str) -> Row:
    return replace(Row({"strategy": name}, name), status=f"{FAILED}<rank 1> was killed")


def of(*rows: Row) -> list[Row]:
    """Return the rows with their summaries."""
    return [summarized(row) for row in rows]
