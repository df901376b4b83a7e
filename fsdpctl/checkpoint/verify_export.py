"""Verification of an export: its changes to the base, and the files that a server would lack."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdpctl.checkpoint.adapter_findings import check_adapters
from fsdpctl.checkpoint.asset_findings import ModelAssets, check_vocabulary, compare_assets
from fsdpctl.checkpoint.findings import Finding, compare_names, compare_values
from fsdpctl.checkpoint.manifest import PARAMETER
from fsdpctl.checkpoint.pretrained import (
    file_tensors,
    open_weights,
    read_assets_in,
    read_model_assets,
)
from fsdpctl.checkpoint.tensor_source import TensorSource, tensor_keys
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.model_path import is_foreign_model
from fsdpctl.config.peft import has_adapters
from fsdpctl.errors import CheckpointError, FsdpctlError, UsageError, shorten_list
from fsdpctl.io.gguf_header import is_gguf
from fsdpctl.io.run_files import CONFIG_JSON


def verify_export(
    export: Path, base: Path | None, *, base_has_weights: bool = True, is_trained: bool = True
) -> list[Finding]:
    """Return the findings on a model, adapters or both in a directory, compared with their base.

    The base is a model directory, GGUF file, run or checkpoint. For adapters, only its config.json
    is required (not `base_has_weights`). If `is_trained`, report a lack of changes. CheckpointError
    if a file of the export cannot be read; UsageError if a file of the base cannot be read.
    """
    findings, assets = list[Finding](), ModelAssets(read_assets_in(export), export)
    if is_foreign_model(export):
        weights, base_weights, opened = _open_both(export, base, assets)
        findings += opened
        findings += () if base_weights is None else compare_names(weights, base_weights)
        findings += compare_values(weights, base_weights, is_trained=is_trained)
        findings += check_vocabulary(weights, assets)
        if base is not None and not is_gguf(export):
            findings += compare_assets(assets, ModelAssets(read_model_assets(base), base))
    if has_adapters(export) and base is not None:
        with _errors_of_base(base):
            model = _model_in(base)
        findings += check_adapters(export, model, base_has_weights=base_has_weights)
    return findings


@contextmanager
def _errors_of_base(base: Path) -> Iterator[None]:
    try:
        yield
    except FsdpctlError as error:
        raise UsageError(f"--base {base}: {error}") from None


def _model_in(path: Path) -> ModelConfig:
    return compose_config(["model=hf", f"model.path={path}"]).config.model


def _open_both(
    export: Path, base: Path | None, assets: ModelAssets
) -> tuple[TensorSource, TensorSource | None, list[Finding]]:
    """Open both under the names in their files if these are the same, else under the model's."""
    weights = _open_in_model(export) if is_gguf(export) else _open_stored(export)
    names = weights.names(PARAMETER)
    if base is None:
        return weights, None, []
    uses_model_names = is_gguf(base) or not is_foreign_model(base)  # a file, run or checkpoint
    with _errors_of_base(base):
        base_weights = None if uses_model_names else _open_stored(base)
    # The file may have a head that loading would ignore.
    ties = assets.json(CONFIG_JSON).get("tie_word_embeddings") and "lm_head.weight" in names
    if base_weights is not None and names == base_weights.names(PARAMETER) and not ties:
        return weights, base_weights, []
    try:
        with _errors_of_base(base):
            base_in_model = _open_in_model(base)
        in_model = _open_in_model(export)
    except FsdpctlError as error:  # UsageError: the family is not supported
        if base_weights is None:
            raise
        is_lost = isinstance(error, CheckpointError)
        return weights, base_weights, [Finding("weights", str(error), is_lost)] if is_lost else []
    others = [] if base_weights is None else sorted({*names} - {*base_weights.names(PARAMETER)})
    text = f"{len(others)} tensors under other names than in the base's files: "
    text += shorten_list(others, 2)
    return in_model, base_in_model, [Finding("weights", text)] if others else []


def _open_stored(folder: Path) -> TensorSource:
    return file_tensors(folder, str(folder), error_type=CheckpointError)


def _open_in_model(path: Path) -> TensorSource:
    weights = open_weights(_model_in(path))
    for key in tensor_keys(weights):
        weights.info(key)  # raises if a part is missing
    return weights
