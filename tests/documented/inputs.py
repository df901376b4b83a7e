"""Small files that documented commands assume, under the names that the pages use."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig

from tests.commands.run import invoke, make_text
from tests.documented.lines import Line
from tests.hostile import make_checkpoint, make_hugging_face
from tests.models.families import FAMILIES
from tests.training.chats import make_chat_model, make_chats

_LAYERS = 16  # as in Llama 3.2 1B: the page on fine-tuning selects its last two by number
_FAMILIES = {
    "llama": ("DIR", "my_model", "my_chat_model", "Llama-3.2-1B", "Llama-3.1-70B",
              "Qwen/Qwen3-0.6B"),
    "qwen3_moe": ("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"), "mixtral": ("Mixtral-8x7B",),
    "gpt_oss": ("gpt-oss-120b",),
}  # fmt: skip
_TEXTS = ("FILE", "FILES", "other.txt", "shakespeare.txt", "my_files/a.txt", "my_text/a.txt")
_OTHERS = Path(__file__).parent.parent / "importers" / "files"
_AXOLOTL = (
    "base_model: DIR\ndatasets:\n  - path: chats.jsonl\n    type: chat_template\n"
    "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true\nsequence_len: 64\n"
    "sample_packing: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 1\n"
    "num_epochs: 1\nlearning_rate: 0.001\noptimizer: adamw_torch\n"
)
_ADAPTED = "adapted"  # a run with adapters
# Arguments of commands whose runs/latest has adapters, and options that name a new file.
_OF_ADAPTERS = ("--merge", "--chat", "peft")
_WRITES = ("--out",)
_WRITERS = {"consolidate-checkpoint": 1, "shard-checkpoint": 1, "tokenize": 1}
# Commands that make the runs and exports.
RUNS = (
    "fsdpctl train train.run_dir=runs/a",
    "fsdpctl train train.run_dir=runs/b",
    "fsdpctl train train.run_dir=runs/mine",
    "fsdpctl train --recipe finetune_chat model.path=Llama-3.2-1B data.path=chats.jsonl "
    f"train.run_dir=runs/{_ADAPTED}",
    "fsdpctl consolidate-checkpoint runs/a EXPORT",
    f"fsdpctl consolidate-checkpoint runs/{_ADAPTED} adapters --format peft",
)

_LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def make_inputs(folder: Path) -> Path:
    """Write models, texts, chats, tokens, and configurations of fsdpctl and other tools."""
    for family, names in _FAMILIES.items():
        model = make_chat_model(folder / family, family)
        if family == "llama":  # with the RoPE scaling of Llama 3.1, whose factor the pages change
            content = json.loads((model / "config.json").read_text())
            content.pop("rope_parameters", None)
            content |= {"rope_theta": 1e4, "rope_scaling": _LLAMA31}
            (model / "config.json").write_text(json.dumps(content))
        for name in names:
            shutil.copytree(model, folder / name)
    deep = LlamaConfig.from_dict({**FAMILIES["llama"].to_dict(), "num_hidden_layers": _LAYERS})
    AutoModelForCausalLM.from_config(deep).save_pretrained(folder / "Llama-3.2-1B")
    text = make_text(folder).read_text()
    for name in _TEXTS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    make_chats(folder / "chats.jsonl", 60)
    args = (folder / "FILE", folder / "tokens.bin", "--tokenizer", folder / "DIR")
    assert invoke("tokenize", *map(str, args))[0] == 0
    for suffix in (".bin", ".json"):
        shutil.copy(folder / f"tokens{suffix}", folder / f"tokens-00000{suffix}")
    for name in ("my.yaml", "recipe.yaml", "best.yaml", "job.yaml"):
        (folder / name).write_text("train: {seq_len: 16}\n")
    for name in ("run.yml", "run.yaml"):
        (folder / name).write_text(_AXOLOTL)
    shutil.copy(_OTHERS / "accelerate-fsdp.yaml", folder / "default_config.yaml")
    trl = (_OTHERS / "trl-sft.yaml").read_text().replace("Qwen/Qwen2.5-0.5B", "Llama-3.2-1B")
    (folder / "trl.yaml").write_text(trl.replace("somebody/some-chats", "chats.jsonl"))
    upload = folder / "upload.sh"
    upload.write_text('#!/bin/sh\necho "$@" >> uploaded\n')
    upload.chmod(0o755)
    return folder


def make_unfinished_runs(folder: Path) -> Path:
    """Write a checkpoint and its export, enough to check commands that read runs."""
    for name in ("a", "b", "mine"):
        make_checkpoint(folder / "runs" / name / "checkpoints" / "step-00000001")
    (folder / "runs" / "latest").symlink_to("a")
    options = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(options))
    make_hugging_face(folder / "runs/a/checkpoints/step-00000001", folder / "EXPORT")
    return folder


@contextmanager
def prepared(line: Line, folder: Path) -> Iterator[None]:
    """Set aside files that the line writes, and link runs/latest to a run that it applies to."""
    args = line.args
    latest = folder / "runs" / "latest"
    if (folder / "runs" / _ADAPTED).exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(_ADAPTED if any(each in args for each in _OF_ADAPTERS) else "a")
    written = [after for arg, after in zip(args, args[1:], strict=False) if arg in _WRITES]
    if args[0] == "fsdpctl" and args[1] in _WRITERS:
        written += args[2 + _WRITERS[args[1]] :][:1]
    paths = [folder / name for name in written]
    paths += [each.with_suffix(".json") for each in paths if each.suffix == ".bin"]
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        existing = [each for each in paths if each.exists()]
        for each in existing:
            each.rename(Path(aside, each.name))
        try:
            yield
        finally:
            for each in paths:
                shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)
            for each in existing:
                Path(aside, each.name).rename(each)
