"""Checks of the behavior of a decoder of transformers, on a small copy of the model.

The copy's sliding windows and position ranges are shorter than the sequences that it processes, so
that both have an effect. If ranks share rows, layers that mix tokens in another way than attention
would get only a part of each row, which the check detects.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fsdpctl.config.decoder_config import config_dict, model_type_of, with_config
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config, ConfigT
from fsdpctl.errors import UsageError
from fsdpctl.models.context_parallel import use_exchange
from fsdpctl.models.packed_documents import pack_documents, token_ranges
from fsdpctl.models.small_copy import small_copy
from fsdpctl.models.transformers_build import initializer
from fsdpctl.models.transformers_decoder import TransformersDecoder
from fsdpctl.plan.attention_kernels import TRANSFORMERS
from fsdpctl.plan.batch_plan import ContextParallel

T = TypeVar("T")
_LENGTHS = ((5, 9), (8, 6))  # lengths of the documents in two sequences
_TOKENS_PER_RANK = 12  # tokens of each rank that shares a row
_NUM_POSITIONS = 512  # positions that the check's sequences need
_WINDOW, _RANGE = 4, 7  # size of windows; positions before rotary embeddings change
_WINDOW_KEYS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
_RANGE_KEYS = ("original_max_position_embeddings", "max_position_embeddings")
_POSITION_KEYS = ("n_positions", "max_position_embeddings")
_SWITCHING_ROPE_TYPES = ("longrope", "'su'", "dynamic")  # types of rotary embeddings
_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_TOLERANCE = 1e-4  # share of the largest logit; rounding: 1e-6, mixed documents: 1e-3
_TIMEOUT_SECONDS = 60.0  # timeout of a thread that waits for other threads
_CPU = torch.device("cpu")


class DecoderTraits(NamedTuple):
    """The behavior of a decoder."""

    attention_problem: str  # empty: fsdpctl's attention computes the same as transformers'
    isolates_documents: bool  # documents in one sequence do not affect one another
    ignores_padding: bool  # padding after a document does not affect the document


def adapt_to_decoder(config: ConfigT) -> tuple[ConfigT, tuple[str, ...]]:
    """Return the configuration with the attention and packing that the model supports, and notes.

    UsageError if the model is not causal, or documents would be mixed.
    """
    traits, model_type = check_decoder(config.model), model_type_of(config.model)
    config = config.changed({"model.attention": attention_for(config.model)})
    notes = list[str]()
    if problem := traits.attention_problem:
        notes.append(f"model.attention={TRANSFORMERS} (auto): {model_type}: {problem}")
    if config.data.masks_documents:
        if not traits.ignores_padding:
            problem = f"{model_type}: not supported; padding of a sequence changes its documents"
            raise UsageError(f"data={config.data.name}: {problem}")
        if config.data.packing and not traits.isolates_documents:
            problem = f"{model_type} mixes the documents of a sequence; set data.packing=false"
            raise UsageError(f"data.packing=true: {problem}")
        if config.data.packing is None and not traits.isolates_documents:
            problem = f"{model_type} would mix the documents of a sequence"
            notes.append(f"data.packing=false (auto): {problem}")
            config = config.changed({"data.packing": False})
    return config, tuple(notes)


def attention_for(model: ModelConfig) -> str | None:
    """Return `model.attention`, or transformers' attention if the model does not support fsdpctl's.

    UsageError if the setting selects a kernel of fsdpctl and the model does not support it.
    """
    problem = check_decoder(model).attention_problem
    if problem and model.attention not in (None, TRANSFORMERS):
        raise UsageError(f"model.attention={model.attention}: {problem}; set it to {TRANSFORMERS}")
    return TRANSFORMERS if problem else model.attention


def check_decoder(model: ModelConfig) -> DecoderTraits:
    """Return the behavior of a small copy of the model; UsageError if it is not supported."""
    # All of fsdpctl's kernels compute the same, so they share one cached result.
    attention = TRANSFORMERS if model.attention == TRANSFORMERS else None
    return _cached_traits(replace(model, name="", attention=attention))


def check_shared_rows(config: Config) -> None:
    """Check that the model supports `train.context_parallel`; UsageError if it does not."""
    num_ranks, model = config.train.context_parallel, config.model
    if num_ranks == 1:
        return
    content = config_dict(model)
    problem = next((f"{n}={content[n]}: expected 0" for n in _DROPOUT_KEYS if content.get(n)), "")
    if not problem and model.router_aux_loss == "model" and content.get("output_router_logits"):
        problem = "its auxiliary loss needs full rows; set model.router_aux_loss to global or none"
    # The smallest divisor shows the same problem with the fewest threads.
    ranks = next(divisor for divisor in range(2, num_ranks + 1) if num_ranks % divisor == 0)
    if problem := problem or _shared_rows_problem(model, ranks):
        model_type = content["model_type"]
        raise UsageError(f"train.context_parallel={num_ranks}: model: {model_type}: {problem}")


@lru_cache(maxsize=8)
def _cached_traits(model: ModelConfig) -> DecoderTraits:
    failure = Exception()
    for candidate in (_with_short_ranges(model), model):  # shorter ranges may be invalid
        try:
            with seeded_no_grad():
                return _traits(candidate)
        except UsageError:
            raise
        except Exception as error:  # models may raise any exception
            failure = error
    line = str(failure).partition("\n")[0]
    problem = f"{model_type_of(model)}: not supported; a small copy fails: {line}"
    raise UsageError(f"model: {problem}") from failure


def _traits(model: ModelConfig) -> DecoderTraits:
    module: TransformersDecoder = small_copy(model)
    initialized = copy.deepcopy(module)
    for name, each in initialized.named_modules():
        if each._parameters:
            initializer(initialized, name)(each)  # raises if transformers cannot initialize them
    module.attention.use(fsdpctl=False)
    tokens = _tokens(module, len(_LENGTHS), sum(_LENGTHS[0]))
    versions = [param._version for param in module.parameters()]
    logits = module(tokens)
    new_tokens = tokens.clone()
    new_tokens[:, -1] = (new_tokens[:, -1] + 1) % module.get_output_embeddings().out_features
    problem = ""
    if versions != [param._version for param in module.parameters()]:
        problem = "not supported; it writes to its parameters in forward"
    elif _differ(logits[:, :-1], module(new_tokens)[:, :-1]):
        problem = "not causal: tokens attend to later tokens"
    elif _differ(logits, module.full_logits(tokens)):
        problem = "not supported; its logits depend on more than the last hidden states"
    if problem:
        raise UsageError(f"model: {type(module.transformers_model).__name__}: {problem}")
    ranges = ((row, *x) for row, lengths in enumerate(_LENGTHS) for x in token_ranges(lengths))
    expected = [module(tokens[row : row + 1, start:end]) for row, start, end in ranges]
    if model.attention != TRANSFORMERS:
        problem = _select_attention(module, tokens, logits)
    packed = module(tokens, documents=pack_documents(_LENGTHS, _CPU)).flatten(0, 1)
    pairs = zip(packed.split([*chain(*_LENGTHS)]), expected, strict=True)
    is_same = [not _differ(row, single[0]) for row, single in pairs]
    # The documents after the first one of a row act as padding.
    return DecoderTraits(problem, all(is_same), all(is_same[:: len(_LENGTHS[0])]))


def _select_attention(module: TransformersDecoder, tokens: Tensor, logits: Tensor) -> str:
    """Select fsdpctl's attention, or transformers' if it is not supported; return the problem."""
    module.attention.use(fsdpctl=True)
    problem = "fsdpctl's attention computes other results"
    try:
        if not module.attention.is_fsdpctl:
            problem = "its attention does not use transformers' interface"
        elif not _differ(module(tokens), logits):
            return ""
    except UsageError as error:
        problem = f"not supported: {error}"
    except Exception:  # models may raise any exception
        problem = "it reads the masks of transformers"
    module.attention.use(fsdpctl=False)
    return problem


@cache
def _shared_rows_problem(model: ModelConfig, ranks: int) -> str:
    try:
        with seeded_no_grad():
            module = small_copy(_with_short_ranges(model))
            tokens = _tokens(module, rows=1, length=ranks * _TOKENS_PER_RANK)
            expected = module(tokens)
            modules = [copy.deepcopy(module) for _ in range(ranks)]  # forwards may modify modules
            logits = run_as_ranks(ranks, partial(_forward_as_rank, modules, tokens))
            differs = _differ(expected, torch.cat(logits, 1))
    except UsageError as error:
        return f"not supported: {error}"
    except Exception:  # models may raise any exception
        return "not supported; its attention does not use transformers' interface"
    return "not supported; its layers mix tokens other than by attention" if differs else ""


def _forward_as_rank(modules: list[Any], tokens: Tensor, context: ContextParallel) -> Tensor:
    documents = pack_documents(((tokens.shape[1],),), _CPU, context=context, one_per_row=True)
    local_tokens = tokens.chunk(context.size, 1)[context.index]
    with torch.no_grad():  # the grad mode belongs to a thread
        logits: Tensor = modules[context.index](local_tokens, documents=documents)
    return logits


def run_as_ranks(num_ranks: int, run: Callable[[ContextParallel], T]) -> list[T]:
    """Run a function as each of several ranks, in threads; return the results in rank order."""
    barrier = threading.Barrier(num_ranks, timeout=_TIMEOUT_SECONDS)
    inputs: dict[int, Tensor] = {}
    errors: list[BaseException] = []

    def exchange(index: int, x: Tensor) -> Tensor:
        inputs[index] = x
        barrier.wait()
        received = torch.stack([inputs[each][index] for each in range(num_ranks)])
        barrier.wait()  # otherwise a fast rank would overwrite an input that others read
        return received

    def as_rank(index: int) -> T:
        # The indices are negative, since index 0 is the training's exchange.
        context = ContextParallel(num_ranks, index, exchange_index=-1 - index)
        use_exchange(partial(exchange, index), context.exchange_index)
        try:
            return run(context)
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise errors[0] from None  # not the broken barrier of a waiting rank

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(as_rank, range(num_ranks)))


def _tokens(module: TransformersDecoder, rows: int, length: int) -> Tensor:
    return torch.randint(module.get_output_embeddings().out_features, (rows, length))


def _with_short_ranges(model: ModelConfig) -> ModelConfig:
    content = config_dict(model)
    switches_rope = any(rope_type in str(content) for rope_type in _SWITCHING_ROPE_TYPES)

    def resize(name: str, size: int) -> int:
        if name in _WINDOW_KEYS:
            return min(size, _WINDOW)
        if name in _RANGE_KEYS and switches_rope:
            return min(size, _RANGE)
        return max(size, _NUM_POSITIONS) if name in _POSITION_KEYS else size

    def shorten(content: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: shorten(each) if isinstance(each, dict) else
            resize(name, each) if type(each) is int else each
            for name, each in content.items()
        }  # fmt: skip

    return with_config(model, shorten(content))


def _differ(actual: Tensor, expected: Tensor) -> bool:
    """Return whether logits differ by more than rounding, or have a NaN."""
    return not bool((actual - expected).abs().max() <= _TOLERANCE * expected.abs().max())


@contextmanager
def seeded_no_grad() -> Iterator[None]:
    """Disable gradients and seed the CPU's generator inside the block; restore both after it."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
