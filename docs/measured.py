"""Tables of benchmark results, from the JSON files that the benchmarks write."""

import json
from pathlib import Path
from typing import Any

from benchmarks.pairs import PAIRS

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
_ENGINES = {  # by key in the JSON files
    "ddp": "PyTorch `DistributedDataParallel`",
    "zero_redundancy_optimizer": "PyTorch `ZeroRedundancyOptimizer`",
    "fsdp2": "PyTorch `fully_shard`",
    "fsdp2_tuned": "PyTorch `fully_shard`, tuned",
    "fsdp2_keeps": "PyTorch `fully_shard`, not resharded after forward",
    "no_shard": "**fsdpctl** `no_shard`",
    "shard_optimizer": "**fsdpctl** `shard_optimizer`",
    "shard_grad_op": "**fsdpctl** `shard_grad_op`",
    "full_shard": "**fsdpctl** `full_shard`",
}


def report_of(name: str) -> dict[str, Any]:
    """Return the results of a benchmark."""
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return report


def table_of(header: list[str], rows: list[list[str]], about: str) -> str:
    """Return a table in Markdown, with a line below it."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", about])


def measured_on(report: dict[str, Any]) -> str:
    """Return where a benchmark ran."""
    return f"torch {report['torch']}, {report['machine']}"


def base_dtype_table() -> str:
    """Return time and bytes of a step of adapters over bases in several dtypes."""
    report = report_of("base-dtype")
    rows = [
        [
            each["base"],
            f"{each['tokens_per_rank']:,}",
            f"{each['median_seconds']:.2f} s",
            f"{each['gathered_bytes'] / 1e6:.1f} MB",
            f"{each['at_rest_bytes'] / 1e6:.1f} MB",
        ]
        for each in report["results"]
    ]
    header = ["base", "tokens per rank", "step (median)", "gathered", "at rest per rank"]
    about = f"{report['ranks']} ranks, width {report['width']}, a float embedding and head included"
    return table_of(
        header, rows, f"{about}, {measured_on(report)}, {report['rounds']} alternating steps each."
    )


def offload_table() -> str:
    """Return the time of a step with states on the host, and what its schedule hides."""
    report = report_of("offload")
    rows = [
        [
            f"{each['setting']}, `{each['offload']}`",
            f"{each['host_step_over_none']:.2f}",
            f"{each['hidden_share']:.0%}",
            f"{each['time_over_none']:.2f}",
            f"{each['time_over_waiting']:.2f}",
            f"{each['copied_bytes_per_step'] / 1e6:.1f} MB",
        ]
        for each in report["results"]
    ]
    header = [
        "setting, `optimizer.offload=`",
        "host step / step without offload",
        "of which hidden",
        "step / step without offload",
        "step / step that waits for the host",
        "copied per rank and step",
    ]
    about = f"{report['ranks']} ranks over gloo, {measured_on(report)}"
    return table_of(header, rows, f"{about}, medians of {report['rounds']} alternating rounds.")


def slow_links_table() -> str:
    """Return time and traffic of a step over a slow link between two hosts."""
    report = report_of("slow-links")
    rows = [
        [
            f"`{each['strategy']}`",
            f"{each['sent_bytes_per_host_and_step'] / 1e6:.1f} MB",
            f"{each['bytes_over_full_shard']:.2f}",
            f"{each['time_over_full_shard']:.2f}",
        ]
        for each in report["results"]
    ]
    header = ["`strategy=`", "sent per host and step", "bytes / full_shard", "time / full_shard"]
    about = f"Two hosts with two ranks each, {report['mbit']} Mbit/s between them, over gloo"
    return table_of(
        header, rows, f"{about}, {measured_on(report)}, {report['rounds']} starts of each."
    )


def surviving_lines() -> str:
    """Return the costs of the watchdog and of a restart."""
    watching, restarting = report_of("watching"), report_of("restarting")
    steps, found = watching["results"], restarting["results"]
    share, longest = found["restart_over_start"], found["largest_restart_over_start"]
    return (
        f"- A step with hang detection takes {steps['time_over_unwatched']:.3f} times as long as "
        f"without ({steps['beats_per_step']:.0f} status updates per step; "
        f"{measured_on(watching)}).\n"
        f"- The time from a killed rank to the next step is {share:.2f} of the time from the "
        f"command to the first step, at most {longest:.2f}. At most {found['most_steps_lost']} of "
        f"the 25 steps between checkpoints were lost ({found['rounds']} runs of "
        f"{restarting['world_size']} ranks; {measured_on(restarting)})."
    )


def step_time_table() -> str:
    """Return each engine's overhead over the baseline, relative to that of fully_shard."""
    return _step_times("step-time-cpu", "added_over_fsdp2_added", "overhead / `fully_shard`'s")


def step_time_beside_ddp_table() -> str:
    """Return the time of a step relative to the baseline."""
    return _step_times("step-time-cpu-ddp", "median_over_floor", "time / baseline")


def _step_times(name: str, key: str, title: str) -> str:
    report = report_of(name)
    results = report["results"]
    header = [title, *(f"{each['size']} {each['dtype']}" for each in results)]
    rows = [
        [label, *(f"{each['engines'][engine][key]:.2f}" for each in results)]
        for engine, label in _ENGINES.items()
        if engine in results[0]["engines"]
    ]
    rounds = ", ".join(f"{e['rounds_of_each']} of {e['size']} {e['dtype']}" for e in results)
    rounds = f"{results[0]['starts']} starts; rounds of each: {rounds}"
    ranks = report["world_size"]
    return table_of(header, rows, f"{ranks} ranks over gloo, {measured_on(report)}; {rounds}.")


def peak_memory_table() -> str:
    """Return fsdpctl's peak memory relative to the corresponding engine of PyTorch."""
    report = report_of("peak-memory-cpu")
    results = report["results"]
    header = ["peak / PyTorch's"]
    header += [f"{e['model']} {e['dtype']}, {e['world_size']} ranks" for e in results]
    rows = [
        [
            f"`{ours}` / {_ENGINES[theirs].removeprefix('PyTorch ')}",
            *(f"{each[f'{ours}_over_{theirs}']:.2f}" for each in results),
        ]
        for ours, theirs in PAIRS.items()
    ]
    return table_of(header, rows, f"The largest of {report['steps']} steps, {measured_on(report)}.")


def host_time_table() -> str:
    """Return the host's time relative to that of fully_shard."""
    report = report_of("host-time")
    header = ["ranks", "overhead of forward and backward", "clipping and optimizer step"]
    rows = [
        [
            str(each["world_size"]),
            f"{each['passes_added_over_fsdp2_added']:.2f}",
            f"{each['update_over_fsdp2_update']:.2f}",
        ]
        for each in report["results"]
    ]
    about = f"Medians of {report['rounds']} rounds, {measured_on(report)}."
    return table_of(header, rows, about)


def planning_table() -> str:
    """Return the time of planning relative to that of importing torch."""
    report = report_of("planning")
    header = ["model", "ranks", "module on the meta device", "plan of a step with all bytes"]
    rows = [
        [
            each["model"],
            f"{each['world_size']:,}",
            f"{each['module_over_import_torch']:.3f}",
            f"{each['plan_over_import_torch']:.3f}",
        ]
        for each in report["results"]
    ]
    return table_of(
        header, rows, f"Medians of {report['rounds']} processes, {measured_on(report)}."
    )


def consolidate_table() -> str:
    """Return the time of consolidation relative to that of cat, and its memory."""
    report = report_of("consolidate")
    header = [
        "checkpoint",
        "time / `cat` and `sync`",
        "time / `cat` alone",
        "MiB above the interpreter",
    ]
    rows = [
        [
            f"{each['checkpoint_bytes'] / 1e9:.1f} GB",
            f"{each['time_over_cat']:.2f}",
            f"{each['time_over_cat_cached']:.2f}",
            f"{each['bytes_above_interpreter'] / (1 << 20):.0f}",
        ]
        for each in report["results"]
    ]
    return table_of(header, rows, f"Medians of {report['rounds']} rounds, {measured_on(report)}.")


def saving_table() -> str:
    """Return the cost of a checkpoint for training, in steps."""
    report = report_of("saving")
    results = report["results"]
    header = ["`checkpoint.mode`", "training waits", "complete after", "total cost"]
    rows = [
        [
            f"`{mode}`",
            *(
                f"{results[mode][key]:.3f}"
                for key in ("stall_over_step", "write_over_step", "cost_over_step")
            ),
        ]
        for mode in ("sync", "async")
    ]
    about = (
        f"In steps; {results['checkpoint_bytes'] / 1e6:.0f} MB from {report['ranks']} ranks, "
        f"medians of {report['rounds']} rounds, {measured_on(report)}."
    )
    return table_of(header, rows, about)


def estimate_errors_table() -> str:
    """Return the errors of the estimated peak of all tensors."""
    report = report_of("estimates")
    rows = [
        [
            str(each["world_size"]),
            str(each["configurations"]),
            f"{each['median_error']:.2%}",
            f"{each['worst_error']:.2%}",
        ]
        for each in report["results"]["small"]
    ]
    header = ["ranks over gloo", "configurations", "median error", "worst"]
    return table_of(header, rows, f"{measured_on(report)}.")


def published_runs_table() -> str:
    """Return published measurements on GPUs and their estimates."""
    report = report_of("estimates")
    rows = [
        [
            f"{each['run']}, {each['what']}",
            f"{each['measured']:.2f}",
            f"{each['estimated']:.2f}",
            f"{each['error']:+.1%}",
        ]
        for each in report["results"]["published"]
    ]
    about = f"Eight H100; measured by torchtitan's authors, estimated with torch {report['torch']}."
    return table_of(["run", "measured GiB", "estimated GiB", "error"], rows, about)


def estimate_time_table() -> str:
    """Return the time and memory of an estimate."""
    report = report_of("planning")
    rows = [
        [
            f"{each['model']}, {each['world_size']:,} ranks",
            f"{each['estimate_over_import_torch']:.2f}",
            f"{each['estimate_seconds']:.2f}",
            f"{each['further_strategy_seconds']:.3f}",
            str(each["most_memory_mib"]),
        ]
        for each in report["results"]
    ]
    header = ["estimate", "time / `import torch`", "seconds", "s per further strategy", "MiB"]
    about = (
        "Measured after `import torch`, including everything else; medians of "
        f"{report['rounds']} processes, {measured_on(report)}."
    )
    return table_of(header, rows, about)


def startup_line() -> str:
    """Return the processor time of help and of a large estimate."""
    report = report_of("startup")
    (found,) = report["results"]
    seconds = found["processor_seconds"]
    return (
        f"The whole command takes {seconds['estimate_405b']:.1f} s of processor time for "
        "llama3_405b on 16,384 ranks with its advice, "
        f"{found['estimate_over_import_torch']:.1f} times as much as `import torch` "
        f"({seconds['torch']:.1f} s). `fsdpctl --help` takes {seconds['help']:.2f} s, "
        f"{found['help_over_import_typer']:.2f} times as much as `import typer`: medians of "
        f"{report['rounds']} alternating processes, {measured_on(report)}."
    )
