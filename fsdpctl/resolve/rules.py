"""Rules for settings that depend on one another: one row per rule, for every command.

A row has a message, in which `{section.key}` is a value, and a condition. A condition may return
text, which replaces `{detail}` in the message. A setting that is still `auto` breaks no rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from fsdpctl.config.data import check_data_keys
from fsdpctl.config.keys import AUTO
from fsdpctl.config.launch import NO_EMULATION
from fsdpctl.config.model import LoraConfig
from fsdpctl.config.schema import KEYS, SECTIONS, Config, ConfigT
from fsdpctl.errors import UsageError
from fsdpctl.io.packages import install_hint, is_installed
from fsdpctl.io.stores import is_remote
from fsdpctl.models.decoder_check import check_shared_rows
from fsdpctl.plan.optimizers import (
    ADAMW,
    MUON,
    OPTIMIZERS,
    SPLITTING_MAPS,
    OptimizerRow,
    get_optimizer,
    uses_muon,
)
from fsdpctl.plan.precision import SPLIT, TF32
from fsdpctl.plan.recomputation import LEVELS
from fsdpctl.plan.strategy import (
    DDP,
    FSDPCTL,
    Offload,
    check_strategy,
    get_strategy,
    ranks_per_replica,
)
from fsdpctl.plan.units import UnitSpec
from fsdpctl.resolve.attention_kernel import check_attention
from fsdpctl.resolve.auto_values import Stage, fill_auto
from fsdpctl.resolve.machine import executed_strategy, may_share_memory


def validate(config: ConfigT) -> ConfigT:
    """Check the settings of a configuration with ranks against one another.

    Returns the configuration with the owner map and shard size of its strategy, unless the strategy
    is `auto`. UsageError if a rule is broken.
    """
    if not config.is_auto("strategy"):
        strategy = get_strategy(config.strategy.name)
        check_strategy(config.engine.name, strategy)
        config = fill_auto(config, Stage.STRATEGY)
        ranks_per_replica(strategy, config.num_ranks, config.strategy.dp_shard_size)
    check_data_keys(config.data, {*filter(config.is_typed, KEYS)})
    if message := next(_broken_rules(config), None):
        raise UsageError(message)
    check_attention(config)
    check_shared_rows(config)
    return config


def _broken_rules(config: Config) -> Iterator[str]:
    yield from _unused_key_messages(config)
    sections = {name: getattr(config, name) for name in SECTIONS}
    constants = {"FSDPCTL": FSDPCTL, "SPLIT": SPLIT, "TF32": TF32, "ranks": config.num_ranks}
    for message, is_broken in RULES.items():
        if mistake := is_broken(config):
            yield message.replace("{detail}", str(mistake)).format(**sections, **constants)


def _unused_key_messages(config: Config) -> Iterator[str]:
    names = {key for each in OPTIMIZERS.values() for key in each.keys} - {*_optimizer(config).keys}
    problems = {}
    for name in sorted(names):
        valid = [each.name for each in OPTIMIZERS.values() if name in each.keys]
        problems[f"optimizer.{name}"] = f"only valid with optimizer={' or '.join(valid)}"
    if config.is_auto("prefetch"):
        problem = "conflicts with prefetch=auto; leave one of them out"
        problems |= dict.fromkeys(("prefetch.backward", "prefetch.forward"), problem)
    for key, problem in problems.items():
        if (value := config.value(key)) != KEYS[key].default or config.is_typed(key):
            yield f"{key}={KEYS[key].text(value)}: {problem}"


def _optimizer(config: Config) -> OptimizerRow:
    return get_optimizer(config.optimizer.name)


def _has_several_ranks(config: Config) -> bool:
    """Return whether several ranks execute a strategy that is not `auto`."""
    return not config.is_auto("strategy") and config.num_ranks > 1


# Features that only fsdpctl's engine has, and whether a configuration uses them.
_FSDPCTL_ONLY: Mapping[str, Callable[[Config], bool]] = {
    "strategy.offload={strategy.offload}": lambda c: bool(c.strategy.offloaded),
    "optimizer={optimizer.name}": lambda c: _optimizer(c).steps_matrices,
    "optimizer.state_dtype={optimizer.state_dtype}": lambda c: c.optimizer.state_dtype is not None,
    "precision.master_dtype={SPLIT}": lambda c: c.precision.master_dtype == SPLIT,
    "activation_checkpointing.offload=true": lambda c: c.activation_checkpointing.offload,
    "activation_checkpointing.blocks={activation_checkpointing.blocks}": lambda c: (
        c.activation_checkpointing.offloads_inputs
    ),
    "train.context_parallel={train.context_parallel}": lambda c: c.train.context_parallel > 1,
    "model.lora.rank={model.lora.rank}": lambda c: c.model.lora.rank is not None,
    "model.trainable={model.trainable}": lambda c: c.model.trainable is not None,
}


def _requires_fsdpctl(config: Config) -> str:
    if config.engine.name == FSDPCTL:
        return ""
    return next((text for text, is_set in _FSDPCTL_ONLY.items() if is_set(config)), "")


def _cannot_offload(config: Config) -> str:
    strategy = config.strategy
    if Offload.STATES in strategy.offloaded and config.optimizer.name != ADAMW:
        return f"requires optimizer=adamw, got optimizer={config.optimizer.name}"
    if config.is_auto("strategy"):
        return ""
    requested = get_strategy(strategy.name)
    executed, _ = executed_strategy(config, requested, strategy.dp_shard_size)
    return strategy.offloaded.conflict(requested, executed, config.num_ranks)


def _is_uneven_on_nodes(config: Config) -> bool:
    context_parallel, per_node = config.train.context_parallel, config.launch.nproc_per_node or 1
    return bool(per_node % context_parallel and context_parallel % per_node)


def _offloads_inputs(config: Config, mode: str) -> bool:
    recomputation = config.activation_checkpointing
    return recomputation.offload and recomputation.name == mode


def _conflict_of_blocks(config: Config) -> str:
    recomputation = config.activation_checkpointing
    if recomputation.blocks is None:
        return ""
    if recomputation.name == AUTO:
        return "=auto; leave one of them out"
    if recomputation.offload:
        return ".offload=true; write offload:N in place of full:N"
    least = recomputation.blocks.rpartition(",")[2].partition(":")[0]
    if LEVELS.index(least) <= LEVELS.index(recomputation.name):
        return f"={recomputation.name}; the first blocks must be recomputed more than the others"
    return ""


_INPUTS = "activation_checkpointing.offload=true: requires "
_CONTEXT = "train.context_parallel={train.context_parallel}: "
# The message of each rule, and the condition that breaks the rule.
RULES: Mapping[str, Callable[[Config], bool | str]] = {
    "train.final_eval_batches={train.final_eval_batches}: checkpoint.keep_best and "
    "train.patience compare losses of the same data; expected "
    "train.eval_batches={train.eval_batches}, or auto": lambda c: (
        c.compares_losses and c.train.final_eval_batches not in (None, c.train.eval_batches)
    ),
    "strategy.owner_map={strategy.owner_map}: only valid with strategy=shard_optimizer, got "
    "strategy={strategy.name}": lambda c: (
        not c.is_auto("strategy")
        and c.strategy.owner_map != "even"
        and not get_strategy(c.strategy.name).has_owner_map
    ),
    "precision.master_dtype={SPLIT}: requires precision.param_dtype=bfloat16, got "
    "{precision.param_dtype}": lambda c: (
        c.precision.master_dtype == SPLIT and c.precision.param_dtype != "bfloat16"
    ),
    "precision={TF32}: requires precision.param_dtype=float32, got "
    "{precision.param_dtype}": lambda c: (
        c.precision.name == TF32 and c.precision.param_dtype != "float32"
    ),
    "precision.master_dtype={SPLIT}: only valid with optimizer=adamw": lambda c: (
        c.optimizer.name != ADAMW and c.precision.master_dtype == SPLIT
    ),
    "precision.master_dtype={precision.master_dtype}: not supported by optimizer=sgd on CPU "
    "ranks; set precision.master_dtype=float32": lambda c: (
        (c.optimizer.name, c.launch.device) == ("sgd", "cpu")
        and c.precision.master_dtype == "bfloat16"
    ),
    "{detail}: requires engine={FSDPCTL}, got engine={engine.name}": _requires_fsdpctl,
    "strategy.offload={strategy.offload}: {detail}": _cannot_offload,
    "launch.share_memory=true: requires launch.device=cpu, launch.nnodes=1, engine={FSDPCTL} "
    "and no params in strategy.offload; got {launch.device}, {launch.nnodes}, {engine.name} "
    "and {strategy.offload}": lambda c: c.launch.share_memory is True and not may_share_memory(c),
    "optimizer.lr=auto: not supported with optimizer={optimizer.name}; set a number": lambda c: (
        not _optimizer(c).has_default_lr and c.optimizer.lr is None
    ),
    "engine=ddp: reduces gradients in the dtype of the master weights; expected "
    "precision.reduce_dtype={precision.master_dtype}, got {precision.reduce_dtype}": lambda c: (
        c.engine.name == DDP and c.precision.reduce_dtype != c.precision.master_dtype
    ),
    _INPUTS + "activation_checkpointing=full or selective, got "
    "activation_checkpointing={activation_checkpointing.name}": lambda c: _offloads_inputs(
        c, "none"
    ),
    "activation_checkpointing.blocks={activation_checkpointing.blocks}: conflicts with "
    "activation_checkpointing{detail}": _conflict_of_blocks,
    _INPUTS + "train.compile=false with selective": lambda c: (
        c.train.compile and _offloads_inputs(c, "selective")
    ),
    _CONTEXT + "expected a divisor of the {ranks} ranks": lambda c: (
        c.num_ranks % c.train.context_parallel > 0
    ),
    _CONTEXT + "expected a divisor or a multiple of the {launch.nproc_per_node} ranks of a "
    "node, so that ranks that share samples are near one another": _is_uneven_on_nodes,
    _CONTEXT + "expected a divisor of model.num_heads={model.num_heads}, which ranks share "
    "during attention": lambda c: c.model.num_heads % c.train.context_parallel > 0,
    "model.base_dtype={model.base_dtype}: only valid with adapters; set "
    "model.lora.rank=16": lambda c: c.model.lora.rank is None and c.model.base_dtype is not None,
    "model.lora: requires a rank, such as model.lora.rank=16": lambda c: (
        c.model.lora.rank is None and c.model.lora != LoraConfig()
    ),
    "model.trainable={model.trainable}: conflicts with model.lora.rank, which trains only the "
    "adapters, and the modules of model.lora.also": lambda c: (
        c.model.lora.rank is not None and c.model.trainable is not None
    ),
    "optimizer=muon: updates whole matrices, of which model.lora has none; use "
    "optimizer=adamw": lambda c: _optimizer(c).steps_matrices and c.model.lora.rank is not None,
    "strategy={strategy.name}: cuts matrices, which optimizer=muon updates as a whole; "
    "expected shard_optimizer or no_shard": lambda c: (
        _optimizer(c).steps_matrices
        and _has_several_ranks(c)
        and get_strategy(c.strategy.name).shards_params
    ),
    "strategy.owner_map={strategy.owner_map}: cuts matrices, which optimizer=muon updates as "
    "a whole; expected matrices, round_robin or contiguous": lambda c: (
        _optimizer(c).steps_matrices
        and _has_several_ranks(c)
        and get_strategy(c.strategy.name).has_owner_map
        and c.strategy.owner_map in SPLITTING_MAPS
    ),
    "train.seq_len={train.seq_len}: above model.max_seq_len={model.max_seq_len}": lambda c: (
        c.train.seq_len > c.model.max_seq_len
    ),
}


def check_preflight(config: Config) -> None:
    """Check settings that only runs need: packages of trackers, and the object store."""
    if (program := config.engine.program) != NO_EMULATION:
        raise UsageError(f"engine.program={program}: for estimates only; expected {NO_EMULATION}")
    if config.is_typed("cluster.price"):
        price = f"cluster.price={config.cluster.price:g}"
        raise UsageError(f"{price}: for estimates and compare --simulate only")
    for name in config.log.tracker_names:
        if not is_installed(name):
            raise UsageError(f"log.trackers={name}: {install_hint(name)}")
    remote = config.checkpoint.remote
    if remote is not None and not is_remote(remote, f"checkpoint.remote={remote}"):
        problem = "expected a directory in an object store, such as s3://BUCKET/runs"
        raise UsageError(f"checkpoint.remote={remote}: {problem}")


def check_trained_params(config: Config, units: Sequence[UnitSpec]) -> None:
    """Check settings that depend on which parameters are trained."""
    params = [param for unit in units for param in unit.params]
    config.strategy.offloaded.check_frozen_params(trains_all=all(x.trainable for x in params))
    if config.optimizer.name == MUON and not any(map(uses_muon, params)):
        problem = "the model has no trained matrix in a block; use optimizer=adamw"
        raise UsageError(f"optimizer=muon: {problem}")
