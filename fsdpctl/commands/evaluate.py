"""`fsdpctl evaluate`: the loss of a checkpoint or a Hugging Face directory on data."""

import math
from pathlib import Path

import torch

from fsdpctl.checkpoint.initial_weights import initial_weights, open_pretrained
from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.manifest import read_manifest
from fsdpctl.checkpoint.pretrained import weights_folder
from fsdpctl.checkpoint.run_checkpoints import find_checkpoint
from fsdpctl.comm.collectives import Collectives
from fsdpctl.commands.config_args import SettingArgs, normalize
from fsdpctl.commands.printing import AsJson, say, show_json
from fsdpctl.commands.sample import ModelArg, note_ignored_parts
from fsdpctl.config.compose import compose_config
from fsdpctl.config.hub import model_directory
from fsdpctl.config.model_path import is_foreign_model
from fsdpctl.config.schema import PrefetchConfig
from fsdpctl.config.selection import Selection
from fsdpctl.data.batches import Batches
from fsdpctl.io.activity import doing
from fsdpctl.io.run_files import MANIFEST
from fsdpctl.plan.recomputation import Recomputation
from fsdpctl.plan.strategy import engine_strategies
from fsdpctl.resolve.prepare import Prepared, prepare
from fsdpctl.resolve.run_data import vocabulary_of
from fsdpctl.resolve.run_plan import make_run_plan
from fsdpctl.training.assemble import make_model, single_rank_strategy
from fsdpctl.training.validation_loss import ValidationLoss, bits_per_byte, validation_loss

_DATA_KEYS = ("data", "train.seq_len")
_MOST_LOG = 700.0  # exp(700) still fits into a float


def evaluate(source: ModelArg, settings: SettingArgs = None, as_json: AsJson = False) -> None:
    """Compute loss, perplexity and bits per byte.

    A run or checkpoint is evaluated on its own data, unless data=… is set:
    `fsdpctl evaluate runs/latest data=text data.path=other.txt data.val_fraction=0`.
    """
    source = model_directory(source)
    folder = source if is_foreign_model(source) else find_checkpoint(source)
    note_ignored_parts(source)
    overrides = normalize(settings).settings
    names = {text.partition("=")[0] for text in overrides}
    has_other_data = bool({"data", "data.path"} & names)
    model = {"model": "hf", "model.path": str(folder), "launch.nproc_per_node": "1"}
    defaults = [f"{name}={text}" for name, text in model.items() if name not in names]
    run_settings = _data_settings(folder)
    if has_other_data:
        run_settings = [(key, text) for key, text in run_settings if not key.startswith("data")]
    opened = prepare(compose_config([*defaults, *overrides], converted=run_settings))
    evaluation = _evaluate(opened)
    loss, perplexity = evaluation.mean, math.exp(min(evaluation.mean, _MOST_LOG))
    bits = bits_per_byte(loss, opened.data.val or opened.data.train)
    is_own_data = not has_other_data and not is_foreign_model(source)  # the data of the run
    split = "validation" if opened.data.val else "training" if is_own_data else "all"
    if as_json:
        show_json({
            "path": str(folder), "part": split, "loss": loss, "perplexity": perplexity,
            "bits_per_byte": bits, "tokens": evaluation.tokens,
            "loss_by_source": evaluation.by_source,
        })  # fmt: skip
        return
    in_bits = "" if bits is None else f", {bits:.3f} bits per byte"
    note = {"training": ", training data (no validation data)", "all": ", all data"}.get(split, "")
    say(f"{folder}: {opened.data.description}{note}", *opened.data.format_notes)
    say(f"loss {loss:.4f} nats per token, perplexity {perplexity:.2f}{in_bits}")
    say(*(f"{name}: loss {each:.4f}" for name, each in evaluation.by_source.items()))
    say(f"over {evaluation.tokens:,} tokens in samples of {opened.config.train.seq_len}")


def _data_settings(source: Path) -> list[tuple[str, str]]:
    settings = read_manifest(source).config if (source / MANIFEST).exists() else {}
    names = [x for x in settings if x.startswith(_DATA_KEYS) and x != "data.tokenizer"]
    return [(name, settings[name]) for name in names]


def _evaluate(opened: Prepared) -> ValidationLoss:
    # On one rank, all strategies compute the same: there is nothing to select for `auto`.
    strategy = engine_strategies(opened.config.engine.name)[0]
    selection = Selection(strategy, Recomputation("none"), PrefetchConfig(), None)
    plan = make_run_plan(opened.config, selection)
    config, data = plan.config, opened.data
    stream = data.val or data.train
    device = torch.device(str(config.launch.device))
    folder = weights_folder(config.model)
    with doing(f"loading {folder}"):
        model = make_model(config, device, strategy=single_rank_strategy(config), empty=True)
        weights, _ = open_pretrained(config.model, folder, model.collectives)
        load_weights(initial_weights(config.model, model.module, config.train.seed, weights), model)
    vocab_size = data.vocab_size or vocabulary_of(config, data)
    batches = Batches(stream.samples(config.train.seq_len), plan.batches, 0, vocab_size)
    total = batches.num_validation_batches(0)

    with doing("evaluating", "batches", total) as advance:

        def show_progress(number: int) -> bool:
            advance(1)
            return True

        evaluation = validation_loss(
            model,
            batches,
            Collectives(),
            device,
            max_batches=0,
            chunk_tokens=config.train.loss_chunk_tokens or 0,
            should_continue=show_progress,
        )
    assert evaluation is not None
    return evaluation
