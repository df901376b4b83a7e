"""The table of what fsdpctl promises, with the tests, the figures and the threads about each."""

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from docs import figures

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REPOSITORIES = {
    "accelerate": "huggingface/accelerate",
    "ao": "pytorch/ao",
    "axolotl": "axolotl-ai-cloud/axolotl",
    "bitsandbytes": "bitsandbytes-foundation/bitsandbytes",
    "cosmos-framework": "NVIDIA/cosmos-framework",
    "ms-swift": "modelscope/ms-swift",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "torchtitan": "pytorch/torchtitan",
    "torchtune": "pytorch/torchtune",
    "transformers": "huggingface/transformers",
    "VeOmni": "ByteDance-Seed/VeOmni",
}


class Figure(NamedTuple):
    """A measured figure."""

    result: str  # JSON file in benchmarks/results
    text: Callable[[dict[str, Any]], str]  # from that file


class Promise(NamedTuple):
    """A promise and its evidence."""

    text: str
    page: str  # in docs
    tests: tuple[str, ...]  # file::function, in tests
    figure: Figure | None = None
    threads: tuple[str, ...] = ()  # name#number


PROMISES = (
    Promise(
        "A resumed run has the losses of an uninterrupted one, bit for bit",
        "reliability.md",
        (
            "cli/test_run.py::test_an_interrupted_run_resumes_bit_for_bit",
            "checkpoint/test_round_trip.py::test_training_resumes_bit_for_bit",
        ),
        Figure("faults", figures.faults),
        ("accelerate#4071", "accelerate#4295", "accelerate#2823", "axolotl#3609"),
    ),
    Promise(
        "Any number of ranks and any strategy loads a checkpoint",
        "checkpoints.md",
        (
            "checkpoint/test_round_trip.py::"
            "test_a_checkpoint_survives_any_change_of_ranks_and_strategy_bit_for_bit",
            "cli/test_run.py::test_another_length_and_strategy_resume_the_run",
        ),
        None,
        ("torchtitan#816",),
    ),
    Promise(
        "A damaged checkpoint is rejected",
        "checkpoints.md",
        (
            "cli/test_run.py::test_a_corrupted_checkpoint_exits_with_code_4",
            "fuzz/test_campaign.py::test_corrupted_files_are_rejected_in_one_line_or_mean_the_same",
        ),
        Figure("faults", figures.damage),
    ),
    Promise(
        "If ranks hang, fsdpctl names the rank, the step and the collective",
        "reliability.md",
        (
            "launch/test_watchdog.py::test_the_recorder_identifies_the_rank_that_is_behind",
            "launch/test_watchdog.py::test_a_hang_is_named_before_nccl_ends_the_process",
        ),
        Figure("watching", figures.hangs),
        ("torchtitan#3065", "axolotl#3476", "ms-swift#10183", "accelerate#3380"),
    ),
    Promise(
        "With `launch.max_restarts`, a run restarts from its newest checkpoint after a failure",
        "reliability.md",
        (
            "launch/test_restarts.py::test_a_killed_rank_costs_only_steps",
            "launch/test_restarts.py::test_a_hung_rank_is_named_and_restarted",
        ),
        Figure("restarting", figures.restarting),
    ),
    Promise(
        "A rank of W loads 1/W of a model",
        "models.md#decoders-of-transformers",
        ("models/test_host_memory.py::test_loading_takes_a_ranks_part_and_a_few_blocks",),
        Figure("loading", figures.loading),
        ("transformers#43749", "ms-swift#9980", "ms-swift#9982", "axolotl#3464"),
    ),
    Promise(
        "Each strategy keeps the parts of parameters, gradients and states that its row says",
        "strategies.md",
        ("predict/test_engine_bytes.py::test_every_strategy_shards_as_specified",),
    ),
    Promise(
        "No strategy needs more memory than its equivalent in PyTorch",
        "performance.md#peak-memory-on-cpus",
        ("test_benchmarks.py::test_no_engine_of_pytorch_holds_less",),
        Figure("peak-memory-cpu", figures.peak),
        ("accelerate#3647",),
    ),
    Promise(
        "The bytes that a rank sends per micro-batch and per step follow from the plan",
        "time-model.md",
        (
            "estimate/test_traffic.py::test_only_passes_that_reduce_send_gradients",
            "estimate/test_traffic.py::test_planned_bytes_are_sent_over_the_interface",
        ),
        Figure("predicted-steps", figures.sent),
        ("cosmos-framework#161", "torchtune#1275"),
    ),
    Promise(
        "The estimate equals the bytes that the engine allocates",
        "memory-model.md",
        (
            "predict/test_engine_bytes.py::test_the_estimate_equals_the_bytes_of_the_fullest_rank",
            "predict/test_total.py::"
            "test_engine_bytes_are_exact_and_the_peak_of_all_tensors_within_a_percent",
        ),
        Figure("estimates", figures.small),
        ("axolotl#848",),
    ),
    Promise(
        "Estimates agree with published memory",
        "memory-model.md#measured-errors",
        ("predict/test_published_memory.py::test_a_published_run_is_estimated",),
        Figure("estimates", figures.published),
        ("axolotl#848", "accelerate#3647"),
    ),
    Promise(
        "Predictions agree with published step times",
        "time-model.md#accuracy-with-data-sheets-only",
        ("predict/test_published_time.py::test_a_published_step_is_predicted_within_15_percent",),
        Figure("published-steps", figures.steps),
    ),
    Promise(
        "States in 8 bits have the same bits on any number of ranks",
        "less-memory.md#compressed-moments",
        (
            "optim/test_states.py::test_bits_do_not_depend_on_ranks",
            "optim/test_states.py::test_bits_do_not_depend_on_more_ranks",
        ),
        None,
        ("ao#4912", "bitsandbytes#1633", "axolotl#2744"),
    ),
    Promise(
        "Ranks that share samples compute what one rank does with whole samples",
        "long-samples.md#context-parallelism",
        (
            "models/test_context.py::test_logits_are_those_of_whole_rows_to_the_bit",
            "models/test_context.py::test_gradients_are_those_of_whole_rows",
        ),
        None,
        ("torchtitan#3206", "torchtitan#2780", "torchtitan#2990", "torchtitan#3257"),
    ),
    Promise(
        "A step has the same samples and loss on any number of ranks",
        "training.md",
        (
            "data/test_data.py::test_a_step_sees_the_same_samples_on_any_number_of_ranks",
            "train/test_context.py::test_any_split_of_the_samples_has_the_same_losses",
        ),
        None,
        ("prime-rl#1957", "prime-rl#2562", "VeOmni#338"),
    ),
    Promise(
        "Decoders of transformers train as in transformers",
        "models.md#decoders-of-transformers",
        ("models/test_decoders.py::test_trains_as_transformers",),
        Figure("decoders", figures.decoders),
    ),
    Promise(
        "The memory of a CPU rank grows by at most 2% in 5,000 steps",
        "long-runs.md",
        (
            "train/test_heap.py::test_the_process_does_not_grow",
            "train/test_heap.py::test_collectives_are_recorded_up_to_a_number_and_all_are_counted",
        ),
        Figure("growth", figures.growth),
    ),
    Promise(
        "Help and estimates start fast",
        "memory-model.md#time-of-an-estimate",
        (
            "cli/test_startup.py::test_help_imports_the_command_line_only",
            "cli/test_startup.py::test_advice_estimates_no_settings_together_if_one_suffices",
        ),
        Figure("startup", figures.startup),
    ),
)


def evidence_table() -> str:
    """Return one row per promise.

    Raises:
        ValueError: If a test does not exist.
    """
    lines = [
        "| promise | tests | measured | requested or missed in other tools |",
        "|---|---|---|---|",
    ]
    for each in PROMISES:
        tests = "<br>".join(map(linked_test, each.tests))
        threads = ", ".join(map(_linked_thread, each.threads)) or "–"
        measured = "–" if each.figure is None else _measured(each.figure)
        lines.append(f"| [{each.text}]({each.page}) | {tests} | {measured} | {threads} |")
    return "\n".join(lines)


def linked_test(test: str) -> str:
    """Return the Markdown of a test, with a link to its file.

    Raises:
        ValueError: If the file has no such test.
    """
    path, _, name = test.partition("::")
    file = ROOT / "tests" / path
    body = ast.parse(file.read_text()).body if file.is_file() else []
    if not any(isinstance(each, ast.FunctionDef) and each.name == name for each in body):
        raise ValueError(f"tests/{test}: not found")
    return f"[`{name}`](../tests/{path})"


def _measured(figure: Figure) -> str:
    file = RESULTS / f"{figure.result}.json"
    text = figure.text(json.loads(file.read_text()))
    return f"{text} ([{file.name}](../benchmarks/results/{file.name}))"


def _linked_thread(thread: str) -> str:
    name, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{REPOSITORIES[name]}/issues/{number})"
