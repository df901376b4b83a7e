"""What other tools call things, so that a person who types their word is told ours."""

from fsdpctl.errors import nearest

# Words of torchtitan, axolotl, accelerate, transformers, litgpt, torchtune, DeepSpeed -> ours.
_OURS = {
    "ac_mode": "activation_checkpointing",
    "activation_checkpoint": "activation_checkpointing",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "backward_prefetch": "prefetch=backward",
    "batch_size": "train.global_batch_size",
    "batch_size_per_device": "train.micro_batch_size",
    "bf16": "precision=bf16",
    "checkpoint_interval": "checkpoint.every",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "compile": "train.compile",
    "context_length": "train.seq_len",
    "cpu": "launch.device=cpu",
    "data_path": "data.path",
    "dataset": "data",
    "dataset_path": "data.path",
    "ddp": "strategy=no_shard",
    "devices": "launch.nproc_per_node",
    "dp_replicate": "strategy.dp_shard_size",
    "dtype": "precision",
    "epochs": "train.epochs",
    "eval_steps": "train.eval_every",
    "fp32": "precision=fp32",
    "fsdp": "strategy=full_shard",
    "fsdp_sharding_strategy": "strategy",
    "fsdp_backward_prefetch": "prefetch",
    "fsdp_forward_prefetch": "prefetch",
    "enable_activation_checkpointing": "activation_checkpointing=full",
    "enable_ac": "activation_checkpointing=full",
    "grad_accum_steps": "accumulation.steps",
    "grad_clip": "optimizer.max_grad_norm",
    "gradient_checkpointing": "activation_checkpointing=full",
    "gradient_accumulation_iters": "accumulation.steps",
    "gradient_accumulation_steps": "accumulation.steps",
    "gradient_clip_val": "optimizer.max_grad_norm",
    "hsdp": "strategy=hybrid_shard",
    "learning_rate": "optimizer.lr",
    "local_batch_size": "train.micro_batch_size",
    "gpu": "cluster",
    "log_freq": "train.log_every",
    "logging_steps": "train.log_every",
    "lr": "optimizer.lr",
    "lr_scheduler_type": "lr_scheduler",
    "max_iters": "train.steps",
    "max_norm": "optimizer.max_grad_norm",
    "max_seq_length": "train.seq_len",
    "max_steps": "train.steps",
    "max_tokens": "train.tokens",
    "micro_batch_size": "train.micro_batch_size",
    "mixed_precision": "precision",
    "mixed_precision_param": "precision.param_dtype",
    "mixed_precision_reduce": "precision.reduce_dtype",
    "model_name_or_path": "model",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.hidden_size",
    "nnodes": "launch.nnodes",
    "nproc": "launch.nproc_per_node",
    "nproc_per_node": "launch.nproc_per_node",
    "num_epochs": "train.epochs",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.num_kv_heads",
    "num_attention_heads": "model.num_heads",
    "num_processes": "launch.nproc_per_node",
    "num_train_epochs": "train.epochs",
    "optim": "optimizer",
    "output_dir": "train.run_dir",
    "out_dir": "train.run_dir",
    "per_device_train_batch_size": "train.micro_batch_size",
    "reshard_after_forward": "strategy=full_shard or strategy=shard_grad_op",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "selective_ac": "activation_checkpointing=selective",
    "scheduler": "lr_scheduler",
    "seed": "train.seed",
    "seq_len": "train.seq_len",
    "sequence_len": "train.seq_len",
    "sequence_length": "train.seq_len",
    "sharding_strategy": "strategy",
    "steps": "train.steps",
    "torch_compile": "train.compile",
    "tokenizer_path": "data.tokenizer",
    "training_steps": "train.steps",
    "val_interval": "train.eval_every",
    "warmup_iters": "lr_scheduler.warmup_steps",
    "warmup_steps": "lr_scheduler.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "zero1": "strategy=shard_optimizer",
    "zero2": "strategy=shard_grad_op",
    "zero3": "strategy=full_shard",
    "FULL_SHARD": "full_shard",
    "HYBRID_SHARD": "hybrid_shard",
    "NO_SHARD": "no_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
}

_NOT_OFFERED = {
    "tensor_parallel": "tensor parallelism",
    "pipeline_parallel": "pipeline parallelism",
    "context_parallel": "context parallelism",
    "sequence_parallel": "sequence parallelism",
    "expert_parallel": "expert parallelism",
    "cpu_offload": "CPU offload",
    "offload": "CPU offload",
    "lora": "LoRA",
    "qlora": "LoRA",
    "fp8": "fp8",
    "float8": "fp8",
    "rl": "reinforcement learning",
    "grpo": "reinforcement learning",
}

_LATER = {
    "engine": "a choice of engines",
    "fit": "searching what fits",
    "plot": "drawing estimates",
    "require_fit": "an exit code for what does not fit",
    "simulate": "simulation",
    "wandb": "logging to W&B",
    "tensorboard": "logging to TensorBoard",
}


def hint(word: str, known: list[str]) -> str:
    """What to say after an unknown `word`: our name for it, or the nearest of `known`."""
    last = word.rsplit(".", 1)[-1]
    plain = last.removesuffix("_degree").removesuffix("_size")
    for each in (word, last):
        if each in _OURS:
            return f"; here it is {_OURS[each]}"
    for each in (last, plain):
        if each in _NOT_OFFERED:
            return f"; fsdpctl does not offer {_NOT_OFFERED[each]}"
        if each in _LATER:
            return f"; {_LATER[each]} is not in this version"
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == last]
    return f"; did you mean {same_end[0]}?" if same_end else nearest(word, known)
