"""The table of the decoders of transformers, from its results."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "decoders.json"
LOADING = RESULTS.with_name("loading.json")


def decoders_table() -> str:
    """Return the families by what `model=transformers` does with them."""
    report = json.loads(RESULTS.read_text())
    results: list[dict[str, Any]] = report["results"]
    accepted = [each for each in results if each["is_tried"] and not each["problem"]]
    works = [each for each in accepted if not each.get("failed")]
    ran = sum("failed" in each for each in works)  # by the command
    rows = {
        "several samples in a sequence": [each for each in works if each["packs"]],
        "one sample in a sequence": [each for each in works if not each["packs"]],
        "a command fails": [each for each in accepted if each.get("failed")],
        "rejected": [each for each in results if each["is_tried"] and each["problem"]],
        "not tried": [each for each in results if not each["is_tried"]],
    }
    lines = ["| chats are packed as | families | `model_type` (with experts: *)|", "|---|---:|---|"]
    for name, found in rows.items():
        if not found:
            continue
        lines.append(f"| {name} | {len(found)} | {', '.join(map(_name, found))} |")
    loss = max(each["loss_difference"] for each in works)
    gradient = max(each["gradient_difference"] for each in works)
    about = (
        f"transformers {report['transformers']}, torch {report['torch']}, on a CPU in float32. Of "
        f"the {len(works)} families that work, the loss differs from that of transformers by at "
        f"most {loss:.1e}, and gradients by {gradient:.1e} of the largest one. Each exports the "
        f"bytes that it read. {ran} of them ran by the command, with a tiny model and chats: "
        "`estimate-memory`, `train` on two ranks with the self-check, `evaluate` and "
        "`consolidate-checkpoint`; transformers loads the export."
    )
    return "\n".join([*lines, "", about])


def loading_table() -> str:
    """Return the memory of a rank that loads a model, by the number of ranks."""
    report = json.loads(LOADING.read_text())
    rows = report["results"]
    lines = ["| loaded by | ranks | peak of a rank, MiB |", "|---|---:|---:|"]
    lines += [f"| {each['by']} | {each['ranks']} | {each['peak_mib']:,.0f} |" for each in rows]
    size = rows[0]["model_mib"]
    return "\n".join([*lines, "", f"A model with experts of {size:,.0f} MiB in float32."])


def _name(each: dict[str, Any]) -> str:
    return f"{each['family']}*" if each["has_experts"] else str(each["family"])
