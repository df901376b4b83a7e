"""The training of a NeMo Automodel file: its data, length and learning rates."""

import re

from fsdpctl.config.data import CHAT
from fsdpctl.config.source_config import SourceKey, as_whole
from fsdpctl.importers.defaults import AUTOMODEL
from fsdpctl.importers.schedules import ratio
from fsdpctl.importers.training import TrainingRows, named_data
from fsdpctl.importers.translation import Translation

_STEPS, _RATES = "step_scheduler.", "lr_scheduler."
_PLAIN = {
    "optimizer.lr": "optimizer.lr", "optimizer.eps": "optimizer.eps", "seed": "train.seed",
    "clip_grad_norm.max_norm": "optimizer.max_grad_norm",
    f"{_STEPS}ckpt_every_steps": "checkpoint.every",
    f"{_STEPS}val_every_steps": "train.eval_every",
    "checkpoint.checkpoint_dir": "train.run_dir", "wandb.project": "log.wandb_project",
}  # fmt: skip
# Data sets whose rows are conversations that the chat template writes, or tokens.
_CHATS = ("ChatDataset", "")
_TOKENS = ("MegatronPretraining", "NanogptDataset")
_SAME_LOSS = ("", "MaskedCrossEntropy", "FusedLinearCrossEntropy", "TEParallelCrossEntropy",
              "ChunkedCrossEntropy")  # fmt: skip
_FOLLOWED = ("path_or_dataset_id", "path_or_dataset", "data_path", "paths", "dataset_name")
_CONSTANT = ("lr_scheduler=constant", "lr_scheduler.warmup_steps=0")
_STYLES = {
    "constant": ("lr_scheduler=constant",),
    "cosine": ("lr_scheduler=cosine",),
    "linear": ("lr_scheduler=wsd", "lr_scheduler.decay_ratio=1"),
    "WSD": ("lr_scheduler=wsd",),
}
_DECAYS = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}
_WARMUP = 1000  # steps at most, of a tenth of all


def read_training(found: Translation, optimizer: str) -> None:
    rows = TrainingRows(found, AUTOMODEL)
    if (loss := rows.value("loss_fn._target_")) and _last(loss) not in _SAME_LOSS:
        rows.ask(loss, "", "another loss")
    recipe = rows.value("recipe", "recipe._target_")
    measures = recipe is not None and _last(recipe).startswith("Benchmarking")
    if recipe is not None and measures:
        rows.add(recipe, "optimizer.max_grad_norm=0", *_CONSTANT)
    adapts = {"peft.dropout": "model.lora.dropout"} if "model.lora.rank" in found.settings else {}
    rows.plain({**_PLAIN, **adapts})
    _read_decay(rows, optimizer)
    betas = rows.known("optimizer.betas")
    one, two, *_ = (*re.findall(r"[\d.e+-]+", betas.text), "", "")  # of a list, or of its text
    rows.add(betas, f"optimizer.beta1={one}", f"optimizer.beta2={two}")
    if optimizer == "sgd":
        rows.plain({"optimizer.momentum": "optimizer.momentum"})
    steps, epochs = rows.steps(f"{_STEPS}max_steps"), rows.known(f"{_STEPS}num_epochs")
    if steps is None or not found.source.is_null(f"{_STEPS}num_epochs"):
        note = "with train.steps: the shorter of the two; " if steps else ""
        note += "Automodel ends each epoch with a smaller step"
        rows.add(epochs, f"train.epochs={epochs.text}", note=note)
    if not measures:
        _read_rates(rows, steps)
    _read_data(rows)


def _last(value: SourceKey) -> str:
    return value.text.strip().rpartition(".")[2]


def _read_decay(rows: TrainingRows, optimizer: str) -> None:
    decay = rows.value("optimizer.weight_decay")
    if decay is None and optimizer in ("adam", "sgd"):
        decay = SourceKey("optimizer.weight_decay", "0", ())
    decay = decay or rows.known("optimizer.weight_decay")
    rows.add(decay, f"optimizer.weight_decay={decay.text}")
    if not decay.is_off and decay.text.strip("0."):
        rows.leave(decay, "Automodel decays norms and biases too, fsdpctl only matrices")
        if optimizer == "adam":
            rows.leave(decay, "Adam adds it to the gradient, fsdpctl decays weights as AdamW")


def _read_rates(rows: TrainingRows, steps: int | None) -> None:
    """Translate the schedule, which is constant unless the file has a section for it."""
    if not rows.below(_RATES):
        rows.add(SourceKey("lr_scheduler", "", ()), *_CONSTANT, note="the default of Automodel")
        return
    style = rows.known(f"{_RATES}lr_decay_style")
    words = _STYLES.get(style.text.strip())
    if words is None:
        rows.ask(style, "lr_scheduler", "not supported; expected constant, cosine, linear or WSD")
        return
    if style.text.strip() == "WSD":
        keys = ("wsd_decay_steps", "lr_wsd_decay_style")
        decay, kind = (rows.value(f"{_RATES}{key}") for key in keys)
        if decay is None or steps is None or kind is None or kind.text not in _DECAYS:
            rows.ask(style, "lr_scheduler", "requires max_steps, wsd_decay_steps and a known decay")
            return
        rows.add(decay, f"lr_scheduler.decay_ratio={ratio(decay.text, str(steps))}")
        rows.add(kind, f"lr_scheduler.decay_type={_DECAYS[kind.text]}")
    rows.add(style, *words, "lr_scheduler.reaches_min=false")
    _read_ends(rows)
    warmup = rows.known(f"{_RATES}lr_warmup_steps")
    tenth = ("lr_scheduler.warmup_ratio=0.1", f"lr_scheduler.warmup_steps={_WARMUP}")
    rows.add(warmup, *((f"lr_scheduler.warmup_steps={warmup.text}",) if warmup.text else tenth))
    length = rows.value(f"{_RATES}lr_decay_steps")
    if length and as_whole(length.text) != steps:
        rows.ask(length, "lr_scheduler", "the decay ends with the run here")


def _read_ends(rows: TrainingRows) -> None:
    """Translate the peak, and the first and last rates, which are shares of `optimizer.lr`."""
    usual, peak = rows.known("optimizer.lr"), rows.value(f"{_RATES}max_lr")
    if peak:
        rows.add(peak, f"optimizer.lr={peak.text}")
    for key, ours, part in (("init_lr", "start", "10"), ("min_lr", "min", "100")):
        value = rows.known(f"{_RATES}{key}")
        low = value.text or ratio(usual.text, part)
        rows.add(value, f"lr_scheduler.{ours}_lr_ratio={ratio(low, (peak or usual).text)}")


def _read_data(rows: TrainingRows) -> None:
    target = rows.value("dataset._target_") or SourceKey("dataset._target_", "", ())
    data = rows.value(*(f"dataset.{key}" for key in _FOLLOWED), "dataset._target_")
    own = "" if _last(target) in (*_CHATS, *_TOKENS) else f"{target.key}: {_last(target)}"
    option = rows.data(*named_data(rows, data, "dataset.name", "dataset.split"), own=own)
    if option == CHAT:
        size = rows.known("packed_sequence.packed_sequence_size")
        packs = not size.is_off
        rows.add(size, f"data.packing={str(packs).lower()}")
        only = rows.known("dataset.answer_only_loss_mask")
        rows.add(only, f"data.train_on={'all' if only.is_off else 'assistant'}")
        long = rows.known("dataset.truncation")
        shortens = long.text.strip() in ("true", "longest_first", "only_first")
        note = "" if shortens or packs else "Automodel does not shorten samples"
        rows.add(long, f"data.too_long={'drop' if packs else 'truncate'}", note=note)
        template = rows.value("dataset.chat_template")
        if template and (file := rows.file(template.text)) is not None:
            rows.add(template, f"data.template={file}")
    held = rows.value("validation_dataset.path_or_dataset_id", "validation_dataset.path_or_dataset")
    held, paths = named_data(rows, held, "validation_dataset.name", "validation_dataset.split")
    if held:
        rows.held_out(held, paths)
    elif others := rows.below("validation_dataset"):
        name = rows.value("validation_dataset.dataset_name", "validation_dataset._target_")
        rows.held_out(name or next(iter(others.values())), {})
    else:
        rows.add(rows.known("validation_dataset"), "data.val_fraction=0")
