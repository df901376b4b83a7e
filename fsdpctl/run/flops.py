"""Which share of the devices' arithmetic a run uses."""

from dataclasses import dataclass

import torch
from torch import nn

from fsdpctl.config.gpus import known_gpu
from fsdpctl.config.model import ModelConfig
from fsdpctl.config.schema import Config


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What the model's mathematics take, and what the devices can do."""

    per_token: int  # forward and backward; what is computed again does not count
    peak: float | None  # FLOP/s of all ranks together; None: not known

    def utilization(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation, MFU (Chowdhery et al., PaLM, 2022)."""
        return None if self.peak is None else self.per_token * tokens_per_second / self.peak


def model_flops(config: Config, module: nn.Module, device: torch.device, ranks: int) -> ModelFlops:
    """Of a run with so many ranks, each on a device like this one."""
    peak, _ = _peak(config, device)
    num_params = sum(param.numel() for param in module.parameters())
    per_token = flops_per_token(config.model, num_params, config.train.seq_len)
    per_token -= 2 * _num_frozen(module)
    return ModelFlops(per_token, None if peak is None else peak * ranks)


def describe_flops(config: Config, module: nn.Module) -> str:
    """What a token takes, and what MFU is the share of, in words."""
    device = torch.device(str(config.launch.device))
    peak, of = _peak(config, device)
    per_token = model_flops(config, module, device, 1).per_token
    share = f"n/a: {of}" if peak is None else f"of {peak / 1e12:,.0f} TFLOP/s a rank, {of}"
    size, unit = (1e9, "GFLOP") if per_token >= 1e9 else (1e6, "MFLOP")
    return f"{per_token / size:,.2f} {unit} a token, forward and backward; MFU {share}"


def _peak(config: Config, device: torch.device) -> tuple[float | None, str]:
    """FLOP/s of a device, and which it is; or why they are not known."""
    if device.type != "cuda":
        return None, "no peak is known of a CPU"
    if config.precision.param_dtype != "bfloat16":
        return None, f"peaks are known of bfloat16, this computes in {config.precision.param_dtype}"
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name)
    return peak, f"no peak is known of {name}" if peak is None else f"{name} in bfloat16"


def _num_frozen(module: nn.Module) -> int:
    """Parameters that are multiplied with and have no gradient, which takes 2 FLOPs a token each.

    What no gradient of an activation goes through is taken to have one.
    """
    looked_up = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    looked_up -= {id(each.weight) for each in module.modules() if isinstance(each, nn.Linear)}
    params = (param for param in module.parameters() if not param.requires_grad)
    return sum(param.numel() for param in params if id(param) not in looked_up)


def flops_per_token(model: ModelConfig, num_params: int, seq_len: int) -> int:
    """6 (N - N_embedding) + 12 L h s, as torchtitan counts: h is the width of all L layers' heads.

    An embedding is looked up and does not count, unless it is the head too, which multiplies.
    Attention counts as if every token saw all `seq_len`: it is not halved for being causal.
    """
    assert model.vocab_size is not None
    if not model.tie_embeddings:
        num_params -= model.vocab_size * model.hidden_size
    if model.architecture == "gpt2":
        num_params -= model.max_seq_len * model.hidden_size
    heads = model.num_heads * (model.head_dim or model.hidden_size // model.num_heads)
    return 6 * num_params + 12 * model.num_layers * heads * seq_len


def peak_flops(device_name: str) -> float | None:
    """Of a device by its name, in bf16."""
    gpu = known_gpu(device_name)
    return None if gpu is None else gpu.peak
