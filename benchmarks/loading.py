"""The memory of a rank that loads a model with experts, beside transformers' `from_pretrained`.

    python -m benchmarks.loading --out benchmarks/results/loading.json

Each number of ranks loads the same directory in new processes; the peak is that of the resident
memory of a rank, less what it held before.
"""

import argparse
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.multiprocessing.spawn import spawn

from benchmarks.report import write_report
from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.config.compose import compose_config
from fsdpctl.train.assemble import make_model

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """The peak of one way of loading."""

    by: str  # fsdpctl or transformers
    ranks: int
    model_mib: float
    peak_mib: float  # of the rank with most


def write_model(folder: Path, layers: int) -> float:
    """Write a model with experts, and return its size in MiB."""
    make_config: Any = hf.Qwen3MoeConfig
    config = make_config(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        num_experts=32, num_experts_per_tok=4,
    )  # fmt: skip
    make: Any = hf.AutoModelForCausalLM
    model = make.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return float(sum(param.nbytes for param in model.parameters())) / MIB


def _held(peak: bool) -> float:
    found = re.search(rf"Vm{'HWM' if peak else 'RSS'}:\s+(\d+)", _status())
    assert found
    return int(found[1]) / 1024


def _status() -> str:
    return Path("/proc/self/status").read_text()


def load(rank: int, ranks: int, folder: str, by: str, out: str) -> None:
    """Load in this process, and write the peak in MiB to a file."""
    torch.set_num_threads(1)
    if by == "fsdpctl":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + ranks)}
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        config = compose_config(["model=transformers", f"model.path={folder}"]).config
        other = compose_config(["model.vocab_size=64"]).config
        make_model(other, torch.device("cpu"), empty=True)  # so that nothing is imported later
        weights = open_weights(config.model)
    Path("/proc/self/clear_refs").write_text("5")
    before = _held(peak=False)
    model: object
    if by == "fsdpctl":
        model = make_model(config, torch.device("cpu"), empty=True)
        load_weights(weights, model)
    else:
        make: Any = hf.AutoModelForCausalLM
        logging: Any = hf.utils.logging
        logging.disable_progress_bar()
        model = make.from_pretrained(folder, dtype=torch.float32)
    Path(f"{out}-{rank}").write_text(str(_held(peak=True) - before))
    if by == "fsdpctl":
        dist.destroy_process_group()


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder), given.layers)
        for by, ranks in [("transformers", 1), *(("fsdpctl", count) for count in given.ranks)]:
            out = str(Path(folder) / f"{by}-{ranks}")
            spawn(load, (ranks, folder, by, out), nprocs=ranks)
            peaks = [float(Path(f"{out}-{rank}").read_text()) for rank in range(ranks)]
            found = Loaded(by, ranks, round(size, 1), round(max(peaks), 1))
            print(found, flush=True)
            results.append(asdict(found))
    write_report(given.out, "loading", results)


if __name__ == "__main__":
    main()
