"""Text from a saved checkpoint."""

from dataclasses import replace
from pathlib import Path

import torch

from fsdpctl.checkpoint.load import load_weights
from fsdpctl.checkpoint.pretrained import attached_files, open_weights, read_assets, whole_weights
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.checkpoint.source import Tensors
from fsdpctl.config.compose import compose_config
from fsdpctl.config.model_path import is_hugging_face
from fsdpctl.config.schema import Config
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.tokenizer import BYTES, TOKENIZER_JSON, ByteTokenizer, FileTokenizer
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.train.assemble import make_model
from fsdpctl.train.generate import Sampling, generate


def sample_text(source: Path, prompt: str, count: int, sampling: Sampling) -> str:
    """The prompt and `count` further tokens, from the model in `source`, a checkpoint
    or a Hugging Face directory.

    Raises:
        UsageError: the run's tokenizer is not known, or the prompt is no text.
        FsdpctlError: the model does not fit into memory.
        CheckpointError: the checkpoint is damaged.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: not UTF-8") from None
    config, weights, files = _opened(source)
    # What a few tokens gain by compiled blocks is less than compiling takes.
    config = replace(config, train=replace(config.train, compile=False))
    if TOKENIZER_JSON not in files:
        raise UsageError(f"{source}: nobody knows what tokenizer made the run's tokens")
    tokenizer = (
        ByteTokenizer() if config.data.tokenizer == BYTES else FileTokenizer(str(source), files)
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = make_model(config, device, strategy="no_shard", empty=True)
        load_weights(weights, model)
        tokens = generate(
            model,
            tokenizer.encode_prompt(prompt),
            range(count),
            context=config.train.seq_len,
            sampling=sampling,
            device=device,
        )
    except RuntimeError as error:
        # Of the CPU's allocator torch has no error of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "CPUAllocator" not in str(error):
            raise
        raise FsdpctlError(f"{source}: does not fit into memory on {device.type}") from None
    return prompt + tokenizer.decode(tokens)


def _opened(source: Path) -> tuple[Config, Tensors, dict[str, bytes]]:
    """The model's configuration, its weights, and the files beside them."""
    if is_hugging_face(source):
        config = compose_config(["model=hf", f"model.path={source}"]).config
        return config, open_weights(config.model), read_assets(source)
    reader = CheckpointReader(source)
    config = config_of_checkpoint(reader.manifest.config, str(reader))
    return config, whole_weights(reader), attached_files(reader)
