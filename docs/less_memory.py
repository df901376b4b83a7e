"""The table of compressed states: their bytes, time and losses."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "little-memory.json"


def compressed_states_table() -> str:
    """Return bytes, time and losses of each way to store the states."""
    report = json.loads(RESULTS.read_text())
    results: list[dict[str, Any]] = report["results"]
    lines = [
        "| states | bytes per parameter | moved per update | update / float32 | step / float32 | "
        "training loss | validation loss | validation - float32's |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in results:
        cells = [
            each["name"],
            f"{each['bytes_per_parameter']:.2f}",
            f"{each['moved_bytes_per_parameter']:.1f}",
            f"{each['update_over_float32']:.2f}",
            f"{each['step_over_float32']:.2f}",
            *(_spread(each[f"{name}_losses"]) for name in ("train", "validation")),
            _spread(_differences(each["validation_losses"], results[0]["validation_losses"])),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    seeds = len(results[0]["train_losses"])
    about = (
        f"One thread of a CPU (torch {report['torch']}, {report['machine']}), compute in bf16. "
        f"Times: medians of {report['rounds']} alternating rounds, "
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['tokens']:,} tokens per step. "
        f"Losses in nats per byte: mean and standard deviation of {seeds} seeds after "
        f"{report['steps']:,} steps of `llama_tiny`; training loss over the last "
        f"{report['last_steps']}, difference per seed."
    )
    return "\n".join([*lines, "", about])


def _differences(losses: list[float], of: list[float]) -> list[float]:
    return [ours - theirs for ours, theirs in zip(losses, of, strict=True)]


def _spread(losses: list[float]) -> str:
    return f"{mean(losses):.4f} ± {stdev(losses):.4f}"
