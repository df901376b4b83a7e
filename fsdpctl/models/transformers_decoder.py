"""Decoders of transformers, with the loss computed in chunks of tokens by the model's own head."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdpctl.errors import UsageError
from fsdpctl.models.experts import ReduceCounts, aux_loss_factor, global_aux_loss
from fsdpctl.models.packed_documents import PackedDocuments
from fsdpctl.models.transformers_attention import TransformersAttention

_BACKBONE_NAMES = ("model", "transformer", "backbone")  # if base_model_prefix is not an attribute


class KeyValueCache:
    """A cache of keys and values. After the first call has filled it, each call takes one token."""

    def __init__(self) -> None:
        self.past_key_values: object = None  # transformers' cache
        self._length = 0  # number of cached tokens

    def __len__(self) -> int:
        return self._length

    def update(self, past_key_values: object, count: int) -> None:
        """Store the cache of a model that has processed `count` more tokens.

        If the model does not return a cache (None), each call processes all tokens again.
        """
        self.past_key_values = past_key_values
        self._length = 0 if past_key_values is None else self._length + count


class Decoder(Protocol):
    """A module that takes tokens, or a wrapper of such a module."""

    training: bool

    def train(self, mode: bool = True) -> Any: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return logits, or with targets their loss."""


@contextmanager
def eval_mode(module: Decoder) -> Iterator[None]:
    """Put `module` into eval mode inside the block, and restore the mode of each submodule."""
    modes = [(each, each.training) for each in module.modules()]
    was_training = module.training
    module.train(False)
    try:
        yield
    finally:
        module.train(was_training)  # a wrapper may have state outside of its modules
        for each, mode in modes:
            each.training = mode


def _has_dropout_or_jitter(config: dict[str, Any]) -> bool:
    """Return whether a dropout rate is not zero, or any key sets jitter.

    Routers with jitter may draw random numbers even if jitter is zero, as in Phi-3.5-MoE.
    """
    nested = (each for each in config.values() if isinstance(each, dict))
    named = ((str(key), each) for key, each in config.items())
    has_rate = any("jitter" in key or ("drop" in key and each) for key, each in named)
    return has_rate or any(map(_has_dropout_or_jitter, nested))


class OutputHead(nn.Linear):
    """The projection to the vocabulary and the loss, computed in chunks of tokens.

    Some models scale logits or limit them after the projection. So the model's own forward computes
    the logits of a chunk, in a copy whose backbone returns the chunk's hidden states.

    While `token_losses` is a list, each forward of a chunk appends the losses of its tokens, of
    shape (tokens,). Backward recomputes the chunk and appends the same losses again.
    """

    token_losses: list[Tensor] | None = None

    def __init__(self, model: Any, backbone: str, head: str) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate another weight
        linear = getattr(model, head)
        self.weight, self.bias = linear.weight, linear.bias
        self.out_features, self.in_features = linear.weight.shape
        model_copy = copy.copy(model)
        model_copy.__dict__["_modules"] = dict(model._modules)
        self._precomputed = _PrecomputedBackbone(getattr(model, backbone))
        model_copy._modules[backbone] = self._precomputed
        model_copy._modules[head] = _HeadProjection(self)
        self._model_copy = (model_copy,)  # in a tuple: not a submodule

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        chunk_tokens: int | None = None,
        outputs: Any = None,
    ) -> Tensor:
        """Return logits, or the cross entropy in nats, in float32, summed over targets.

        `hidden` has the last hidden states, (batch, length, hidden_size), and `outputs` the other
        results of the backbone. `TransformersDecoder.forward` describes the other arguments.
        """
        if targets is None:
            return self._logits(hidden, outputs)
        x, targets, loss_fn = hidden.flatten(0, -2), targets.flatten(), partial(self._loss, outputs)
        if chunk_tokens is None or len(targets) <= chunk_tokens:
            return loss_fn(x, targets)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for chunk, target in zip(x.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            loss = loss + checkpoint(loss_fn, chunk, target, use_reentrant=False)
        return loss

    def _loss(self, outputs: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(hidden.unsqueeze(0), outputs).flatten(0, -2)
        if self.token_losses is None:
            return F.cross_entropy(logits.float(), targets, reduction="sum")
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        self.token_losses.append(losses.detach())
        return losses.sum()

    def _logits(self, hidden: Tensor, outputs: Any) -> Tensor:
        return self.run(hidden, outputs).logits  # type: ignore[no-any-return]  # transformers is untyped

    def run(self, hidden: Tensor, outputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward with the backbone's results; `inputs_embeds` is not used."""
        self._precomputed.outputs = copy.copy(outputs)
        self._precomputed.outputs["last_hidden_state"] = hidden
        try:
            return self._model_copy[0].forward(inputs_embeds=hidden, use_cache=False, **kwargs)
        finally:
            self._precomputed.outputs = None


class _PrecomputedBackbone(nn.Module):
    """A stand-in for a backbone, which returns outputs that exist already."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = (backbone,)  # in a tuple: not a submodule
        self.outputs: Any = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the backbone, such as the scale of logits."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._backbone[0], name)

    @property
    def decoder(self) -> "_PrecomputedBackbone":
        """The module itself: some models call `backbone.decoder`."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.outputs


class _HeadProjection(nn.Module):
    """The matrix product of a head. Calling the head itself would recurse into the model."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple: not a submodule

    @property
    def weight(self) -> Tensor:
        """The head's weight: some models read its dtype."""
        return self._head[0].weight

    def forward(self, hidden: Tensor) -> Tensor:
        head = self._head[0]
        return F.linear(hidden, head.weight, head.bias)


class TransformersDecoder(nn.Module):
    """A causal language model of transformers with the interface that fsdpctl's training loop uses.

    Modules and parameters have the same names as in transformers.
    """

    def __init__(self, model: Any, router_aux_loss: str = "model") -> None:
        """Take over the modules of `model`, a PreTrainedModel with a backbone and a head."""
        super().__init__()
        names = (model.base_model_prefix, *_BACKBONE_NAMES)
        self._backbone = next((name for name in names if name in model._modules), "")
        projection = model.get_output_embeddings()
        head = next((name for name, each in model.named_children() if each is projection), "")
        if not self._backbone or not head or not isinstance(projection, nn.Linear):
            problem = "not supported; expected a model that is a backbone and a linear output head"
            raise UsageError(f"model: {type(model).__name__}: {problem}")
        setattr(model, head, OutputHead(model, self._backbone, head))
        for name, child in model.named_children():
            self.add_module(name, child)
        self._head = head
        self._model = (model,)  # in a tuple: this module already has its submodules
        self._aux_mode = router_aux_loss
        self.reduce_counts: ReduceCounts | None = None  # sums expert counts over ranks
        self._supports_cache = _supports_cache(model.config)
        self.attention = TransformersAttention(model)
        parameters = inspect.signature(type(getattr(model, self._backbone)).forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_mask = "attention_mask" in parameters
        # transformers renamed the argument in 5.24.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @property
    def transformers_model(self) -> Any:
        """The PreTrainedModel, which shares its modules with this decoder."""
        return self._model[0]

    @cached_property  # finding routers visits all modules
    def adds_aux_loss(self) -> bool:
        """Whether the routers' auxiliary loss is added to the loss."""
        if self._aux_mode == "none" or not aux_loss_factor(self.transformers_model):
            return False
        config = self.transformers_model.config
        return self._aux_mode == "global" or bool(getattr(config, "output_router_logits", False))

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a forward in training draws random numbers, according to config.json."""
        return _has_dropout_or_jitter(self.transformers_model.config.to_dict())

    def train(self, mode: bool = True) -> "TransformersDecoder":
        super().train(mode)
        self.transformers_model.training = mode
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.transformers_model.get_input_embeddings()  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> OutputHead:
        return getattr(self, self._head)  # type: ignore[no-any-return]

    def full_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of transformers' own forward, of all tokens at once."""
        model = copy.copy(self.transformers_model)
        head = _HeadProjection(self.get_output_embeddings())
        model.__dict__["_modules"] = {**model._modules, self._head: head}
        return model.forward(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]  # transformers is untyped

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        chunk_tokens: int | None = None,
        cache: KeyValueCache | None = None,
        documents: PackedDocuments | None = None,
    ) -> Tensor:
        """Return logits of shape (batch, length, vocab_size), or a summed loss.

        In training, the auxiliary loss of routers is added once per target, so that the mean over
        targets is the loss of transformers.

        Args:
            tokens: Shape (batch, length). With a filled `cache`, one token per row.
            targets: If given, the cross entropy summed over targets other than -100 is returned.
            chunk_tokens: The number of tokens whose logits exist at a time; backward recomputes
                them.
            cache: The cache of earlier tokens, which `tokens` follow.
            documents: The documents in each row, which do not attend to one another.
        """
        kwargs: dict[str, Any] = {}
        if self._takes_positions and documents is not None:
            kwargs["position_ids"] = documents.local_positions
        if self._takes_mask and self.attention.is_fsdpctl and cache is None:
            # Without a mask, transformers would wait for the device to look for documents.
            kwargs["attention_mask"] = torch.ones_like(tokens, dtype=torch.bool)
        adds_aux_loss = targets is not None and self.training and self.adds_aux_loss
        if adds_aux_loss:
            kwargs["output_router_logits"] = True
        if cache is not None and cache.past_key_values is not None:
            kwargs[self._cache_name] = cache.past_key_values
        kwargs["use_cache"] = cache is not None and self._supports_cache
        with self.attention.within(documents):
            backbone = getattr(self, self._backbone)
            outputs = backbone(input_ids=tokens, return_dict=True, **kwargs)
        if cache is not None:
            cache.update(getattr(outputs, self._cache_name, None), tokens.shape[1])
        head, hidden = self.get_output_embeddings(), outputs.last_hidden_state
        loss: Tensor = head(hidden, targets, chunk_tokens, outputs)
        if targets is None or not adds_aux_loss:
            return loss
        has_loss = targets != -100
        # True for tokens of data, not padding: (batch, length) or (batch, 1).
        mask = has_loss.any(-1, keepdim=True) if documents is None else documents.local_data_mask
        aux_loss = self._compute_aux_loss(hidden, outputs, mask.expand_as(targets))
        return loss + has_loss.sum() * aux_loss

    def _compute_aux_loss(self, hidden: Tensor, outputs: Any, mask: Tensor) -> Tensor:
        """Return the auxiliary loss of the routers, times its factor, over the tokens in `mask`."""
        model = self.transformers_model
        factor = aux_loss_factor(model)
        if self._aux_mode == "global":
            return factor * global_aux_loss(outputs.router_logits, mask, model, self.reduce_counts)
        attention_mask = (mask | ~mask.any()).long()  # the mean over no tokens would be NaN
        head = self.get_output_embeddings()
        kwargs = {"output_router_logits": True, "attention_mask": attention_mask}
        # Only the router logits in `outputs` matter. One position of `hidden` costs the least.
        return factor * head.run(hidden[:, -1:], outputs, **kwargs).aux_loss  # type: ignore[no-any-return]  # transformers is untyped


def _supports_cache(config: Any) -> bool:
    """Return whether transformers' cache counts tokens. A cache of recurrent layers does not."""
    import transformers

    try:
        return bool(transformers.DynamicCache(config=config).get_seq_length() == 0)
    except (ValueError, AttributeError):  # no layers, or several lists of layers
        return False
