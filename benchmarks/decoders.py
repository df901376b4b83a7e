"""Try every causal decoder of transformers, tiny, under `model=transformers`.

    python -m benchmarks.decoders --out benchmarks/results/decoders.json

Each is written as transformers writes it, loaded, run forward and backward, and exported, in one
process beside transformers. tests/models/test_decoders.py trains the same models on several ranks.
"""

import argparse
import re
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto

from benchmarks.report import write_report
from fsdpctl.checkpoint.hub_weights import to_hub
from fsdpctl.checkpoint.manifest import BUFFER, PARAMETER, tensor_key
from fsdpctl.checkpoint.pretrained import open_weights
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.config.compose import compose_config
from fsdpctl.errors import FsdpctlError
from fsdpctl.models.registry import build_plain
from fsdpctl.resolve.decoder_check import check_decoder
from fsdpctl.train.assemble import make_module
from tests.models.decoders import (
    batches_of,
    fill,
    load_decoder,
    our_loss,
    save_decoder,
    their_loss,
    whole,
)


@dataclass(frozen=True, slots=True)
class Tried:
    """What a family does."""

    family: str  # model_type
    model: str = ""  # the class of transformers
    problem: str = ""  # why it isn't supported, or could not be tried
    is_tried: bool = True  # whether it could be made tiny
    has_experts: bool = False
    packs: bool = False  # whether documents that share a sequence do not see one another
    loss_difference: float = 0.0  # from transformers', in nats per token
    gradient_difference: float = 0.0  # largest, relative to the largest gradient of the model
    exports_equal: bool = False  # whether exported bytes are those that were read


def tried(family: str, name: str, folder: Path) -> Tried:
    """Try one family.

    Raises:
        Exception: If a step fails that succeeds in transformers.
    """
    try:
        save_decoder(family, folder)
        theirs = load_decoder(folder)
    except Exception as error:  # the code of a family raises what it likes
        return Tried(family, name, _line(error), is_tried=False)
    try:
        config = compose_config(["model=transformers", f"model.path={folder}"]).config
        packs = check_decoder(config.model).isolates
        weights = open_weights(config.model)
        build_plain(config.model)
    except FsdpctlError as error:
        return Tried(family, name, _line(error))
    module = make_module(config)
    fill(module, weights)
    tokens = batches_of(1, 1)[0][0][0]
    loss, wanted = our_loss(module.train(False), tokens), their_loss(theirs, tokens)
    loss.backward()
    wanted.backward()
    return Tried(
        family,
        type(theirs).__name__,
        has_experts=any(p.ndim == 3 and "expert" in n for n, p in theirs.named_parameters()),
        packs=packs,
        loss_difference=abs(loss.item() - wanted.item()),
        gradient_difference=_gradient_difference(module, theirs),
        exports_equal=_same_bytes(to_hub(weights, config.model), folder),
    )


def _line(error: Exception) -> str:
    """Return the first line of a message, with files instead of paths."""
    return re.sub(r"/\S*/", "", str(error).strip().partition("\n")[0])


def _gradient_difference(module: torch.nn.Module, theirs: Any) -> float:
    """Return the largest difference, relative to the largest gradient of the model."""
    wanted = {name: param.grad for name, param in theirs.named_parameters()}
    largest = max(float(each.abs().max()) for each in wanted.values() if each is not None)
    differences = [0.0]
    for name, param in module.named_parameters():
        ours, other = param.grad, wanted[name]
        zero = torch.zeros_like(param)
        difference = (zero if ours is None else ours) - (zero if other is None else other)
        differences.append(float(difference.abs().max()) / largest)
    return max(differences)


def _same_bytes(exported: Tensors, folder: Path) -> bool:
    """Return whether the weights have the names and bytes of those that were read."""
    files: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        files.update(load_file(file))
    found = {
        name: whole(exported, tensor_key(kind, name))
        for kind in (PARAMETER, BUFFER)
        for name in exported.names(kind)
    }
    return found.keys() == files.keys() and all(
        torch.equal(found[name], files[name]) for name in files
    )


def main() -> None:
    """Try all families, and write what they do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", help="a few of them")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging: Any = hf.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    known = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    results = []
    for family in given.families or sorted(known):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = tried(family, known[family], Path(folder))
            except Exception as error:
                found = Tried(family, known[family], f"{type(error).__name__}: {_line(error)}")
        print(found, flush=True)
        results.append(asdict(found))
    write_report(given.out, "decoders", results, transformers=hf.__version__)


if __name__ == "__main__":
    main()
