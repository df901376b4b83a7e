"""Drawn configurations with settings of every group, and the files that they name.

Note: `train` checks files first, and an estimate reads data only if a value depends on it. The
commands may report different mistakes of several, so all files exist and are valid.
"""

import json
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdpctl.plan.attention_kernels import KERNELS
from fsdpctl.plan.optimizers import STATE_DTYPES
from fsdpctl.plan.owner_map import OWNER_MAPS
from fsdpctl.plan.precision import SPLIT
from fsdpctl.plan.strategy import STRATEGIES
from tests.commands.run import TINY, make_text
from tests.data.test_token_formats import write_datatrove
from tests.hostile import make_tokens
from tests.models.families import FAMILIES
from tests.training.chats import make_chat_model, make_chats

SIZES, TEXT, CHATS = TINY[:5], "data.path=words.txt", "data.path=chats.jsonl"
CHAT = ["model=DIR", "data=chat", CHATS]
# Models and data. Texts that begin with -- are options of the commands.
WORLDS: dict[str, list[str]] = {
    "text": [*SIZES, TEXT, "train.seq_len=16", "train.global_batch_size=8"],
    "chats": CHAT,
    "sized recipe": ["--recipe=sized.yaml", TEXT],
    "adapters": [*CHAT, "model.lora.rank=2"],
    "tokens": [*SIZES, "data.path=tokens.bin", "data.tokenizer=bytes"],
    "recipe of chats": ["--recipe=tuned.yaml", "model=DIR", CHATS],
    "few chats": ["model=DIR", "data=chat", "data.path=few.jsonl"],
    "mixture": [*SIZES, "data.path=words.txt:1,other.txt:3"],
    "new tokens": [*CHAT, "data.new_tokens=[<|a|>,<|b|>]"],
    "documents": [*SIZES, "data.path=documents.ds", "data.packing=true", "train.seq_len=16",
                  "model.vocab_size=500"],
    "adapters on NF4": [*CHAT, "model.lora.rank=2", "model.base_dtype=nf4"],
    "text of any length": [*SIZES, TEXT],
    "chats apart": [*CHAT, "data.packing=false"],
    "our recipe": ["--recipe=finetune_chat", "model.path=DIR", CHATS],
    "text for weights": ["model=DIR", TEXT],
    "adapters of a file": [*CHAT, "model.lora.path=adapters"],
    "mixed chats": ["model=DIR", "data=chat", "data.path=chats.jsonl:1,few.jsonl:2"],
    "quick": ["--recipe=quick", *SIZES, TEXT],
    "little text": [*SIZES, "data.path=little.txt"],
}  # fmt: skip
_SIZED = """\
model: {num_layers: 2, hidden_size: 32, intermediate_size: 48, num_heads: 4, num_kv_heads: 2}
cluster: 16xh100
cluster.memory: 9
strategy: hybrid_shard
train: {seq_len: 32, micro_batch_size: 2, epochs: 2}
"""
_TUNED = """\
model.lora: {rank: 2, targets: "q_proj,v_proj"}
data: chat
cluster: rtx4090
launch: {nproc_per_node: 4}
activation_checkpointing: full
train: {epochs: 2, micro_batch_size: 4, global_batch_size: 16}
lr_scheduler: {warmup_ratio: 0.03}
"""

# The values of a key, some with the settings that they require.
OTHERS: dict[str, tuple[object, ...]] = {
    "strategy": (*STRATEGIES, "auto", "hybrid_shard strategy.dp_shard_size=1"),
    "strategy.dp_shard_size": (2, 3),
    "strategy.owner_map": (*(f"{each} strategy=shard_optimizer" for each in OWNER_MAPS), "even"),
    "strategy.offload": ("none", "states", "params", "all"),
    "engine": ("fsdpctl", "fsdp2", "ddp strategy=no_shard", "ddp"),
    "prefetch": ("none", "backward", "both", "auto"),
    "accumulation": ("every", "last"),
    "accumulation.steps": (1, 2, 4, 99),
    "precision": ("fp32", "tf32", "bf16", "bf16_true", "auto"),
    "precision.master_dtype": ("float32", "bfloat16", SPLIT, "auto"),
    "precision.reduce_dtype": ("float32", "bfloat16"),
    "activation_checkpointing": ("none", "selective", "full", "auto"),
    "activation_checkpointing.offload": ("true activation_checkpointing=full", "true"),
    "optimizer": (
        "adamw", "sgd optimizer.lr=0.1", "muon strategy=no_shard", "muon strategy=shard_optimizer",
    ),
    "optimizer.lr": ("auto", 0.1),
    "optimizer.state_dtype": STATE_DTYPES,
    "optimizer.nesterov": ("false",),
    "lr_scheduler": ("constant", "cosine", "wsd"),
    "lr_scheduler.warmup_steps": ("auto", 0, 7),
    "lr_scheduler.warmup_ratio": (0.1,),
    "launch.nproc_per_node": (1, 2, 3, 4, "auto"),
    "launch.share_memory": ("false", "true", "auto"),
    "launch.device": ("cpu", "auto"),
    "cluster.memory": (  # a process on the CPU takes up to 0.5
        0.51, 4, *(f"{each} launch.device=cpu" for each in (0.5015, 0.504, 0.51)),
    ),
    "cluster.host_memory": (1, 64),
    "train.context_parallel": (1, 2, 3),
    "train.seq_len": (16, 64, "auto", 300, 100_000),
    "train.steps": (2, 700, "auto"),
    "train.epochs": (0.5, 2),
    "train.tokens": (100_000,),
    "train.global_batch_size": (1, 6, 8, 64, "auto"),
    "train.global_batch_tokens": (10, 4096),
    "train.micro_batch_size": (1, 2, "auto", "none", 99),
    "train.loss_chunk_tokens": (0, 7, "auto"),
    "train.mlp_chunk_tokens": (0, 7, "auto"),
    "train.compile": ("true",),
    "train.deterministic": ("true",),
    "train.patience": (2,),
    "model.attention": ("auto", "transformers", *KERNELS),
    "model.max_seq_len": (64, 4096),
    "model.overrides.model_type": ("qwen3 model.init=random", "mistral"),
    "model.router_aux_loss": ("global",),
    "model.trainable": ("norm", "lm_head,norm", "nothing"),
    "model.lora.rank": (2,),
    "model.base_dtype": ("int8", "auto"),
    "model.vocab_size": (512, "auto"),
    "model.init": ("random", "auto"),
    "data.val_fraction": (0, 0.02, 0.3),
    "data.tokenizer": ("bytes", "DIR", "auto"),
    "data.train_on": ("all", "last"),
    "data.packing": ("true", "false", "auto"),
    "data.too_long": ("drop",),
    "checkpoint.keep_best": ("true",),
    "checkpoint.mode": ("sync",),
}  # fmt: skip


class Drawn(NamedTuple):
    """A world with other settings; the last setting of each key counts."""

    options: tuple[str, ...]
    settings: tuple[str, ...]


def combined(world: str, *more: str) -> Drawn:
    options = tuple(each for each in WORLDS[world] if each.startswith("--"))
    last = {each.partition("=")[0]: each for each in (*WORLDS[world], *more)}
    return Drawn(options, tuple(each for each in last.values() if each not in options))


def drawn(seed: int, *, few: bool = False) -> Iterator[Drawn]:
    """Yield configurations without end: each world in turn, with up to five other settings.

    `few`: only the first six worlds, with at most two settings, which takes a fifth of the time.
    """
    draw = random.Random(seed)
    while True:
        for world in list(WORLDS)[: 6 if few else None]:
            names = draw.sample(list(OTHERS), draw.choice((1, 2) if few else (0, 1, 2, 3, 4, 5)))
            more = (f"{each}={draw.choice(OTHERS[each])}".split() for each in names)
            yield combined(world, *chain.from_iterable(more))


def write_files(folder: Path) -> None:
    """Write the data, the model and the recipes that drawn configurations name."""
    text = make_text(folder).read_text()
    (folder / "other.txt").write_text(text[:9000])
    (folder / "little.txt").write_text(text[:2500])
    make_tokens(folder / "tokens.bin")
    write_datatrove(folder / "documents.ds")
    make_chats(folder / "chats.jsonl")
    make_chats(folder / "few.jsonl", 40)
    sizes = LlamaConfig.from_dict({**FAMILIES["llama"].to_dict(), "num_hidden_layers": 2})
    model = make_chat_model(folder / "DIR", "llama")
    AutoModelForCausalLM.from_config(sizes).save_pretrained(model)
    (folder / "adapters").mkdir()
    options = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps(options))
    shapes = {"A": (4, sizes.hidden_size), "B": (sizes.hidden_size, 4)}
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format(n, x): torch.zeros(shapes[x]) for n in range(2) for x in shapes}
    save_file(tensors, folder / "adapters" / "adapter_model.safetensors")
    (folder / "sized.yaml").write_text(_SIZED)
    (folder / "tuned.yaml").write_text(_TUNED)


_SIZED_BY: dict[str, tuple[object, ...]] = {
    "strategy": (*STRATEGIES, "auto"),
    "activation_checkpointing": ("none", "selective", "full", "auto", None, None, None),
    "prefetch": ("none", "backward", "both", "auto", None, None, None),
    "train.micro_batch_size": (1, 2, "none", "auto", None, None, None),
    "accumulation.steps": (None, None, None, 2),
    "accumulation": ("every", "last"),
    "train.global_batch_size": (8, 12, 64),
    "train.seq_len": (16, 256),
    "launch.nproc_per_node": (1, 2, 4),
    "launch.share_memory": ("auto", "false"),
    "model.lora.rank": (None, None, 2),
    "optimizer": ("adamw", "adamw", "muon"),
    "cluster.memory": (0.5005, 0.501, 0.502, 0.504, 0.51),  # the process takes 0.5
}


def sized(seed: int) -> Iterator[Drawn]:
    """Yield configurations for small memory, without end."""
    draw = random.Random(seed)
    while True:
        values = {key: draw.choice(values) for key, values in _SIZED_BY.items()}
        settings = [f"{key}={value}" for key, value in values.items() if value is not None]
        yield combined("text", "launch.device=cpu", *settings)
