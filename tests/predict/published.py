"""Published steps of GPUs, as configurations of fsdpctl.

Comments state assumptions if a source is silent. Figures are tokens/s of one GPU. The shares of
peak and bandwidth in conf/cluster come from other measurements, except step_efficiency: one number
for each kind of device, set with the MPT rows in view, or with rows of the H200 and Blackwell.
"""

from tests.predict.published_blackwell import BLACKWELL
from tests.predict.published_step import Step
from tests.predict.published_step import batch as _batch

_TITAN = "torchtitan benchmarks/llama3_h100_202412"  # H100 with 96 GB of HBM2e, limited to 500 W
_MOSAIC = "llm-foundry scripts/train/benchmarking"
_FMS = "fms-fsdp README"
_KEMPNER = "KempnerForge benchmarks/mfu_scaling"  # bf16 masters follow from the memory of one GPU

_8B = "model=llama3_8b engine=fsdp2 train.seq_len=8192"
# At that time, torch preferred FlashAttention 2 on this GPU; llm-foundry used it, too.
_H100 = "cluster=h100 model.attention=flash"
# At 500 of 700 W, matrix products reach 0.82 of their rate. HBM2e transfers 2.4 TB/s.
_500_W = f"{_H100} cluster.flops=811 cluster.memory_bandwidth=2400"
_SELECTIVE = "activation_checkpointing=selective"
_FULL = "activation_checkpointing=full"
_COMPILED = "train.compile=true"
_8_A100, _400_GBIT_A_NODE = "cluster=a100_80", "cluster.inter_bandwidth=6.25"
_800_GBIT_A_NODE = "cluster.inter_bandwidth=12.5"


def _mpt(layers: int, width: int, heads: int, *, seq_len: int = 2048) -> str:
    """Return the settings of an MPT: gradients are reduced in float32, as by Composer's DEFAULT."""
    return (
        f"model=gpt2 model.vocab_size=50368 model.max_seq_len={seq_len} train.seq_len={seq_len} "
        f"model.num_layers={layers} model.hidden_size={width} model.num_heads={heads} "
        f"model.num_kv_heads={heads} model.intermediate_size={4 * width} engine=fsdp2"
    )


_LLAMA2_13B = (
    "model=llama2_7b model.num_layers=40 model.hidden_size=5120 model.intermediate_size=13824 "
    "model.num_heads=40 model.num_kv_heads=40"
)
_LLAMA2 = f"engine=fsdp2 train.seq_len=4096 {_COMPILED}"
_MPT_3B, _MPT_7B = _mpt(32, 2560, 20), _mpt(32, 4096, 32)
_MPT_13B, _MPT_30B, _MPT_70B = _mpt(40, 5120, 40), _mpt(48, 7168, 56), _mpt(80, 8192, 64)
_GRAD_OP = "strategy=shard_grad_op"
_MPT_125M, _MPT_350M, _MPT_760M = _mpt(12, 768, 12), _mpt(24, 1024, 16), _mpt(24, 1536, 12)
_KEMPNER_8B = (
    f"model=llama3_8b engine=fsdp2 cluster=h200 train.seq_len=4096 {_FULL} {_COMPILED} "
    "precision.master_dtype=bfloat16"
)


def _qwen(name: str, shape: tuple[int, ...], dtype: str, seconds: dict[int, float]) -> list[Step]:
    """Return steps of adapters on one A100, with 8 micro-batches of one sample, from Qwen's README.

    Qwen's 4-bit weights are GPTQ's, with their own kernels. Fused projections have one adapter
    instead of three. Steps below 1.7 s are left out, because they have one digit.
    """
    layers, width, inner, heads, vocabulary = shape
    args = (
        f"model=llama2_7b model.vocab_size={vocabulary} model.num_layers={layers} "
        f"model.hidden_size={width} model.intermediate_size={inner} model.num_heads={heads} "
        f"model.num_kv_heads={heads} model.overrides.attention_bias=true model.max_seq_len=8192 "
        f"model.lora.rank=64 model.lora.dropout=0.05 model.base_dtype={dtype} cluster=1xa100_80 "
        f"model.attention=flash {_FULL} {_batch(1, 1, 8)}"
    )
    kind = "LoRA" if dtype == "auto" else "QLoRA"
    return [
        Step(f"Qwen-{name}, {kind}, 1 A100, {length:,} tokens", f"{args} train.seq_len={length}",
             round(8 * length / of_step, 1), "QwenLM/Qwen README, 2024")
        for length, of_step in seconds.items()
    ]  # fmt: skip


def _mosaic(on_card: dict[str, str], rows: str) -> list[Step]:
    """Return steps of rows: card, model, tokens, micro-batch x passes, recomputation, tokens/s."""
    results = []
    for row in rows.split("; "):
        card, name, length, batch, recomputes, speed = row.split()
        micro, passes = map(int, batch.split("x"))
        args = f"{_mpt(*_SHAPES[name], seq_len=int(length))} {on_card[card]}"
        args += f" {_FULL if recomputes == 'AC' else ''} {_batch(micro, 8, passes)}"
        title = f"MPT-{name}, 8 {card}, {int(length):,} tokens"
        results.append(Step(title, args, float(speed), _MOSAIC))
    return results


# FlashAttention 1 (flash-attn==1.0.9 in its setup.py): the paper of version 2 has at most 50% of an
# A100's peak in forward and 35% in backward. For an H100, version 2's ratio of the chips applies.
_KERNEL = {
    "A100": f"{_8_A100} cluster.attention_efficiency=0.38",
    "H100": f"{_H100} cluster.attention_efficiency=0.21",
}
_SHAPES = {
    "125M": (12, 768, 12), "350M": (24, 1024, 16), "760M": (24, 1536, 12), "1B": (24, 2048, 16),
    "3B": (32, 2560, 20), "7B": (32, 4096, 32), "13B": (40, 5120, 40),
}  # fmt: skip
_LONG = (
    "H100 7B 65536 1x2 AC 1956; H100 3B 65536 1x2 AC 3262; H100 1B 65536 1x2 AC 5506; "
    "A100 7B 65536 1x2 AC 1013; A100 3B 65536 1x2 AC 1767; A100 1B 65536 1x2 AC 3044; "
    "A100 760M 65536 1x2 AC 4143; A100 350M 65536 1x2 none 7524; A100 125M 65536 1x2 none 20368; "
    "H100 7B 32768 2x2 AC 3318; H100 13B 32768 1x3 AC 1976; H100 13B 16384 3x3 AC 2985"
)


def _hub(
    model: str, ranks: int, length: int, args: str, speed: float, used: float | None = None, *,
    more: str = "",
) -> Step:  # fmt: skip
    """Return a step with one sample per H100, recomputed, reduced in bf16 as by accelerate."""
    args = (
        f"model=hf model.path=Qwen/{model} model.init=random engine=fsdp2 cluster=h100 "
        f"launch.nproc_per_node=8 launch.nnodes={ranks // 8} precision.reduce_dtype=bfloat16 "
        f"train.seq_len={length} {_FULL} {_batch(1, ranks)} {args}"
    )
    tokens = "" if model == _30B else f", {length:,} tokens"
    return Step(f"{model}, {ranks} H100{tokens}{more}", args, speed, _TRL, used=used)


_TRL = "huggingface/trl benchmark-sft-moe, 2026"  # without its rows with CP, SP or EP
_FLASH2, _FLASH3 = "model.attention=flash", "model.attention=flash3"
_4B, _32B, _30B = "Qwen3-4B", "Qwen3-32B", "Qwen3-30B-A3B"
_WHOLE, _PLAIN = "train.loss_chunk_tokens=0", "engine.program=transformers"
_OF_LOGITS = "computes entropy and accuracy of all logits, which counts in a small model"
_HUB = (
    _hub(_4B, 8, 32768, _FLASH2, 4321, 24.9), _hub(_4B, 8, 32768, _FLASH3, 6783, more=", flash3"),
    _hub(_4B, 16, 16384, f"{_FLASH2} {_WHOLE}", 5703, 43.4, more=", all logits")
    ._replace(differs=_OF_LOGITS),
    _hub(_32B, 16, 32768, _FLASH3, 1450), _hub(_32B, 32, 32768, _FLASH3, 1441, 63.0),
    _hub(_32B, 16, 16384, _FLASH2, 1356, 59.7),
    _hub(_32B, 16, 16384, _FLASH3, 1693, more=", flash3"),
    _hub(_32B, 32, 16384, _FLASH2, 1344, 44.3),
    _hub(_32B, 32, 16384, f"{_FLASH2} {_WHOLE}", 1243, 72.2, more=", all logits"),
    _hub(_30B, 16, 16384, f"{_FLASH2} {_WHOLE} {_PLAIN}", 4093, 69.5),
    _hub(_30B, 16, 16384, f"{_FLASH3} {_WHOLE} {_PLAIN}", 4735, 71.1, more=", flash3"),
    _hub(_30B, 32, 16384, f"{_FLASH2} {_WHOLE} {_PLAIN}", 3859),
)  # fmt: skip


def _on_host(length: int, speed: float) -> Step:
    """Return a step of an 8B on 8 H200: ZeRO-3, DeepSpeed's optimizer on an unnamed host CPU."""
    args = (
        f"model=llama3_8b model.max_seq_len={length} strategy=zero3 cluster=h200 {_FLASH3} "
        f"train.seq_len={length} strategy.offload=states,gradients precision.reduce_dtype=bfloat16 "
        f"{_FULL} {_batch(1, 8)}"
    )
    differs = "steps on the host after backward" if length < 1 << 16 else ""
    name = f"8B, 8 H200, states on the host, {length:,} tokens"
    return Step(name, args, speed, "ml-engineering insights, 2026", differs)


_ON_HOST = {8192: 2739, 32768: 4576, 65536: 4049, 131072: 2836, 196608: 2114, 262144: 1668}


def _answer(name: str, model: str, args: str, micro: int, seconds: float, differs: str) -> Step:
    """Return a step of 1,024 samples, adapters on two RTX 4090: FSDP 1, reentrant checkpoints."""
    targets = "q_proj,k_proj,v_proj,gate_proj,up_proj,down_proj"
    args = (
        f"{model} {args} model.lora.rank=64 model.lora.dropout=0.1 model.lora.targets={targets} "
        f"precision=bf16_true {_WHOLE} {_FLASH2} cluster=2xrtx4090 train.seq_len=2048 {_FULL} "
        f"{_batch(micro, 2)}"
    )
    speed = round(1024 * 2048 / 2 / seconds, 1)
    return Step(f"{name}, 2 RTX 4090", args, speed, "AnswerDotAI/fsdp_qlora, 2024", differs)


_7B, _NF4, _ALL = "model=llama2_7b", "model.base_dtype=nf4", "strategy=no_shard"
_34B = (
    "model=llama3_70b model.vocab_size=64000 model.num_layers=60 model.hidden_size=7168 "
    "model.num_heads=56 model.num_kv_heads=8 model.intermediate_size=20480"
)
_ANSWER = (
    _answer("Llama-2-7B, LoRA", _7B, "", 6, 481, ""),
    _answer("Llama-2-7B, LoRA, DDP", _7B, _ALL, 4, 437, ""),
    _answer("Llama-2-7B, QLoRA", _7B, _NF4, 10, 466, ""),
    _answer("Llama-2-7B, QLoRA, DDP", _7B, f"{_NF4} {_ALL}", 8, 450, ""),
    _answer("Yi-34B, QLoRA", _34B, f"{_NF4} {_PLAIN}", 2, 2072, ""),
)
_AUTOMODEL = f"train.seq_len=4096 model.lora.rank=16 cluster=1xh100 {_batch(2, 1, 16)}"
_TUNE = (
    "model=hf model.path=meta-llama/Llama-3.2-3B model.init=random cluster=1xa100_80 "
    f"precision=bf16_true train.seq_len=4096 {_batch(2, 1)}"
)
_CHUNKED = "train.loss_chunk_tokens=1024"  # eight chunks

_QWEN = {
    "1.8B": (24, 2048, 5504, 16, 151936), "7B": (32, 4096, 11008, 32, 151936),
    "14B": (40, 5120, 13696, 40, 152064), "72B": (80, 8192, 24576, 64, 152064),
}  # fmt: skip
_ADAPTED = (
    ("1.8B", "auto", {2048: 1.7, 4096: 3.3, 8192: 6.8}),
    ("1.8B", "nf4", {2048: 2.0, 4096: 3.4, 8192: 6.5}),
    ("7B", "auto", {1024: 2.8, 2048: 5.2, 4096: 10.1, 8192: 21.3}),
    ("7B", "nf4", {2048: 7.0, 4096: 11.6, 8192: 22.3}),
    ("14B", "auto", {512: 2.4, 1024: 4.4, 2048: 8.4, 4096: 17.0, 8192: 36.0}),
    ("14B", "nf4", {2048: 11.8, 4096: 20.1, 8192: 38.3}),
    ("72B", "nf4", {2048: 59.5, 4096: 97.7, 8192: 179.8}),
)

PUBLISHED = (
    Step("8B, 8 H100, eager", f"{_8B} {_500_W} {_SELECTIVE} {_batch(2, 8)}", 5762, _TITAN),
    Step("8B, 8 H100, compiled", f"{_8B} {_500_W} {_SELECTIVE} {_COMPILED} {_batch(2, 8)}", 6667,
         _TITAN),
    Step("8B, 128 H100, eager", f"{_8B} {_500_W} {_SELECTIVE} launch.nnodes=16 {_batch(2, 128)}",
         5605, _TITAN),
    Step("8B, 128 H100, compiled",
         f"{_8B} {_500_W} {_SELECTIVE} {_COMPILED} launch.nnodes=16 {_batch(2, 128)}", 6514,
         _TITAN),
    Step("8B, 8 H100, all recomputed",  # measured in 2026, with torch's default kernel
         f"{_8B} cluster=h100 {_FULL} {_COMPILED} {_batch(1, 8)}", 7006, "torchtitan 27aa49077"),
    Step("8B, 64 A100", f"{_8B} {_8_A100} {_SELECTIVE} launch.nnodes=8 {_batch(1, 64)}", 2973,
         "torchtitan docs/performance.md, 2024"),
    Step("70B, 64 A100",
         f"model=llama3_70b engine=fsdp2 train.seq_len=8192 {_8_A100} {_FULL} launch.nnodes=8 "
         f"{_batch(1, 64)}", 323, "torchtitan docs/performance.md, 2024"),
    Step("8B, 8 A100, compiled", f"{_8B} {_8_A100} {_SELECTIVE} {_COMPILED} {_batch(1, 8)}", 2930,
         "pytorch/torchtitan#929"),
    Step("MPT-1B, 8 H100", f"{_mpt(24, 2048, 16)} {_GRAD_OP} {_H100} {_batch(14, 8)}", 45455,
         _MOSAIC),
    Step("MPT-3B, 128 H100",
         f"{_MPT_3B} {_GRAD_OP} {_H100} launch.nnodes=16 {_batch(8, 128)}", 23422, _MOSAIC),
    Step("MPT-7B, 8 H100", f"{_MPT_7B} {_H100} {_batch(6, 8)}", 10643, _MOSAIC),
    Step("MPT-7B, 128 H100", f"{_MPT_7B} {_H100} launch.nnodes=16 {_batch(6, 128)}", 10475,
         _MOSAIC),
    Step("MPT-7B, 512 H100", f"{_MPT_7B} {_H100} launch.nnodes=64 {_batch(6, 512)}", 9670, _MOSAIC),
    Step("MPT-13B, 8 H100", f"{_MPT_13B} {_H100} {_batch(2, 8)}", 4792, _MOSAIC),
    Step("MPT-30B, 32 H100",
         f"{_MPT_30B} {_H100} {_FULL} launch.nnodes=4 {_batch(14, 32, 3)}", 2308, _MOSAIC),
    Step("MPT-70B, 32 H100",
         f"{_MPT_70B} {_H100} {_FULL} launch.nnodes=4 {_batch(2, 32, 16)}", 882, _MOSAIC),
    Step("MPT-70B, 128 H100",
         f"{_MPT_70B} {_H100} {_FULL} launch.nnodes=16 {_batch(8, 128)}", 1058, _MOSAIC),
    Step("MPT-70B, 512 H100",
         f"{_MPT_70B} {_H100} {_FULL} launch.nnodes=64 {_batch(8, 512)}", 1007, _MOSAIC),
    Step("MPT-7B, 8 A100", f"{_MPT_7B} {_8_A100} {_batch(6, 8, 2)}", 4641, _MOSAIC),
    Step("MPT-70B, 64 A100", f"{_MPT_70B} {_8_A100} {_FULL} launch.nnodes=8 {_batch(8, 64, 4)}",
         410, _MOSAIC),
    Step("Llama-2-7B, 96 H100, hybrid",
         f"model=llama2_7b {_LLAMA2} strategy=hybrid_shard {_H100} {_800_GBIT_A_NODE} "
         f"launch.nnodes=12 {_batch(2, 96)}", 9600, _FMS),
    Step("Llama-2-7B, 128 A100, hybrid",
         f"model=llama2_7b {_LLAMA2} strategy=hybrid_shard {_8_A100} {_400_GBIT_A_NODE} "
         f"launch.nnodes=16 {_batch(2, 128)}", 4550, _FMS),
    Step("Llama-2-13B, 96 H100",  # fms-fsdp does not name the recomputed layers: an assumption
         f"{_LLAMA2_13B} {_LLAMA2} {_SELECTIVE} {_H100} {_800_GBIT_A_NODE} launch.nnodes=12 "
         f"{_batch(2, 96)}", 4850, _FMS),
    Step("Llama-2-70B, 96 H100",
         f"model=llama3_70b model.vocab_size=32000 {_LLAMA2} {_SELECTIVE} {_H100} "
         f"{_800_GBIT_A_NODE} launch.nnodes=12 {_batch(2, 96)}", 890, _FMS),
    Step("Llama-2-70B, 128 A100",
         f"model=llama3_70b model.vocab_size=32000 {_LLAMA2} {_SELECTIVE} {_8_A100} "
         f"{_400_GBIT_A_NODE} launch.nnodes=16 {_batch(2, 128)}", 410, _FMS),
    Step("8B, 8 H200", f"{_8B} {_GRAD_OP} cluster=h200 model.attention=flash3 {_batch(1, 8)}", 8955,
         "ml-engineering insights"),
    Step("8B, 1 H200, all recomputed",
         f"{_KEMPNER_8B} launch.nproc_per_node=1 {_batch(2, 1, 4)}", 10471, _KEMPNER),
    Step("8B, 2 H200, all recomputed",
         f"{_KEMPNER_8B} launch.nproc_per_node=2 {_batch(2, 2, 4)}", 9364, _KEMPNER),
    Step("8B, 4 H200, all recomputed",
         f"{_KEMPNER_8B} launch.nproc_per_node=4 {_batch(4, 4, 2)}", 9746, _KEMPNER),
    Step("8B, 32 H200, all recomputed",
         f"{_KEMPNER_8B} launch.nproc_per_node=4 launch.nnodes=8 {_batch(4, 32, 4)}", 9293,
         "KempnerForge benchmarks/config_validation"),
    Step("15B, 8 H200, all recomputed, eager",
         "model=llama3_8b model.num_layers=40 model.hidden_size=5120 model.num_heads=40 "
         "model.intermediate_size=17920 engine=fsdp2 cluster=h200 train.seq_len=4096 "
         f"precision.master_dtype=bfloat16 {_FULL} launch.nproc_per_node=4 launch.nnodes=2 "
         f"{_batch(4, 8, 4)}", 4426, _KEMPNER),
    Step("1.4B, 1 H200",
         "model=llama3_8b model.num_layers=16 model.hidden_size=2048 model.intermediate_size=7168 "
         "model.num_heads=32 model.head_dim=64 engine=fsdp2 cluster=h200 train.seq_len=4096 "
         f"launch.nproc_per_node=1 {_batch(2, 1)}", 50258, "own measurement with torch 2.11, 2026"),
    Step("MPT-760M, 8 H100", f"{_MPT_760M} {_H100} {_batch(24, 8, 2)}", 63147, _MOSAIC),
    Step("MPT-760M, 32 H100", f"{_MPT_760M} {_H100} launch.nnodes=4 {_batch(24, 32)}", 67971,
         _MOSAIC),
    Step("MPT-760M, 8 A100", f"{_MPT_760M} {_8_A100} {_batch(24, 8, 2)}", 32434, _MOSAIC),
    Step("MPT-350M, 8 A100", f"{_MPT_350M} {_8_A100} {_batch(32, 8, 2)}", 58782, _MOSAIC),
    Step("MPT-125M, 8 A100", f"{_MPT_125M} {_8_A100} {_batch(32, 8, 2)}", 141737, _MOSAIC),
    Step("8B, 8 B200",
         f"{_8B} {_GRAD_OP} cluster=b200 model.attention=flash4 {_batch(1, 8)}", 15107,
         "ml-engineering insights"),
    *(each for name, dtype, found in _ADAPTED for each in _qwen(name, _QWEN[name], dtype, found)),
    *_mosaic(_KERNEL, _LONG),
    *_HUB,
    Step("DeepSeek 16B, 8 H100, 2 ranks share a sample",
         "model=hf model.path=deepseek-ai/DeepSeek-V2-Lite model.init=random cluster=h100 "
         f"cluster.flops=811 cluster.memory_bandwidth=2400 model.attention=efficient {_FULL} "
         "train.context_parallel=2 train.seq_len=4096 train.micro_batch_size=8 "
         f"train.global_batch_size=32 {_WHOLE}", 6030, "torchtitan b109f7d71, 2025"),
    Step(f"{_30B}, 8 B200, compiled",
         f"model=hf model.path=Qwen/{_30B} model.init=random engine=fsdp2 cluster=8xb200 "
         f"{_COMPILED} {_SELECTIVE} train.seq_len=8192 {_batch(8, 8)}", 19450,
         "mlc-ai/pith-train#79, 2026"),
    *(_on_host(length, speed) for length, speed in _ON_HOST.items()),
    *_ANSWER,
    *BLACKWELL,
    Step("8B, LoRA, 1 H100", f"model=llama3_8b {_AUTOMODEL}", 12473, "Automodel 507bfb751, 2025"),
    Step("Qwen2.5-7B, LoRA, 1 H100",
         f"model=hf model.path=Qwen/Qwen2.5-7B model.init=random {_AUTOMODEL}", 14110,
         "Automodel 507bfb751, 2025", "adapters in one kernel"),
    Step("3B, 1 A100", f"{_TUNE} {_WHOLE}", 7075, "torchtune 1814feb17, 2024"),
    Step("3B, 1 A100, compiled", f"{_TUNE} {_COMPILED} {_WHOLE}", 8998,
         "torchtune 1814feb17, 2024"),
    Step("3B, 1 A100, compiled, loss in chunks", f"{_TUNE} {_COMPILED} {_CHUNKED}", 9174,
         "torchtune 1814feb17, 2024"),
    Step("3B, 1 A100, all recomputed", f"{_TUNE} {_COMPILED} {_FULL} {_CHUNKED}", 7210,
         "torchtune 1814feb17, 2024"),
)  # fmt: skip
