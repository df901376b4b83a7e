"""The bytes of a base model that a start reads.

    python -m benchmarks.base_reads --out benchmarks/results/base-reads.json

Ranks train adapters on a base in several files: in a new run, and in a resumed run. A start ends
before the first step. A thread reads the remaining bytes while training runs.
"""

import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import arguments, on_ranks, write_report
from fsdpctl.checkpoint.tensor_file import TensorEntry, TensorFile
from tests.commands.run import make_text
from tests.training.ranks import new_trainer

RANKS = 2
SIZES: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}


def make_base(folder: Path, layers: int) -> int:
    """Save a model with random weights in several files; return the bytes of the files."""
    config = LlamaConfig(**SIZES, vocab_size=1024, num_hidden_layers=layers)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100MB")
    return sum(each.stat().st_size for each in folder.glob("*.safetensors"))


def start(rank: int, base: str, typed: list[str]) -> dict[str, int]:
    """Train as one of the ranks; return the bytes that it has read of the base, by thread."""
    counts: Counter[str] = Counter()
    chunks, phase = TensorFile.chunks, "start"

    def counted(file: TensorFile, entry: TensorEntry, start: int, stop: int) -> Iterator[Any]:
        is_main = threading.current_thread() is threading.main_thread()
        for data in chunks(file, entry, start, stop):
            if str(file.path).startswith(base):
                counts[phase if is_main else "later"] += len(data)
            yield data

    with mock.patch.object(TensorFile, "chunks", counted):
        trainer = new_trainer(typed)
        phase = "later"
        trainer.run()
    return {**counts}


def main() -> None:
    """Measure, print and write."""
    options, results = arguments(layers=1), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size, text = make_base(folder / "base", options.layers), make_text(folder)
        typed = [
            "model=hf", f"model.path={folder / 'base'}", "model.lora.rank=4", "data=text",
            f"data.path={text}", "data.tokenizer=bytes", "data.val_fraction=0", "train.seq_len=16",
            "train.global_batch_size=2", "launch.device=cpu", f"launch.nproc_per_node={RANKS}",
            f"train.run_dir={folder / 'run'}", "train.sample_tokens=0",
        ]  # fmt: skip
        for steps, which in ((1, "new"), (2, "resumed")):
            ranks = on_ranks(RANKS, start, str(folder / "base"), [*typed, f"train.steps={steps}"])
            total = {key: sum(each.get(key, 0) for each in ranks) for key in ("start", "later")}
            over = {f"{key}_over_base": round(count / size, 3) for key, count in total.items()}
            results.append({"run": which, "base_bytes": size, **over})
    print(*results, sep="\n")
    write_report(options.out, "base_reads", results, world_size=RANKS)


if __name__ == "__main__":
    main()
