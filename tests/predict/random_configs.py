"""Random configurations of small models, over all settings that change a rank's memory."""

import random
from collections.abc import Sequence

from fsdpctl.config.compose import compose_config
from fsdpctl.config.schema import Resolved
from fsdpctl.errors import UsageError
from fsdpctl.models.module_spec import module_units
from fsdpctl.plan.optimizers import STATE_DTYPES
from fsdpctl.plan.owner_map import OWNER_MAPS
from fsdpctl.plan.precision import SPLIT
from fsdpctl.plan.strategy import STRATEGIES
from fsdpctl.resolve.machine import assign_ranks
from fsdpctl.resolve.rules import check_trained_params, validate
from fsdpctl.resolve.run_plan import stored_config
from fsdpctl.training.assemble import make_module

ARCHITECTURES = ["llama", "llama", "mistral", "qwen3", "gpt2"]
TRAINABLE = [
    "0", "norm|ln", "weight", r"\.0\.(mlp|self_attn|attn)", "mlp|head", "embed|wte", "bias|norm",
]  # fmt: skip
OFFLOADS = ["states", "states,gradients", "states,params", "all", "params"]
# Drawn once per configuration: if drawn again with the other settings, strict ones would be rare.
OPTIMIZERS = [
    *(["optimizer=adamw", f"optimizer.state_dtype={each}"] for each in STATE_DTYPES),
    ["optimizer=adamw", "optimizer.state_dtype=int8", f"precision.master_dtype={SPLIT}"],
    ["optimizer=adamw", f"precision.master_dtype={SPLIT}"],
    ["optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.1", "precision.master_dtype=float32"],
    ["optimizer=sgd", "optimizer.lr=0.1", "precision.master_dtype=float32"],
    ["optimizer=muon", "optimizer.nesterov=false", "optimizer.ns_steps=1"],
    ["optimizer=muon", "optimizer.ns_steps=2"],
]


def random_config(
    draw: random.Random, ranks: int, strategies: Sequence[str] = tuple(STRATEGIES), *,
    on_gloo: bool = True,
) -> Resolved:  # fmt: skip
    """Draw until the settings are valid together."""
    optimizer = draw.choice(OPTIMIZERS)
    while True:
        shared = draw.choice([1, 1, *(n for n in (2, 3, 4) if on_gloo and ranks % n == 0)])
        shares = str(on_gloo and draw.random() < 0.5).lower()
        args = [
            *_run(draw, ranks, shared, shares), *_model(draw), *_sharding(draw, ranks, strategies),
        ]  # fmt: skip
        args += [*_long(draw), *optimizer]
        if on_gloo and draw.random() < 0.6:
            args += [f"strategy.offload={draw.choice(OFFLOADS)}"]
        try:
            config = stored_config(validate(assign_ranks(compose_config(args).config)))
            check_trained_params(config, module_units(make_module(config), None))
        except UsageError:
            continue
        return config


def _run(draw: random.Random, ranks: int, shared: int, shares: str) -> list[str]:
    steps, micro = draw.choice([1, 1, 2, 3, 4]), draw.choice([1, 2, 3])
    length = draw.choice([16, 33, 64, 128])
    args = [
        f"launch.nproc_per_node={ranks}", "launch.device=cpu", f"launch.share_memory={shares}",
        f"prefetch={draw.choice(['none', 'backward', 'both'])}",
        f"precision={draw.choice(['fp32', 'bf16', 'bf16_true'])}",
        f"activation_checkpointing={draw.choice(['none', 'selective', 'full'])}",
        f"accumulation={draw.choice(['every', 'last'])}", f"accumulation.steps={steps}",
        f"train.seq_len={length}", f"train.micro_batch_size={micro}",
        f"train.context_parallel={shared}",
        f"train.global_batch_size={ranks // shared * micro * steps}",
        f"train.loss_chunk_tokens={draw.choice([0, 0, 24])}",
    ]  # fmt: skip
    if draw.random() < 0.3:
        args += [f"prefetch.{way}={draw.randint(0, 2)}" for way in ("forward", "backward")]
    if draw.random() < 0.3 and length >= 64:  # masks of short samples depend on lengths
        args += ["data=chat"]  # packed sequences of several documents
    if draw.random() < 0.3:
        args += [f"precision.reduce_dtype={draw.choice(['bfloat16', 'float32'])}"]
    return args


def _long(draw: random.Random) -> list[str]:
    """Draw settings for long samples."""
    args = []
    if draw.random() < 0.3:
        args += ["activation_checkpointing.offload=true"]
    if draw.random() < 0.3:
        args += [f"train.mlp_chunk_tokens={draw.choice([10, 40])}"]
    return args


def _model(draw: random.Random) -> list[str]:
    heads, arch = draw.choice([1, 2, 4]), draw.choice(ARCHITECTURES)
    args = [
        "model=gpt2" if arch == "gpt2" else f"model.overrides.model_type={arch}",
        f"model.num_layers={draw.randint(1, 9)}",
        f"model.hidden_size={heads * draw.choice([16, 32, 48])}",
        f"model.intermediate_size={draw.choice([64, 100, 256, 512])}", f"model.num_heads={heads}",
        f"model.num_kv_heads={heads if arch == 'gpt2' else draw.choice([1, heads])}",
        f"model.vocab_size={draw.choice([64, 300, 2000])}",
        f"model.overrides.tie_word_embeddings={draw.choice(['true', 'false'])}",
    ]  # fmt: skip
    if arch == "mistral" and draw.random() < 0.5:
        args += ["model.overrides.sliding_window=20"]
    part = draw.random()
    if part < 0.15:
        args += [f"model.trainable={draw.choice(TRAINABLE)}"]
    elif part < 0.4:
        targets = ["all_linear", "mlp", "c_attn" if arch == "gpt2" else "q_proj|v_proj", r"\.0\."]
        args += [
            f"model.lora.rank={draw.choice([1, 4, 8])}",
            f"model.lora.dropout={draw.choice([0, 0, 0.1])}",
            f"model.lora.targets={draw.choice(targets)}",
            f"model.base_dtype={draw.choice(['auto', 'nf4', 'int8', 'float32'])}",
        ]
    return args


def _sharding(draw: random.Random, ranks: int, strategies: Sequence[str]) -> list[str]:
    strategy = draw.choice(strategies)
    args = [f"strategy={strategy}"]
    if STRATEGIES[strategy].has_owner_map and ranks > 1:
        args += [f"strategy.owner_map={draw.choice(['auto', *OWNER_MAPS])}"]
    if STRATEGIES[strategy].replicates:
        sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
        args += [f"strategy.dp_shard_size={draw.choice(sizes[1:-1] or sizes)}"]
    return args
