"""The error for a key of another tool names the key of fsdpctl."""

import re

import pytest

from fsdpctl.config.schema import GROUPS, KEYS
from fsdpctl.config.synonyms import NOT_NEEDED, NOT_SUPPORTED, SYNONYMS, hint

# Keys without a counterpart in the tools that SYNONYMS covers.
_OURS_ALONE = {
    "data.format", "data.rewritten_turns", "engine.program",
    "launch.hang_timeout", "launch.nproc_min",
    "launch.share_memory", "lr_scheduler.reaches_min", "model.config_json", "prefetch.backward",
    "model.first_new_token", "prefetch.forward", "strategy.owner_map", "train.require_fit",
    "train.self_check",
}  # fmt: skip
_NAME = r"[a-z_][a-z_.0-9]+"


def test_each_key_is_the_answer_to_a_known_name_or_is_ours_alone():
    answered = {key for answer in SYNONYMS.values() for key in re.findall(_NAME, answer)}
    answered |= {"model.overrides", *(key for key in KEYS if key.startswith("cluster."))}
    assert KEYS.keys() - answered == _OURS_ALONE & KEYS.keys()


def test_answers_name_keys_that_exist():
    sections = {key.partition(".")[0] for key in KEYS}
    for answer in {*SYNONYMS.values(), *NOT_NEEDED.values(), *NOT_SUPPORTED.values()}:
        for key in re.findall(rf"\b{_NAME}\.{_NAME}", answer):
            is_ours = key.partition(".")[0] in sections and not key.startswith("model.overrides.")
            assert not is_ours or key in KEYS, answer


@pytest.mark.parametrize(("typed", "answer"), [
    ("early_stopping_patience", "train.patience"), ("training.early_stopping", "train.patience"),
    ("metric_for_best_model", "checkpoint.keep_best=true, by the validation loss"),
    ("step_scheduler.local_batch_size", "train.micro_batch_size"), ("peft.dim", "model.lora.rank"),
    ("packed_sequence.packed_sequence_size", "data.packing=true and train.seq_len"),
    ("validation_dataset.path_or_dataset_id", "data.val_path"),
    ("lr_scheduler.min_lr", "lr_scheduler.min_lr_ratio, a share of optimizer.lr"),
    ("lr_scheduler.min_lr_factor", "lr_scheduler.min_lr_ratio"), ("wandb.project", "log.project"),
    ("compile.components", "train.compile"), ("checkpoint.load_step", "--resume PATH"),
])  # fmt: skip
def test_a_name_of_another_tool_is_answered_with_ours(typed, answer):
    assert hint(typed, [*KEYS, *GROUPS]).startswith(f"; use {answer}")


@pytest.mark.parametrize(("typed", "reason"), [
    ("early_stopping_threshold", "does not support thresholds"), ("loss_type", "does not support"),
    ("checkpoint.save_consolidated", "not needed: `fsdpctl consolidate-checkpoint`"),
    ("swanlab.project", "does not support trackers other than"),
    ("parallelism.enable_loss_parallel", "does not support tensor parallelism"),
])  # fmt: skip
def test_a_name_without_a_counterpart_is_told_why(typed, reason):
    assert reason in hint(typed, [*KEYS, *GROUPS])
