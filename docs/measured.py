"""Tables and phrases of the documentation, from the JSON files that the benchmarks write."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.report import PAIRS

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
    "shared_memory": "**fsdpctl**, any strategy, ranks share memory",
}


def report_of(name: str) -> dict[str, Any]:
    """Return the report of a benchmark."""
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return report


def table_of(header: str, rows: Iterable[str], options: str = "", align: str = "---:") -> str:
    """Return a table in Markdown, with a line below it; cells are separated by ` | `."""
    lines = [header, " | ".join(["---", *[align] * header.count(" | ")]), *rows]
    table = "\n".join(f"| {line} |" for line in lines)
    return f"{table}\n\n{options}" if options else table


def grouped(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the rows of a table, grouped by source below a row with the source."""
    by_source = defaultdict[str, list[str]](list)
    for source, row in rows:
        by_source[source].append(row)
    return [each for source, of in by_source.items() for each in (f"**{source}**", *of)]


def measured_on(report: dict[str, Any]) -> str:
    """Return the torch version and the machine of a benchmark."""
    return f"torch {report['torch']}, {report['machine']}"


def registered_table() -> str:
    """Return the predictions of public recipes without published results."""
    report = report_of("registered")
    header = "recipe | GPUs | allocated, GiB | reserved, GiB | step, s | band, s | SETTINGS"
    results = report["results"]
    rows = (
        (e["source"], f"{e['name']} | {e['cluster']} | {e['allocated']} | {e['reserved']} | "
         f"{e['seconds']} | {e['low']} to {e['high']} ({e['band']}) | `{_without_common(e)}`")
        for e in results
    )  # fmt: skip
    options = f"{len(results)} predictions of commit {report['commit']}, registered on "
    return table_of(header, grouped(rows), f"{options}{report['searched']}.")


def _without_common(prediction: dict[str, Any]) -> str:
    """Return the settings of a prediction besides those that the commands on the page name."""
    common = {"model=hf", "model.init=random", f"cluster={prediction['cluster']}"}
    settings = prediction["settings"].split()
    assert common <= set(settings)
    return " ".join(each for each in settings if each not in common)


def step_time_table() -> str:
    """Return each engine's overhead over the baseline, relative to that of fully_shard."""
    return _step_times("step-time-cpu", "added_over_fsdp2_added", "overhead / `fully_shard`'s")


def step_time_beside_ddp_table() -> str:
    """Return the time of a step relative to the baseline."""
    return _step_times("step-time-cpu-ddp", "median_over_floor", "time / baseline")


def step_time_of_shared_memory_table() -> str:
    """Return the time of a step of ranks that share memory, relative to the baseline."""
    return _step_times("step-time-shared", "median_over_floor", "time / baseline")


def _step_times(name: str, key: str, title: str) -> str:
    report = report_of(name)
    results = report["results"]
    header = [title, *(f"{each['size']} {each['dtype']}" for each in results)]
    rows = [
        " | ".join([label, *(f"{each['engines'][engine][key]:.2f}" for each in results)])
        for engine, label in _ENGINES.items()
        if engine in results[0]["engines"]
    ]
    rounds = ", ".join(f"{e['rounds_of_each']} of {e['size']} {e['dtype']}" for e in results)
    options = f"{report['world_size']} ranks over gloo, {measured_on(report)}"
    options += f"; {results[0]['starts']} starts; rounds of each: {rounds}."
    return table_of(" | ".join(header), rows, options)


def peak_memory_table() -> str:
    """Return fsdpctl's peak memory relative to the corresponding engine of PyTorch."""
    report = report_of("peak-memory-cpu")
    results = report["results"]
    header = [f"{e['model']} {e['dtype']}, {e['world_size']} ranks" for e in results]
    rows = []
    for ours, theirs in PAIRS.items():
        ratios = (f"{each[f'{ours}_over_{theirs}']:.2f}" for each in results)
        name = f"`{ours}` / {_ENGINES[theirs].removeprefix('PyTorch ')}"
        rows.append(" | ".join([name, *ratios]))
    options = f"The largest of {report['steps']} steps, {measured_on(report)}."
    return table_of(" | ".join(["peak / PyTorch's", *header]), rows, options)


def host_time_table(name: str = "host-time") -> str:
    """Return the host's time relative to that of fully_shard."""
    report = report_of(name)
    rows = (
        f"{each['world_size']:,} | {each['passes_added_over_fsdp2_added']:.2f} | "
        f"{each['update_over_fsdp2_update']:.2f}"
        for each in report["results"]
    )
    header = "ranks | overhead of forward and backward | clipping and optimizer step"
    return table_of(header, rows, f"Medians of {report['rounds']} rounds, {measured_on(report)}.")


def estimate_time_table() -> str:
    """Return the time and memory of an estimate."""
    report = report_of("planning")
    rows = (
        f"{each['model']}, {each['world_size']:,} ranks | "
        f"{each['estimate_over_import_torch']:.2f} | {each['estimate_seconds']:.2f} | "
        f"{each['further_strategy_seconds']:.3f} | {each['most_memory_mib']}"
        for each in report["results"]
    )
    header = "estimate | time / `import torch` | seconds | s per further strategy | MiB"
    options = "Measured after `import torch`, including everything else; medians of "
    options += f"{report['rounds']} processes, {measured_on(report)}."
    return table_of(header, rows, options)


def startup_line() -> str:
    """Return the processor time of help and of a large estimate."""
    report = report_of("startup")
    (result,) = report["results"]
    seconds = result["processor_seconds"]
    return (
        f"The whole command takes {seconds['estimate_405b']:.1f} s of processor time for "
        "llama3_405b on 16,384 ranks with its advice, "
        f"{result['estimate_over_import_torch']:.1f} times as much as `import torch` "
        f"({seconds['torch']:.1f} s). `fsdpctl --help` takes {seconds['help']:.2f} s, "
        f"{result['help_over_import_typer']:.2f} times as much as `import typer`: medians of "
        f"{report['rounds']} alternating processes, {measured_on(report)}."
    )


def estimate_errors_table() -> str:
    """Return the errors of the estimated peak of all tensors."""
    report = report_of("estimates")
    rows = (
        f"{each['world_size']} | {each['configurations']} | {each['median_error']:.2%} | "
        f"{each['worst_error']:.2%}"
        for each in report["results"]["small"]
    )
    header = "ranks over gloo | configurations | median error | worst"
    return table_of(header, rows, f"{measured_on(report)}.")


def published_runs_table() -> str:
    """Return published measurements on GPUs and their estimates."""
    report = report_of("estimates")
    rows = (
        (each["source"], f"{each['run']}, {each['what']} | {each['measured']:.2f} | "
         f"{each['estimated']:.2f} | {each['error']:+.1%}")
        for each in report["results"]["published"]
    )  # fmt: skip
    header = "run, by source | measured GiB | estimated GiB | error"
    return table_of(header, grouped(rows), f"Estimated with torch {report['torch']}.")


def published_steps_table() -> str:
    """Return published tokens per second and those predicted from data sheets."""
    report = report_of("published-steps")
    rows = (
        (each["source"], f"{each['name']}{_difference(each)} | {each['kind']} | "
         f"{each['published_tokens_per_second']:,.0f} | "
         f"{each['predicted_tokens_per_second']:,.0f} | {each['error']:+.1%}")
        for each in report["results"]
    )  # fmt: skip
    header = "step, by source | kind | published, tokens/s per GPU | predicted | error"
    by_kind = defaultdict[str, list[float]](list)
    for each in report["results"]:
        if "differs" not in each:
            by_kind[each["kind"]].append(abs(each["error"]))
    of_kinds = (
        f"{kind} {median(errors):.1%} and {max(errors):.1%} ({len(errors)} steps)"
        for kind, errors in by_kind.items()
    )
    options = "Median and worst error by kind, without programs that differ as their rows say: "
    options += f"{', '.join(of_kinds)}."
    return table_of(header, grouped(rows), options)


def _difference(step: dict[str, Any]) -> str:
    return f" (*{step['differs']}*)" if "differs" in step else ""


def growth_table() -> str:
    """Return the memory of CPU ranks over the steps of a long run."""
    report = report_of("growth")
    rows = [
        f"{each['step']:,} | {' | '.join(f'{n / (1 << 20):.1f}' for n in each['own_bytes'])} | "
        f"{each['over_first']:.4f} | {max(each['mapped_bytes']) / (1 << 20):.1f}"
        for each in report["results"]
    ]
    ranks = " | ".join(f"rank {rank}, MiB" for rank in range(report["world_size"]))
    options = (
        f"{report['model']}, {report['global_batch_size']} samples of {report['seq_len']} tokens "
        f"per step, over gloo, {measured_on(report)}; medians of {report['window']} steps."
    )
    return table_of(f"step | {ranks} | larger / first | mapped files, MiB", rows, options)


def compressed_states_table() -> str:
    """Return bytes, time and losses of each way to store the states."""
    report, timed = report_of("little-memory"), report_of("update-time")
    results = report["results"]
    rows = []
    for each, cost in zip(results, timed["results"], strict=True):
        pairs = zip(each["validation_losses"], results[0]["validation_losses"], strict=True)
        losses = (each["train_losses"], each["validation_losses"], [a - b for a, b in pairs])
        rows.append(
            f"{each['name']} | {cost['bytes_per_parameter']:.2f} | "
            f"{cost['moved_bytes_per_parameter']:.1f} | {cost['over_float32']:.2f} | "
            + " | ".join(f"{mean(of):.4f} ± {stdev(of):.4f}" for of in losses)
        )
    header = (
        "states | bytes per parameter | moved per update | update / float32 | "
        "training loss | validation loss | validation - float32's"
    )
    options = (
        f"One thread of a CPU ({measured_on(timed)}), compute in bf16. Times: medians of "
        f"{timed['rounds']} alternating rounds, {timed['parameters'] / 1e6:.1f} M parameters. "
        f"A step of {timed['tokens']:,} tokens with adapters over NF4 weights, in float32, takes "
        f"{timed['adapters'][-1]['over_float32']:.2f} times that over float32 weights. "
        f"Losses in nats per byte: mean and standard deviation of "
        f"{len(results[0]['train_losses'])} seeds after {report['steps']:,} steps of "
        f"`llama_tiny`; training loss over the last {report['last_steps']}, difference per seed."
    )
    return table_of(header, rows, options)
