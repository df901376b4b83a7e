"""A tiny chat model of any family, conversations for it, and a plain loop over them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fsdpctl.config.schema import Config
from fsdpctl.data.batches import Batches
from fsdpctl.data.open_data import open_data
from fsdpctl.data.packing import IGNORE_INDEX, Samples
from fsdpctl.models.packed_documents import token_ranges
from fsdpctl.plan.batch_plan import plan_batches
from fsdpctl.training.learning_rate import lr_factor
from tests.models.decoders import save_decoder
from tests.models.families import FAMILIES, VOCABULARY, save_model

WORDS = [
    "red", "blue", "green", "cat", "dog", "tree", "house", "river", "sky", "sun", "moon", "star",
]  # fmt: skip
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat_model(folder: Path, family: str, **settings: Any) -> Path:
    """Write a model directory as transformers does, with a tokenizer and ChatML."""
    if family in FAMILIES:
        save_model(family, folder)
    else:
        sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
        save_decoder(family, folder, **sizes, **settings)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=controls, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([" ".join(WORDS), "user assistant reverse"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {
        "eos_token": controls[0], "chat_template": CHATML,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def make_chats(file: Path, count: int = 300) -> Path:
    """Write conversations of one to three turns."""
    draw = random.Random(0)
    lines = []
    for _ in range(count):
        messages = []
        for _ in range(draw.randint(1, 3)):
            question = draw.choices(WORDS, k=draw.randint(1, 5))
            messages += [
                {"role": "user", "content": " ".join(question)},
                {"role": "assistant", "content": " ".join(reversed(question))},
            ]
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines) + "\n")
    return file


def summed_alone(model: Any, rows: Samples, number: int) -> tuple[Tensor, int]:
    """Return the summed loss of a row, computed per document, and the number of its targets."""
    sample = rows[number]
    tokens, targets = torch.from_numpy(sample.tokens), torch.from_numpy(sample.targets)
    total = torch.zeros(())
    for start, end in token_ranges(sample.lengths):
        if (targets[start:end] == IGNORE_INDEX).all():
            continue
        logits = model(tokens[None, start:end], use_cache=False).logits[0].float()
        wanted = targets[start:end]
        total = total + F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
    return total, int((targets != IGNORE_INDEX).sum())


def plain_losses(model: Any, config: Config, steps: int) -> list[float]:
    """Train in one process on the rows of a resolved run; return the loss of each step."""
    rows = open_data(config.data, config.train.seed).train.samples(config.train.seq_len)
    plan = plan_batches(config.train.global_batch_size, 1)
    batches = Batches(rows, plan, config.train.seed, 1 << 20)
    trained = [param for param in model.parameters() if param.requires_grad]
    options = config.optimizer
    groups = [
        {
            "params": [each for each in trained if each.ndim > 1],
            "weight_decay": options.weight_decay,
        },
        {"params": [each for each in trained if each.ndim <= 1], "weight_decay": 0.0},
    ]
    assert options.lr is not None
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2))
    results = []
    for step in range(steps):
        parts = [
            summed_alone(model, rows, n)
            for n in batches.sample_indices(step * batches.plan.global_batch_size)
        ]
        count = sum(part[1] for part in parts)
        loss = torch.stack([part[0] for part in parts]).sum() / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, options.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * lr_factor(config.lr_scheduler, step, steps)
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return results


def open_in_transformers(folder: Path) -> Any:
    """Open a model for training in float32 without dropout."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
