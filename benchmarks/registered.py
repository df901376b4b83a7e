"""Predict public recipes without a published result, before they are measured:

python -m benchmarks.registered --out benchmarks/results/registered.json

Run it on a clean commit, whose name it writes. Then `make docs` writes the table of
docs/method/predictions.md. `SEARCHED` is the day of reading the recipes and searching results.
"""

import subprocess
from typing import Any, NamedTuple

from benchmarks.report import arguments, write_report
from fsdpctl.estimate.accuracy import band_of
from tests.predict.published_step import batch
from tests.predict.test_published_time import PREDICTOR, planned

SEARCHED = "2026-11-29"
_GIB = 1 << 30
_TITAN, _AXOLOTL = "torchtitan b5bcd76c6", "axolotl 067b021c8"
_AUTOMODEL, _FACTORY = "Automodel 36044ad3d", "LLaMA-Factory ff6d4d12e"
_FULL, _SELECTIVE = "activation_checkpointing=full", "activation_checkpointing=selective"
_FSDP2, _COMPILED = "engine=fsdp2", "train.compile=true"
_TRAINER, _LIGER = f"{_FSDP2} engine.program=transformers", f"{_FSDP2} engine.program=liger"
_NARROW, _WHOLE = "precision=bf16_true", "train.loss_chunk_tokens=0"
_8B, _QWEN3_8B = "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-8B"


class Recipe(NamedTuple):
    """A public recipe on hardware, with rows that are as long as it allows."""

    source: str
    name: str
    model: str
    cluster: str  # with the number of its GPUs
    length: int
    micro: int
    passes: int
    options: str

    @property
    def settings(self) -> str:
        """Return the settings of this recipe for fsdpctl."""
        ranks = int(self.cluster.partition("x")[0])
        model = f"model=hf model.path={self.model} model.init=random cluster={self.cluster}"
        sizes = f"train.seq_len={self.length} {batch(self.micro, ranks, self.passes)}"
        return f"{model} {sizes} {self.options}"


def _lora(rank: int, dtype: str = "") -> str:
    return f"{_FULL} model.lora.rank={rank}" + (f" model.base_dtype={dtype}" if dtype else "")


_BITS = "optimizer.state_dtype=int8"
RECIPES = (
    *(Recipe(_TITAN, "qwen3_14b", "Qwen/Qwen3-14B", on, 4096, 4, 1, f"{_FSDP2} {_FULL} {words}")
      for on in ("8xh100", "8xh200") for words in ("", _COMPILED)),
    *(Recipe(_TITAN, "qwen3_30b_a3b", "Qwen/Qwen3-30B-A3B", on, 4096, 2, 1,
             f"{_FSDP2} {_FULL} {_COMPILED}") for on in ("8xh200", "8xb300")),
    Recipe(_TITAN, "qwen3_32b", "Qwen/Qwen3-32B", "8xh200", 4096, 2, 1,
           f"{_FSDP2} {_FULL} {_COMPILED}"),
    Recipe(_TITAN, "qwen3_32b", "Qwen/Qwen3-32B", "8xb300", 4096, 2, 1,
           f"{_FSDP2} {_FULL} {_COMPILED}"),
    Recipe(_TITAN, "qwen3_1_7b", "Qwen/Qwen3-1.7B", "8xh100", 4096, 4, 1,
           f"{_FSDP2} {_SELECTIVE} {_COMPILED}"),
    Recipe(_TITAN, "qwen3_0_6b", "Qwen/Qwen3-0.6B", "8xh100", 4096, 4, 1,
           f"{_FSDP2} {_SELECTIVE} {_COMPILED}"),
    *(Recipe(_TITAN, "gpt_oss_20b", "openai/gpt-oss-20b", on, 8192, 1, 1,
             f"{_FSDP2} {_FULL} {_COMPILED}") for on in ("8xh100", "8xh200")),
    Recipe(_TITAN, "sft_qwen3_8b_math", _QWEN3_8B, "8xh100", 2048, 1, 1,
           f"{_FSDP2} {_SELECTIVE} {_COMPILED}"),
    *(Recipe(_AXOLOTL, "llama-3/fft-8b-liger-fsdp", _8B, on, 4096, 2, 4,
             f"{_LIGER} {_NARROW} {_FULL}") for on in ("8xa100_80", "8xh100")),
    Recipe(_AXOLOTL, "llama-3/fft-8b", _8B, "1xh100", 8192, 1, 8,
           f"{_NARROW} {_FULL} {_BITS}"),
    Recipe(_AXOLOTL, "llama-3/lora-1b", "meta-llama/Llama-3.2-1B", "1xrtx4090", 2048, 2, 2,
           _lora(16)),
    *(Recipe(_AXOLOTL, "qwen3/8b-lora-fused-attn-compile", _QWEN3_8B, on, 4096, 1, 4,
             f"{_lora(32)} {_COMPILED}") for on in ("1xh100", "1xa100_80")),
    *(Recipe(_AXOLOTL, "qwen3/qlora-fsdp", _QWEN3_8B, on, 2048, 1, 4,
             f"engine.program=transformers {_lora(32, 'nf4')}") for on in ("2xrtx4090", "2xh100")),
    Recipe(_AXOLOTL, "qwen3/32b-qlora", "Qwen/Qwen3-32B", "1xl40s", 2048, 1, 2, _lora(16, "nf4")),
    *(Recipe(_AXOLOTL, "phi/phi3-ft-fsdp", "microsoft/Phi-3-mini-4k-instruct", on, 4096, 12, 2,
             f"{_TRAINER} {_NARROW} {_FULL} {_WHOLE}") for on in ("8xa100_80", "8xh100")),
    Recipe(_AXOLOTL, "mistral/config", "mistralai/Mistral-7B-v0.1", "1xh200", 8192, 2, 4,
           f"{_NARROW} {_FULL} {_BITS} {_WHOLE}"),
    Recipe(_AXOLOTL, "glm4/qlora-32b", "zai-org/GLM-4-32B-0414", "1xa100_80", 2048, 2, 2,
           f"{_lora(16, 'nf4')} {_WHOLE}"),
    *(Recipe(_FACTORY, "train_full/qwen3_full_sft", "Qwen/Qwen3-4B-Instruct-2507", on, 2048, 1, 2,
             f"strategy=zero3 {_FULL} {_WHOLE}") for on in ("8xa100_80", "8xh100")),
    Recipe(_AUTOMODEL, "agent/qwen2_5_3b_synthtraces", "Qwen/Qwen2.5-3B", "8xh100", 8192, 1, 4,
           f"{_FSDP2} {_NARROW} {_WHOLE}"),
    Recipe(_AUTOMODEL, "agent/qwen2_5_3b_function_calling", "Qwen/Qwen2.5-3B", "8xa100_80", 4096,
           1, 4, f"{_FSDP2} {_NARROW} {_WHOLE}"),
)  # fmt: skip


def _predicted(recipe: Recipe) -> dict[str, Any]:
    plan = planned(recipe.settings)
    estimate = PREDICTOR.estimate(plan)
    seconds = PREDICTOR.predict(plan).seconds
    band = band_of(estimate, seconds)
    assert band is not None
    gib = [round(nbytes / _GIB, 1) for nbytes in (estimate.allocated, estimate.peak_reserved)]
    return {
        "source": recipe.source, "name": recipe.name, "cluster": recipe.cluster,
        "settings": recipe.settings, "allocated": gib[0], "reserved": gib[1],
        "seconds": round(seconds, 3), "low": round(seconds * band.low, 3),
        "high": round(seconds * band.high, 3), "band": str(band),
    }  # fmt: skip


def main() -> None:
    """Predict, print and write."""
    options = arguments()
    results = []
    for each in RECIPES:
        results.append(_predicted(each))
        print(results[-1], flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    write_report(options.out, "registered", results, commit=commit, searched=SEARCHED)


if __name__ == "__main__":
    main()
