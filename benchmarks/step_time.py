"""The time of a training step under each engine, interleaved in one run.

    python -m benchmarks.step_time --out benchmarks/results/step-time-cpu.json

In every round each contestant has a turn, so that what disturbs the machine disturbs all. The order
changes, and the first step of a turn is not counted: it runs in what another engine left in caches
and heap. The figures to read are ratios: what an engine adds to the floor, over what FSDP2 adds.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from benchmarks.contestants import CONTESTANTS, Step
from benchmarks.report import write_report
from fsdpctl.config.schema import ModelConfig
from fsdpctl.models.llama import LlamaDecoder
from fsdpctl.models.registry import initialize_parameter

WARM_UP = 2  # rounds
TURN = 3  # steps
# Millions of parameters -> width, blocks, vocabulary.
SIZES = {"8M": (320, 5, 2000), "25M": (512, 6, 4000), "60M": (768, 7, 6000)}
SHARE_OF_ROUNDS = {"8M": 2.0, "25M": 1.0, "60M": 0.5}  # short steps need more of them
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_decoder(width: int, blocks: int, vocab: int) -> LlamaDecoder:
    """The same decoder in every process."""
    config = ModelConfig(
        num_layers=blocks,
        hidden_size=width,
        intermediate_size=width * 3,
        num_heads=width // 64,
        num_kv_heads=width // 64,
        tie_embeddings=False,
    )
    model = LlamaDecoder(config, 64, vocab)
    with torch.no_grad():
        for name, param in model.named_parameters():
            initialize_parameter(name, param, seed=0, config=config)
    return model


def measure(size: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Medians of one model and precision, on this rank; collective."""
    device = torch.device("cpu")
    torch.manual_seed(dist.get_rank())
    vocab = SIZES[size][2]
    tokens, targets = torch.randint(0, vocab, (2, 4, 128)).unbind()
    steps: dict[str, Step] = {
        name: CONTESTANTS[name](make_decoder(*SIZES[size]), DTYPES[dtype], device)
        for name in CONTESTANTS
    }
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    losses: dict[str, float] = {}
    turns = list(CONTESTANTS)
    shuffle = random.Random(0).shuffle  # alike on every rank
    for number in range(WARM_UP + rounds):
        shuffle(turns)
        for name in turns:
            for place in range(TURN):
                dist.barrier()
                began = time.perf_counter()
                loss = steps[name](tokens, targets)
                dist.barrier()
                if number >= WARM_UP and place > 0:
                    seconds[name].append(time.perf_counter() - began)
            losses[name] = float(loss)
    return _figures(seconds, losses)


def _figures(seconds: dict[str, list[float]], losses: dict[str, float]) -> dict[str, Any]:
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    least, fsdp2 = medians["floor"], medians["fsdp2"]
    return {
        name: {
            "median_over_floor": round(median / least, 4),
            "added_over_fsdp2_added": round((median - least) / (fsdp2 - least), 4),
            "spread": round((max(seconds[name]) - min(seconds[name])) / median, 4),
            "last_loss": losses[name],
        }
        for name, median in medians.items()
    }


def _rank_main(rank: int, words: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(rendezvous, words.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=words.world_size)
    results = []
    for size in words.sizes.split(","):
        for dtype in words.dtypes.split(","):
            rounds = max(1, round(words.rounds * SHARE_OF_ROUNDS[size]))
            figures = measure(size, dtype, rounds)
            results.append({"size": size, "dtype": dtype, "rounds": rounds, "engines": figures})
            if rank == 0:
                print(_table(size, dtype, figures), flush=True)
                # After each: a run that is cut short keeps what it has.
                about = {"backend": "gloo", "world_size": words.world_size}
                write_report(words.out, "step_time", results, **about)
    dist.destroy_process_group()


def _table(size: str, dtype: str, figures: dict[str, Any]) -> str:
    lines = [f"{size} {dtype}: time over the floor's; added over what FSDP2 adds; last loss"]
    for name, each in figures.items():
        lines.append(
            f"  {name:28}{each['median_over_floor']:8.3f}{each['added_over_fsdp2_added']:8.3f}"
            f"{each['last_loss']:12.6f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        spawn(_rank_main, args=(words, rendezvous), nprocs=words.world_size)


if __name__ == "__main__":
    main()
