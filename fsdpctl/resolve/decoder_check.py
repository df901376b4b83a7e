"""Checks of a decoder of transformers that its code does not answer: a small copy of it is run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdpctl.config.any_decoder import canonical, content_of, family_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.models.documents import make_documents, spans
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.plan.attention import THEIRS
from fsdpctl.resolve.small_decoder import small_copy

_LENGTHS = ((5, 9), (8, 6))  # tokens of the documents in two sequences
_WINDOW, _RANGE = 4, 7  # of layers with a window; of positions, before rotary embeddings change
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
_RANGES = ("original_max_position_embeddings", "max_position_embeddings")
_SWITCHING = ("longrope", "'su'", "dynamic")  # types of rotary embeddings
_TOLERANCE = 1e-4  # of the largest logit; float32 differs by 1e-6, documents that mix by 1e-3


class Found(NamedTuple):
    """The behavior of a decoder."""

    problem: (
        str  # why our attention does not compute what that of transformers does; empty: it does
    )
    isolates: bool  # documents that share a sequence do not see one another
    ignores_padding: bool  # padding after a document does not change it


def with_decoder(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with what the decoder supports of attention and `data.packing`.

    Returns it with messages to print.

    Raises:
        UsageError: If the model sees later tokens, or documents would be mixed.
    """
    if not config.model.is_foreign:
        return config, ()
    family = family_of(config.model)
    found = check_decoder(config.model)
    notes: tuple[str, ...] = ()
    if found.problem:
        notes = (f"model.attention={THEIRS} (auto): {family}: {found.problem}",)
        config = replace(config, model=with_attention(config.model))
    if not config.data.holds_documents:
        return config, notes
    if not found.ignores_padding:
        raise UsageError(
            f"data={config.data.name}: {family}: not supported; padding of a sequence changes its "
            "documents"
        )
    if found.isolates or config.data.packing is False:
        return config, notes
    if config.data.packing:
        raise UsageError(
            f"data.packing=true: {family} mixes the documents of a sequence; set data.packing=false"
        )
    notes += (f"data.packing=false (auto): {family} would mix the documents of a sequence",)
    return replace(config, data=replace(config.data, packing=False)), notes


def with_attention(model: ModelConfig) -> ModelConfig:
    """Return the model with the attention of transformers if ours does not compute the same.

    Raises:
        UsageError: If `model.attention` requires ours.
    """
    problem = check_decoder(model).problem if model.is_foreign else ""
    if problem and model.attention not in (None, THEIRS):
        raise UsageError(f"model.attention={model.attention}: {problem}; set it to {THEIRS}")
    return replace(model, attention=THEIRS) if problem else model


def check_decoder(model: ModelConfig) -> Found:
    """Return what a small copy of the model does.

    Raises:
        UsageError: If a token sees later ones, or logits of chunks are not those of the model.
    """
    return _checked(replace(model, name="", attention=_asked(model)))


def _asked(model: ModelConfig) -> str | None:
    """Return the attention that the copy tries first: ours, with any kernel, or theirs."""
    return THEIRS if model.attention == THEIRS else None


@lru_cache(maxsize=8)
def _checked(model: ModelConfig) -> Found:
    family = family_of(model)
    try:
        with quiet():
            try:
                return _try(with_short_ranges(model))
            except UsageError:
                raise
            except Exception:  # a family whose sizes depend on these
                return _try(model)
    except UsageError:
        raise
    except Exception as error:  # the code of a family raises what it likes
        line = str(error).partition("\n")[0]
        raise UsageError(
            f"model=transformers: {family}: not supported; a small copy fails: {line}"
        ) from error


def with_short_ranges(model: ModelConfig) -> ModelConfig:
    """Return the model with windows, and ranges of positions, that short documents exceed."""

    def short(content: Mapping[str, Any]) -> dict[str, Any]:
        switches = any(kind in str(content) for kind in _SWITCHING)
        sizes = {**dict.fromkeys(_WINDOWS, _WINDOW), **dict.fromkeys(_RANGES, _RANGE)}
        names = (*_WINDOWS, *(_RANGES if switches else ()))
        return {
            name: short(each) if isinstance(each, dict) else
            min(each, sizes[name]) if name in names and type(each) is int else each
            for name, each in content.items()
        }  # fmt: skip

    content = short(content_of(model))
    return replace(model, config_json=canonical(content))


def _try(model: ModelConfig) -> Found:
    module = small_copy(model)
    module.attention.use(ours=False)
    name = type(module.transformers_model).__name__
    vocab_size = module.get_output_embeddings().out_features
    tokens = torch.randint(vocab_size, (len(_LENGTHS), sum(_LENGTHS[0])))
    versions = [param._version for param in module.parameters()]
    whole = module(tokens)
    if versions != [param._version for param in module.parameters()]:
        raise UsageError(
            f"model=transformers: {name}: not supported; it writes to its parameters in forward"
        )
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocab_size
    if differ(whole[:, :-1], module(changed)[:, :-1]):
        raise UsageError(f"model=transformers: {name}: not causal; tokens see later ones")
    if differ(whole, module.full_logits(tokens)):
        raise UsageError(
            f"model=transformers: {name}: not supported; its logits depend on more than the last "
            "hidden states"
        )
    alone = [
        module(tokens[row : row + 1, start:end])
        for row, lengths in enumerate(_LENGTHS)
        for start, end in spans(lengths)
    ]
    problem = "" if model.attention == THEIRS else _problem(module, tokens, whole)
    documents = make_documents(_LENGTHS, torch.device("cpu"))
    packed = module(tokens, documents=documents).flatten(0, 1).split(list(chain(*_LENGTHS)))
    same = [not differ(one, other[0]) for one, other in zip(packed, alone, strict=True)]
    return Found(problem, all(same), all(same[:: len(_LENGTHS[0])]))


def _problem(module: TransformersDecoder, tokens: Tensor, whole: Tensor) -> str:
    """Let the decoder use our attention, or return why it would not compute the same."""
    module.attention.use(ours=True)
    problem = "its attention is another one"
    try:
        if not module.attention.is_ours:
            problem = "its attention is not that of transformers' interface"
        elif not differ(module(tokens), whole):
            return ""
    except UsageError as error:
        problem = f"not supported: {error}"
    except Exception:  # the code of a family raises what it likes
        problem = "it computes with the masks of transformers"
    module.attention.use(ours=False)
    return problem


def differ(one: Tensor, other: Tensor) -> bool:
    """Return whether logits differ by more than rounding, or are not numbers."""
    return not bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())


@contextmanager
def quiet() -> Iterator[None]:
    """Draw from a generator of its own, without gradients."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
