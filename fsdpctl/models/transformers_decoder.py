"""Decoders that transformers implements, with the loss in chunks by the model's own head."""

import copy
import inspect
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdpctl.config.any_decoder import CONFIG_OF, read_configuration
from fsdpctl.config.model import ModelConfig
from fsdpctl.errors import UsageError
from fsdpctl.models.cache import Cache
from fsdpctl.models.documents import Documents

_BACKBONES = ("model", "transformer", "backbone")  # where base_model_prefix is not an attribute
Counts = Callable[[Tensor], Tensor]


class OwnHead(nn.Linear):
    """The projection to the vocabulary, with what the model does to its result.

    Some models scale logits or limit them. So the loss is computed from the results of the model's
    own forward, which runs with the hidden states of a chunk in place of its backbone.
    """

    def __init__(self, model: Any, backbone: str, head: str) -> None:
        """Take over the parameters of `model`'s projection named `head`."""
        nn.Module.__init__(self)
        plain = getattr(model, head)
        self.weight, self.bias = plain.weight, plain.bias
        self.out_features, self.in_features = plain.weight.shape
        shell = copy.copy(model)
        shell.__dict__["_modules"] = dict(model._modules)
        self._given = _Given()
        shell._modules[backbone] = self._given
        shell._modules[head] = _Projection(self)
        self._shell = (shell,)  # hidden: its modules are not this one's

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        chunk_tokens: int | None = None,
        outputs: Any = None,
    ) -> Tensor:
        """Return logits, or the cross entropy summed over targets; see `fsdpctl.models.parts.Head`.

        Args:
            hidden: Last hidden states, (batch, length, width).
            targets: As in `Head`.
            chunk_tokens: As in `Head`.
            outputs: The other outputs of the backbone.
        """
        if targets is None:
            return self._logits(hidden, outputs)
        flat, wanted = hidden.flatten(0, -2), targets.flatten()
        if chunk_tokens is None or len(wanted) <= chunk_tokens:
            return self._loss(flat, wanted, outputs)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk, part in zip(flat.split(chunk_tokens), wanted.split(chunk_tokens), strict=True):
            loss = loss + checkpoint(self._loss, chunk, part, outputs, use_reentrant=False)
        return loss

    def _loss(self, hidden: Tensor, targets: Tensor, outputs: Any) -> Tensor:
        logits = self._logits(hidden.unsqueeze(0), outputs)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets, reduction="sum")

    def _logits(self, hidden: Tensor, outputs: Any) -> Tensor:
        return self.run(hidden, outputs).logits  # type: ignore[no-any-return]  # transformers'

    def run(self, hidden: Tensor, outputs: Any, **settings: Any) -> Any:
        """Return the result of the model's forward for the hidden states."""
        self._given.outputs = copy.copy(outputs)
        self._given.outputs["last_hidden_state"] = hidden
        try:
            return self._shell[0].forward(inputs_embeds=hidden, use_cache=False, **settings)
        finally:
            self._given.outputs = None


class _Given(nn.Module):
    """Returns outputs that exist already."""

    outputs: Any = None

    @property
    def decoder(self) -> "_Given":
        """The part that some models call instead."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.outputs


class _Projection(nn.Module):
    """Multiplies by the weight of a head, whose hooks are not run."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = (head,)

    @property
    def weight(self) -> Tensor:
        """The weight, whose dtype some models ask for."""
        return self._head[0].weight

    def forward(self, hidden: Tensor) -> Tensor:
        head = self._head[0]
        return F.linear(hidden, head.weight, head.bias)


class TransformersDecoder(nn.Module):
    """A causal language model of transformers with the interface of fsdpctl's decoders.

    Its modules and parameters have the names that they have in transformers.
    """

    def __init__(self, model: Any, router_aux_loss: str = "model") -> None:
        """Take over the modules of `model`, a PreTrainedModel.

        Raises:
            UsageError: If the model has no backbone and output projection side by side.
        """
        super().__init__()
        names = (model.base_model_prefix, *_BACKBONES)
        self._backbone = next((name for name in names if name in model._modules), "")
        projection = model.get_output_embeddings()
        head = next((name for name, each in model.named_children() if each is projection), "")
        if not self._backbone or not head or not isinstance(projection, nn.Linear):
            raise UsageError(
                f"model=transformers: {type(model).__name__}: not supported; expected a model that "
                "is a backbone and a linear output head"
            )
        setattr(model, head, OwnHead(model, self._backbone, head))
        for name, child in model.named_children():
            self.add_module(name, child)
        self._head = head
        self._model = (model,)  # hidden: its modules are this one's
        self._aux_loss = router_aux_loss
        self.reduce_counts: Counts | None = None  # sums expert counts over ranks
        forward = type(getattr(model, self._backbone)).forward
        self._takes_positions = "position_ids" in inspect.signature(forward).parameters

    @property
    def transformers_model(self) -> Any:
        """The model as transformers knows it; it has the same modules."""
        return self._model[0]

    @property
    def balances_experts(self) -> bool:
        """Whether the auxiliary loss of the routers is part of the loss."""
        if self._aux_loss == "none" or not aux_loss_factor(self.transformers_model):
            return False
        config = self.transformers_model.config
        return self._aux_loss == "global" or bool(getattr(config, "output_router_logits", False))

    def train(self, mode: bool = True) -> "TransformersDecoder":
        """Set the training mode."""
        super().train(mode)
        self.transformers_model.training = mode
        return self

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        found: nn.Module = self.transformers_model.get_input_embeddings()
        return found

    def get_output_embeddings(self) -> OwnHead:
        """Return the output head."""
        found: OwnHead = getattr(self, self._head)
        return found

    def full_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of transformers' own forward, of all tokens at once."""
        model = copy.copy(self.transformers_model)
        head = _Projection(self.get_output_embeddings())
        model.__dict__["_modules"] = {**model._modules, self._head: head}
        return model.forward(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]  # transformers'

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        chunk_tokens: int | None = None,
        cache: Cache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return logits of shape (batch, length, vocab_size), or a summed loss.

        See `fsdpctl.models.parts.CausalDecoder`. In training, the auxiliary loss of routers is
        added once per target, so that the mean over targets is the loss of transformers.
        """
        settings: dict[str, Any] = {}
        if self._takes_positions and documents is not None:
            settings["position_ids"] = documents.positions
        adds = targets is not None and self.training and self.balances_experts
        if adds:
            settings["output_router_logits"] = True
        if cache is not None and cache.foreign is not None:
            settings["past_key_values"] = cache.foreign
        outputs = getattr(self, self._backbone)(
            input_ids=tokens, use_cache=cache is not None, return_dict=True, **settings
        )
        if cache is not None:
            cache.keep(getattr(outputs, "past_key_values", None), tokens.shape[1])
        head, hidden = self.get_output_embeddings(), outputs.last_hidden_state
        outputs["past_key_values"] = None
        loss: Tensor = head(hidden, targets, chunk_tokens, outputs)
        if targets is None or not adds:
            return loss
        return loss + (targets != -100).sum() * self._balance(hidden, outputs)

    def _balance(self, hidden: Tensor, outputs: Any) -> Tensor:
        """Return the auxiliary loss of the routers of a micro-batch with its factor."""
        model = self.transformers_model
        factor = aux_loss_factor(model)
        if self._aux_loss == "global":
            return factor * global_balance(outputs.router_logits, model.config, self.reduce_counts)
        head = self.get_output_embeddings()
        found = head.run(hidden[:, -1:], outputs, output_router_logits=True).aux_loss
        return factor * found  # type: ignore[no-any-return]  # transformers'


def idle_parameters(module: TransformersDecoder) -> int:
    """Count the parameters of experts that a token is not sent to."""
    config = module.transformers_model.config
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    top = next((value for name in names if (value := getattr(config, name, None))), None)
    if top is None:
        return 0
    experts = (
        param
        for name, param in module.named_parameters()
        if param.ndim == 3 and "expert" in name and len(param) > top
    )
    return sum(param.numel() * (len(param) - top) // len(param) for param in experts)


def aux_loss_factor(model: Any) -> float:
    """Return the factor of the routers' auxiliary loss; 0 if the model has none."""
    takes = "output_router_logits" in inspect.signature(type(model).forward).parameters
    found = getattr(model.config, "router_aux_loss_coef", None) if takes else None
    return float(found or 0.0)


def global_balance(routers: Any, config: Any, reduce_counts: Counts | None) -> Tensor:
    """Return the load-balancing loss with each expert's share of tokens taken over all ranks.

    The loss of Fedus et al., Switch Transformer, 2021, eq. 4, over all layers at once as in
    transformers: only the mean probabilities, which have the gradient, are this rank's.

    Args:
        routers: The router logits of each layer, (tokens, experts).
        config: transformers' configuration.
        reduce_counts: Sums a tensor over all ranks.
    """
    logits = torch.cat([each.flatten(0, -2) for each in routers], dim=0)
    odds = torch.softmax(logits, dim=-1)
    chosen = torch.topk(odds, config.num_experts_per_tok, dim=-1).indices
    counts = torch.zeros(logits.shape[-1] + 1, dtype=torch.float32, device=logits.device)
    counts[:-1] = F.one_hot(chosen, logits.shape[-1]).sum(dim=(0, 1))
    counts[-1] = len(logits)
    if reduce_counts is not None:
        counts = reduce_counts(counts)
    return logits.shape[-1] * torch.sum(counts[:-1] / counts[-1] * odds.mean(dim=0))


def build_transformers(config: ModelConfig) -> TransformersDecoder:
    """Build the module on the current device, which is usually meta.

    Raises:
        UsageError: If transformers cannot build it.
    """
    return TransformersDecoder(_built(config), config.router_aux_loss)


def _built(config: ModelConfig) -> Any:
    if config.config_json is None:
        raise UsageError("model.architecture=transformers: requires model=transformers")
    import transformers

    told = _of_depth(
        read_configuration(json.loads(config.config_json), CONFIG_OF), config.num_layers
    )
    try:
        make: Any = transformers.AutoModelForCausalLM
        return make.from_config(told, dtype=torch.float32)
    except Exception as error:  # the code of a family raises what it likes
        reason = str(error).strip().replace("\n", " ")
        raise UsageError(f"{CONFIG_OF}: transformers cannot build the model: {reason}") from None


def _of_depth(told: Any, num_layers: int) -> Any:
    """Return a configuration with another number of blocks, whose kinds repeat if there are more.

    The search for the largest model that fits needs it.
    """
    count = getattr(told, "num_hidden_layers", num_layers)
    if count == num_layers:
        return told
    told = copy.deepcopy(told)
    for key, value in list(vars(told).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(told, key, (value * -(-num_layers // count))[:num_layers])
    told.num_hidden_layers = num_layers
    return told


@torch.no_grad()
def fill_buffers(module: TransformersDecoder) -> None:
    """Replace buffers on the meta device by their values, on the CPU."""
    for each in module.modules():
        names = [name for name, buffer in each._buffers.items() if buffer is not None]
        if not any(each._buffers[name].is_meta for name in names):  # type: ignore[union-attr]  # not None
            continue
        for name in names:
            each._buffers[name] = torch.zeros_like(each._buffers[name], device="cpu")  # type: ignore[arg-type]  # not None
        module.transformers_model._init_weights(each)


@lru_cache(maxsize=1)
def _drawer(config: ModelConfig) -> TransformersDecoder:
    with torch.device("meta"):
        return build_transformers(config)


@torch.no_grad()
def draw_parameter(name: str, whole: Tensor, number: int, config: ModelConfig) -> None:
    """Initialize a parameter in place as transformers does, with the seed `number`.

    Only this parameter of its module has memory, so that nothing else takes from the generator.
    """
    module = _drawer(config)
    parent, _, leaf = name.rpartition(".")
    owner = copy.copy(module.get_submodule(parent))
    values = torch.zeros(whole.shape, dtype=torch.float32)
    owner.__dict__["_parameters"] = {**owner._parameters, leaf: nn.Parameter(values)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        module.transformers_model._init_weights(owner)
    whole.copy_(owner._parameters[leaf])  # type: ignore[arg-type]  # set above
