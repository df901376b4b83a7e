"""Text from a saved checkpoint."""

from dataclasses import replace
from pathlib import Path

import torch

from fsdpctl.checkpoint.load import load_checkpoint
from fsdpctl.checkpoint.pretrained import attached_files
from fsdpctl.checkpoint.reader import CheckpointReader
from fsdpctl.config.serialize import config_of_checkpoint
from fsdpctl.data.tokenizer import BYTES, TOKENIZER_JSON, ByteTokenizer, FileTokenizer
from fsdpctl.errors import FsdpctlError, UsageError
from fsdpctl.train.assemble import make_model
from fsdpctl.train.generate import Sampling, generate


def sample_text(checkpoint: Path, prompt: str, count: int, sampling: Sampling) -> str:
    """The prompt and `count` further tokens, from the model in `checkpoint`.

    Raises:
        UsageError: the run's tokenizer is not known, or the prompt is no text.
        FsdpctlError: the model does not fit into memory.
        CheckpointError: the checkpoint is damaged.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: not UTF-8") from None
    reader = CheckpointReader(checkpoint)
    config = config_of_checkpoint(reader.manifest.config, str(reader))
    # What a few tokens gain by compiled blocks is less than compiling takes.
    config = replace(config, train=replace(config.train, compile=False))
    files = attached_files(reader)
    if TOKENIZER_JSON not in files:
        raise UsageError(f"{checkpoint}: nobody knows what tokenizer made the run's tokens")
    tokenizer = (
        ByteTokenizer() if config.data.tokenizer == BYTES else FileTokenizer(str(checkpoint), files)
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = make_model(config, device, strategy="no_shard", empty=True)
        load_checkpoint(reader, model, None)
        tokens = generate(
            model,
            tokenizer.encode_prompt(prompt),
            count,
            context=config.train.seq_len,
            sampling=sampling,
            device=device,
        )
    except RuntimeError as error:
        # Of the CPU's allocator torch has no error of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "CPUAllocator" not in str(error):
            raise
        raise FsdpctlError(f"{checkpoint}: does not fit into memory on {device.type}") from None
    return prompt + tokenizer.decode(tokens)
