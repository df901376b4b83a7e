"""The check that a decoder of transformers gives the same logits where ranks share its rows.

A small copy is run twice: on full rows, and by a thread per rank on parts of them. Its windows are
shorter than the rows, and layers that run along the rows otherwise see only their part.
"""

import copy
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from fsdpctl.config.any_decoder import content_of
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config
from fsdpctl.errors import UsageError
from fsdpctl.models.context import use_exchange
from fsdpctl.models.documents import make_documents
from fsdpctl.plan.context import ContextParallel
from fsdpctl.resolve.decoder_check import differ, quiet, with_short_ranges
from fsdpctl.resolve.small_decoder import small_copy

T = TypeVar("T")
_TOKENS = 12  # of a rank
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
    ranks = next(each for each in range(2, shared + 1) if shared % each == 0)
    try:
        with quiet():
            works = _works(with_short_ranges(model), ranks)
    except UsageError as error:
        raise UsageError(f"{where}: not supported: {error}") from None
    except Exception as error:  # the code of a family raises what it likes
        raise UsageError(
            f"{where}: not supported; its attention is not that of transformers' interface"
        ) from error
    if not works:
        raise UsageError(f"{where}: not supported; its layers do more than attend along a row")


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
    # Modules of transformers write to themselves.
    modules = [copy.deepcopy(module) for _ in range(ranks)]

    def run(context: ContextParallel) -> Tensor:
        documents = make_documents(rows, tokens.device, context=context, are_rows=True)
        part = tokens.chunk(ranks, 1)[context.index]
        with torch.no_grad():
            logits: Tensor = modules[context.index](part, documents=documents)
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
