"""The check that a decoder of transformers gives the same logits where ranks share its rows.

A small copy is run twice: on full rows, and by a thread per rank on parts of them. Its windows are
shorter than the rows, and layers that run along the rows otherwise see only their part.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsdpctl.config.any_decoder import canonical, content_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.models.context import use_exchange
from fsdpctl.models.documents import make_documents
from fsdpctl.plan.context import ContextParallel
from fsdpctl.resolve.decoder_check import differ, quiet, small_copy

T = TypeVar("T")
_TOKENS, _WINDOW = 12, 5  # of a rank; of layers with a window
_WINDOWS = ("sliding_window", "attention_chunk_size")
_SWITCHING = ("longrope", "su")  # types of rotary embeddings, and their earlier names
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_SECONDS = 60.0  # for which a thread waits for the others


def check_shared_rows(config: Config) -> None:
    """Check that ranks can share the rows of the model, if the configuration says so.

    Raises:
        UsageError: If they cannot.
    """
    shared, model = config.train.context_parallel, config.model
    if shared == 1 or not model.is_foreign:
        return
    content = content_of(model)
    where = f"train.context_parallel={shared}: model=transformers: {content['model_type']}"
    for name in _DROPOUTS:
        if content.get(name):
            raise UsageError(f"{where}: {name}={content[name]}: expected 0")
    if model.router_aux_loss == "model" and content.get("output_router_logits"):
        raise UsageError(
            f"{where}: its auxiliary loss is that of full rows; set model.router_aux_loss to "
            "global or none"
        )
    short = _short_positions(content)
    if config.train.seq_len > short:
        raise UsageError(
            f"{where}: its rotary embeddings change where a forward has more than {short} "
            f"positions, and a rank has only its own; expected train.seq_len of at most {short}"
        )
    ranks = next(each for each in range(2, shared + 1) if shared % each == 0)
    try:
        with quiet():
            works = _works(_with_short_windows(model, content), ranks)
    except UsageError as error:
        raise UsageError(f"{where}: not supported: {error}") from None
    except Exception as error:  # the code of a family raises what it likes
        raise UsageError(
            f"{where}: not supported; its attention is not that of transformers' interface"
        ) from error
    if not works:
        raise UsageError(f"{where}: not supported; its layers do more than attend along a row")


def _short_positions(content: dict[str, Any]) -> float:
    """Return the positions up to which a model has one set of rotary embeddings."""
    outer = [each for each in content.values() if isinstance(each, dict)]
    inner = [each for some in outer for each in some.values() if isinstance(each, dict)]
    name, found = "original_max_position_embeddings", [math.inf]
    for rope in (*outer, *inner):  # by kind of layer
        if rope.get("rope_type", rope.get("type")) in _SWITCHING:
            found.append(rope.get(name) or content.get(name) or math.inf)
    return min(found)


def _with_short_windows(model: ModelConfig, content: dict[str, object]) -> ModelConfig:
    short = {name: _WINDOW for name in _WINDOWS if content.get(name)}
    return replace(model, config_json=canonical({**content, **short}))


@cache
def _works(model: ModelConfig, ranks: int) -> bool:
    module = small_copy(model)
    vocab_size = module.get_output_embeddings().out_features
    tokens = torch.randint(vocab_size, (1, ranks * _TOKENS))
    whole = module(tokens)
    return not differ(whole, _run_in_parts(module, tokens, ranks))


def _run_in_parts(module: nn.Module, tokens: Tensor, ranks: int) -> Tensor:
    """Return the logits of `tokens`, (batch, length), computed by a thread per rank."""
    rows = ((tokens.shape[1],),) * len(tokens)

    def run(context: ContextParallel) -> Tensor:
        documents = make_documents(rows, tokens.device, context=context, are_rows=True)
        part = tokens.chunk(ranks, 1)[context.index]
        with torch.no_grad():
            logits: Tensor = module(part, documents=documents)
        return logits

    return torch.cat(as_ranks(ranks, run), 1)


def as_ranks(ranks: int, run: Callable[[ContextParallel], T]) -> list[T]:
    """Return what `run` returns as each rank; threads exchange tensors in place of processes."""
    barrier = threading.Barrier(ranks, timeout=_SECONDS)
    sent: dict[int, Tensor] = {}
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def exchange(index: int, x: Tensor) -> Tensor:
        sent[index] = x
        barrier.wait()
        received = torch.stack([sent[each][index] for each in range(ranks)])
        barrier.wait()  # before any rank sends again
        return received

    def as_rank(index: int) -> None:
        context = ContextParallel(ranks, index, exchange=-1 - index)
        use_exchange(partial(exchange, index), context.exchange)
        try:
            found[index] = run(context)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [
        threading.Thread(target=as_rank, args=(index,), daemon=True) for index in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[index] for index in range(ranks)]
