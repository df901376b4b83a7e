"""Models of transformers that fsdpctl has no code for: trained on two ranks as by one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from fsdpctl.engine.shard import shard_model
from fsdpctl.errors import EngineError
from fsdpctl.optim.adamw import ShardedAdamW
from tests.distributed import distributed
from tests.engine.test_parity import largest_difference
from tests.reference import train_reference

WORDS, LENGTH, PIXELS, CLASSES = 64, 12, 32, 4
_TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_IMAGE: dict[str, Any] = {"image_size": PIXELS, "num_labels": CLASSES}
_LABELS: dict[str, Any] = {"num_labels": CLASSES}
_START: dict[str, Any] = {"decoder_start_token_id": 0}
_EAGER: dict[str, Any] = {"experts_implementation": "eager"}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_GROUPED)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_GROUPED)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_TEXT, num_key_value_heads=2)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_TEXT)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_TEXT)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=WORDS, hidden_size=32, ffn_dim=48, num_hidden_layers=3,
            word_embed_proj_dim=32, num_attention_heads=4, max_position_embeddings=32,
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=3, n_head=4)
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            **_EAGER,  # torch's grouped products have no float64
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_TEXT)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            **_START,
        )
    ),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
            decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
            max_position_embeddings=32,
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            patch_size=8, **_IMAGE,
        )
    ),
    "convnext": lambda: hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 2, 1], **_IMAGE)
    ),
    "resnet": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic",
            **_LABELS
        )
    ),
    "regnet": lambda: hf.RegNetForImageClassification(
        hf.RegNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=8,
            **_LABELS
        )
    ),
    "mobilenet_v2": lambda: hf.MobileNetV2ForImageClassification(
        hf.MobileNetV2Config(depth_multiplier=0.25, **_LABELS, image_size=PIXELS)
    ),
}  # fmt: skip
IMAGES = ("vit", "convnext", "resnet", "regnet", "mobilenet_v2")


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name]().double().eval()  # without dropout


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    """Of tokens that predict themselves, or of images whose class is the brightness of a corner."""
    if batch.dtype == torch.int64:
        loss: Tensor = module(input_ids=batch, labels=batch).loss
    else:
        labels = (batch[:, 0, 0, 0] > 0).long()
        loss = module(pixel_values=batch, labels=labels).loss
    return loss


def batches_of(name: str, steps: int, ranks: int) -> list[list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> Tensor:
        if name in IMAGES:
            return torch.randn(3, 3, PIXELS, PIXELS, generator=generator, dtype=torch.float64)
        return torch.randint(1, WORDS, (3, LENGTH), generator=generator)

    return [[[batch()] for _ in range(ranks)] for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer"])
@pytest.mark.parametrize("name", FAMILIES)
@distributed(world_size=2)
def test_a_model_of_others_is_trained_as_by_one_process(
    rank: int, world_size: int, name: str, strategy: str
) -> None:
    batches = batches_of(name, 3, world_size)
    plain = make(name)
    names = {param for param, _ in plain.named_parameters()}
    expected = train_reference(plain, loss_of, batches)
    model = shard_model(make(name), strategy)
    optimizer = ShardedAdamW(model, lr=1e-2)
    for of_ranks in batches:
        loss_of(model, of_ranks[rank][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = model.state_dict()
    ours, theirs = ({n: state[n] for n in names} for state in (trained, expected))
    assert largest_difference(ours, theirs) <= 1e-12


@pytest.mark.slow
@distributed(world_size=2)
def test_a_model_that_calls_its_blocks_by_forward_is_told(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = hf.SqueezeBertForMaskedLM(hf.SqueezeBertConfig(**_TEXT, embedding_size=32))
    model = shard_model(module.eval(), "full_shard")
    with pytest.raises(EngineError, match="computes with its weight, which is not here"):
        loss_of(model, batches_of("bert", 1, 1)[0][0][0])
