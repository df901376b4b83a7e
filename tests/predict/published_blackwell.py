"""Published steps of Blackwell: experts without expert parallelism, and dense models beside them.

Halo's pages were read on 2026-11-29. Its kernels are fused, as by a compiler, and its checkpoints
of experts are reentrant, except for Qwen3-30B-A3B: an assumption, because its row does not tell.
Halo's baseline is TRL with Liger's kernels. Both train on filler text. torchtitan's steps are those
of its configurations of that day.
"""

from tests.predict.published_step import Step, batch

_HALO = "whitecircle/halo halo-vs-stock-trl, 2026"
_HALO_1 = "whitecircle/halo throughput-benchmarks, 2026"
_SYMMETRIC = "pytorch/torchtitan#3105, 2026"  # without symmetric memory
_GPT_OSS, _30B = "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B"
_FUSED = "precision=bf16_true train.loss_chunk_tokens=0 train.compile=true model.attention=flash4"
_LIGER = "engine.program=liger precision.reduce_dtype=bfloat16 model.attention=flash4"
_SLOWER = "takes longer than a row of 16,384 tokens"
_TITANS_BIASES = "adds the gradients of the experts' biases in other operators"

# Each row has tokens per sample, samples, tokens/s and, if published, GiB.
_TRL_GPT_OSS = (
    "4096 1 3885 47.6; 4096 2 5519 48.2; 4096 4 6759 50.6; 16384 1 6513 50.6; 16384 2 7466 55.6; "
    "32768 1 7113 56; 65536 1 6876 66"
)
_TRL_30B = (
    "4096 1 3787 63; 4096 2 8252; 4096 4 9746; 16384 1 8837 65; 32768 1 9540 68; 65536 1 7084 73"
)
_TRL_KEPT = "4096 1 4064; 16384 1 6939; 32768 1 7775"
_Z2 = (
    "4096 1 9009; 4096 2 15429; 4096 4 18823; 16384 1 18304; 16384 2 20730; 32768 1 17950; "
    "65536 1 14775"
)
_Z3 = (
    "4096 1 5560; 4096 2 6874; 4096 4 10082; 16384 1 17464; 16384 2 18742; 32768 1 17608; "
    "65536 1 14654"
)
_Z2_KEPT = "4096 1 11008; 16384 1 22073; 32768 1 22535"
_Z3_KEPT = "4096 1 7889; 16384 1 20271; 32768 1 21457"
_DENSE = (
    "4B 4096 1 full 25459; 4B 4096 8 none 38307; 4B 2048 8 none 39931; 4B 32768 1 full 16835; "
    "8B 4096 1 full 18533; 8B 4096 8 none 24620; 8B 32768 1 full 13118"
)


def _hub(model: str, length: int, micro: int, ranks: int, recomputes: str) -> str:
    return (
        f"model=hf model.path={model} model.init=random engine=fsdp2 train.seq_len={length} "
        f"activation_checkpointing={recomputes} {batch(micro, ranks)}"
    )


def _eight(label: str, model: str, args: str, rows: str, recomputes: str = "full") -> list[Step]:
    """Return the steps of `rows` on 8 B300."""
    results = []
    name = f"{model.split('/')[1]}, 8 B300, {label}"
    for row in rows.split("; "):
        length, micro, speed, *allocated = row.split()
        options = _hub(model, int(length), int(micro), 8, recomputes)
        longest = f" model.max_seq_len={length}" if int(length) > 40960 and model == _30B else ""
        gib = float(allocated[0]) if allocated else None
        differs = _SLOWER if rows == _Z3 and length == "4096" and micro != "1" else ""
        title = f"{name}, {micro} x {int(length):,} tokens"
        title += "" if recomputes == "full" else ", not recomputed"
        options = f"{options} cluster=8xb300 {args}{longest}"
        results.append(Step(title, options, float(speed), _HALO, differs, allocated=gib))
    return results


def _alone(row: str) -> Step:
    size, length, micro, recomputes, speed = row.split()
    args = f"{_hub(f'Qwen/Qwen3-{size}', int(length), int(micro), 1, recomputes)} cluster=1xb300"
    name = f"Qwen3-{size}, 1 B300, {micro} x {int(length):,} tokens"
    return Step(name, f"{args} {_FUSED}", float(speed), _HALO_1)


def _four(name: str, args: str, compiled: float, eager: float, differs: str = "") -> list[Step]:
    args = f"{args} cluster=gb200 launch.nproc_per_node=4"
    return [
        Step(f"{name}, 4 GB200, compiled", f"{args} train.compile=true", compiled, _SYMMETRIC),
        Step(f"{name}, 4 GB200, eager", args, eager, _SYMMETRIC, differs),
    ]


_REENTRANT = f"{_FUSED} engine.program=reentrant"
_GRAD_OP = "strategy=shard_grad_op"
BLACKWELL = (
    *_eight("TRL", _GPT_OSS, _LIGER, _TRL_GPT_OSS),
    *_eight("TRL", _GPT_OSS, _LIGER, _TRL_KEPT, "none"),
    *_eight("TRL", _30B, _LIGER, _TRL_30B),
    *_eight("shard_grad_op", _GPT_OSS, f"{_REENTRANT} {_GRAD_OP}", _Z2),
    *_eight("shard_grad_op", _GPT_OSS, f"{_FUSED} {_GRAD_OP}", _Z2_KEPT, "none"),
    *_eight("full_shard", _GPT_OSS, _REENTRANT, _Z3),
    *_eight("full_shard", _GPT_OSS, _FUSED, _Z3_KEPT, "none"),
    *_eight("full_shard", _30B, _FUSED, "4096 1 6395"),
    *map(_alone, _DENSE.split("; ")),
    *_four("gpt-oss-20b", _hub(_GPT_OSS, 8192, 1, 4, "full"), 12839, 9882, _TITANS_BIASES),
    *_four("Qwen3-32B", _hub("Qwen/Qwen3-32B", 4096, 2, 4, "full"), 4312, 3544),
    *_four("8B", f"model=llama3_8b engine=fsdp2 train.seq_len=8192 {batch(1, 4)} "
           "activation_checkpointing=selective", 17158, 16050),
)  # fmt: skip
