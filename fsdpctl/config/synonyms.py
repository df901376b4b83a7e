"""Settings of other tools, and what to use in their place: hints for unknown keys.

The names are those of torchtitan, axolotl, accelerate, transformers, TRL, litgpt, torchtune,
LLaMA-Factory and DeepSpeed.
"""

import re
from collections.abc import Mapping

from fsdpctl.errors import nearest
from fsdpctl.plan.strategy import STRATEGIES_ELSEWHERE


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Invert a table of names by their common answer."""
    return {name: answer for answer, names in table.items() for name in names.split()}


SYNONYMS = _by_name(
    {
        "--resume PATH": "resume_from_checkpoint",
        "`fsdpctl estimate-memory --from FILE`": "compute_environment",
        "`fsdpctl estimate-memory`": "memory_estimation memory_estimation.enabled",
        "`fsdpctl train FILE.yaml`": "config_file",
        "accumulation.steps": (
            "grad_accum_steps gradient_accumulation_iters gradient_accumulation_steps"
        ),
        "activation_checkpointing": (
            "ac_mode activation_checkpoint activation_checkpoint.mode activation_checkpointing.mode"
        ),
        "activation_checkpointing=full": (
            "enable_activation_checkpointing enable_ac gradient_checkpointing"
        ),
        "activation_checkpointing=selective": "selective_ac selective_ac_option",
        "activation_checkpointing.offload=true": (
            "activation_checkpointing_offload activation_offload activation_offloading "
            "enable_activation_offloading"
        ),
        "checkpoint.every": (
            "checkpoint.enable checkpoint.enable_checkpoint checkpoint.interval "
            "checkpoint_interval save_steps saves_per_epoch"
        ),
        "checkpoint.keep_last": "keep_latest_k save_total_limit",
        "checkpoint.mode": "async_mode",
        "checkpoint.remote": "remote_save_folder remote_sync",
        "cluster": "gpu",
        "cluster.memory": "gpu_memory",
        "data": "dataset",
        "data.date": "date_string",
        "data.packing": "eval_sample_packing neat_packing packed packing sample_packing",
        "data.packing=true": "group_by_length",
        "data.packing=true and train.seq_len": "packed_sequence_size",
        "data.path": "data_path dataset_path",
        "data.template": "chat_template chat_template_path template",
        "data.tokenizer": "tokenizer_path",
        "data.too_long": "excess_length_strategy",
        "data.train_on": "roles_to_train",
        "data.train_on=all": "train_on_input train_on_inputs train_on_prompt",
        "data.train_on=assistant": (
            "assistant_only_loss completion_only_loss train_on_responses_only"
        ),
        "data.train_on=last": "last_response_only mask_history",
        "data.val_fraction": "val_set_size",
        "data.val_path": "eval_dataset validation_file",
        "data=chat and data.path": "train_file",
        "data=text or data=chat, and data.path=FILES": "datasets",
        "full_shard": "FULL_SHARD",
        "hybrid_shard": "HYBRID_SHARD",
        "launch.allocator": "expandable_segments",
        "launch.device=cpu": "cpu use_cpu",
        "launch.nnodes": "nnodes num_machines num_nodes",
        "launch.nproc_per_node": "devices nproc nproc_per_node num_processes",
        "launch.nproc_per_node and launch.nnodes": "num_gpus world_size",
        "launch.time_limit, in seconds": "max_time",
        "log.tensorboard=true": "enable_tensorboard tensorboard",
        "log.wandb=true": "enable_wandb use_wandb wandb",
        "log.wandb=true or log.tensorboard=true": "logger_name report_to",
        "log.wandb_project": "wandb_project",
        "lr_scheduler; `fsdpctl list lr_scheduler` shows its options": (
            "lr_scheduler_type scheduler"
        ),
        "lr_scheduler.warmup_ratio": "warmup_ratio",
        "lr_scheduler.warmup_steps": "warmup_iters warmup_steps",
        "model.attention": "attn_implementation",
        "model.attention=flash": "flash_attention",
        "model.hidden_size": "n_embd",
        "data.new_tokens": "add_special_tokens add_tokens new_special_tokens",
        "model.lora.alpha": "lora_alpha",
        "model.lora.also": "additional_target lora_modules_to_save modules_to_save",
        "model.lora.dropout": "lora_dropout",
        "model.lora.path": "adapter_name_or_path lora_model_dir",
        "model.lora.rank": "lora_r lora_rank",
        "model.lora.rank=16": "lora peft peft_config use_peft",
        "model.lora.rank=16 and model.base_dtype=int8": "load_in_8bit",
        "model.lora.rank=16 and model.base_dtype=nf4": (
            "bnb_4bit_quant_type load_in_4bit qlora use_qlora"
        ),
        "model.lora.rank=16, with model.base_dtype=nf4 for QLoRA, or model.lora.path": "adapter",
        "model.lora.rank=16, or model.trainable=REGEX": "finetuning_type",
        "model.lora.rslora=true": "use_rslora peft_use_rslora",
        "model.lora.targets": "lora_target lora_target_modules target_modules",
        "model.lora.targets=all_linear": "lora_target_linear",
        "model.overrides.KEY, with a key of config.json": (
            "attention_bias first_sliding_layer mlp_bias model_overrides norm_eps rms_norm_eps "
            "layer_norm_epsilon rope_high_freq_factor rope_low_freq_factor sliding_window"
        ),
        "model.overrides.hidden_act": "activation",
        "model.overrides.initializer_range": "init_std",
        "model.overrides.model_type=qwen3": "architecture qk_norm",
        "model.overrides.rope_scaling.factor": "rope_factor",
        "model.overrides.rope_scaling.original_max_position_embeddings": "rope_original_len",
        "model.overrides.rope_scaling.rope_type": "rope_scaling",
        "model.overrides.rope_theta": "rope_theta",
        "model.overrides.tie_word_embeddings": "tie_embeddings",
        "model.num_heads": "n_head num_attention_heads",
        "model.num_kv_heads": "num_key_value_heads",
        "model.num_layers": "n_layer num_hidden_layers",
        "model.path": "hf_assets_path initial_load_path",
        "model.trainable=REGEX": "trainable_layers unfrozen_parameters",
        "model.trainable=REGEX, which selects the parameters that aren't frozen": (
            "freeze freeze_layers"
        ),
        "model; `fsdpctl list model` shows its options": "flavor model.name model_name",
        "model=hf and model.path": (
            "model_name_or_path pretrained_model_name_or_path weights base_model initial_load_in_hf"
        ),
        "no_shard": "NO_SHARD",
        "optimizer": "optim",
        "optimizer; `fsdpctl list optimizer` shows its options": "optimizer.name",
        "optimizer.state_dtype=int8": (
            "adam8bit adamw8bit adamw_8bit adamw_bnb_8bit adamw_torch_8bit ao_adamw_8bit "
            "exp_avg_dtype optim_8bit paged_adamw_8bit PagedAdamW8bit"
        ),
        "optimizer.beta1": "adam_beta1 adam_beta_1",
        "optimizer.beta2": "adam_beta2",
        "optimizer.eps": "adam_epsilon",
        "optimizer.lr": "learning_rate lr",
        "optimizer.max_grad_norm": (
            "clip_grad_norm grad_clip gradient_clip_val gradient_clipping max_norm"
        ),
        "optimizer.weight_decay": "weight_decay",
        "precision": "dtype mixed_precision",
        "precision.param_dtype": "mixed_precision_param",
        "precision.reduce_dtype": "mixed_precision_reduce",
        "precision=bf16": "bf16",
        "precision=bf16_true": "bfloat16",
        "precision=fp32": "fp32",
        "prefetch": "fsdp_backward_prefetch fsdp_forward_prefetch",
        "prefetch=backward": "backward_prefetch",
        "shard_grad_op": "SHARD_GRAD_OP",
        "strategy": "fsdp_sharding_strategy sharding_strategy fsdp_config distributed_type",
        "strategy.dp_shard_size": "data_parallel_shard_degree fsdp_size",
        "strategy.dp_shard_size, the ranks of a replica": (
            "dp_replicate data_parallel_replicate_degree dp_replicate_size"
        ),
        "strategy; `fsdpctl list strategy` shows its options": "deepspeed deepspeed_config",
        "strategy=full_shard": "optim_grads_params",
        "strategy=full_shard, or strategy=shard_grad_op for false": (
            "reshard_after_forward fsdp_reshard_after_forward"
        ),
        "strategy=hybrid_shard_optimizer and strategy.dp_shard_size": "zero_hpz_partition_size",
        "strategy=zero1, zero2 or zero3": "zero_stage",
        "strategy.offload=all": "cpu_offload fsdp_offload_params offload offload_policy",
        "strategy.offload=params": "offload_param offload_params param_offload",
        "strategy.offload=states,gradients": (
            "offload_optimizer optim_cpu_offload optimizer_cpu_offload optimizer.offload "
            "optimizer_offload"
        ),
        "train.compile": "compile torch_compile compile.enable",
        "train.epochs": "epochs num_epochs num_train_epochs",
        "train.eval_every": (
            "eval_steps val_interval evals_per_epoch eval_strategy validation.enable "
            "validation.freq"
        ),
        "train.global_batch_size": "batch_size",
        "train.global_batch_tokens": "num_tokens_per_train_step",
        "train.log_every": "log_freq logging_steps",
        "train.micro_batch_size": (
            "batch_size_per_device local_batch_size micro_batch_size per_device_train_batch_size"
        ),
        "train.profile": "enable_profiling",
        "train.context_parallel": (
            "context_parallel context_parallel_degree context_parallel_size cp cp_degree cp_size "
            "sequence_parallel_degree sequence_parallel_size sp_size ulysses_sequence_parallel_size"
        ),
        "train.mlp_chunk_tokens=auto": "tiled_mlp",
        "train.run_dir": "run output_dir out_dir checkpoint.folder dump_folder",
        "train.seed": "seed",
        "train.seq_len": (
            "context_length max_seq_length seq_len sequence_len sequence_length block_size "
            "cutoff_len max_context_length max_length sample_packing_seq_len"
        ),
        "train.steps": "max_iters max_steps steps training_steps",
        "train.tokens": "max_tokens",
    }
) | {name: f"strategy={ours}" for name, ours in STRATEGIES_ELSEWHERE.items()}
NOT_NEEDED = _by_name(
    {
        "a message is trained on with the token that ends it": "train_on_eos",
        "AdamW steps in one kernel": "foreach optimizer.fused",
        "checkpoints can be read on any number of ranks": "fsdp_state_dict_type",
        "documents are concatenated or packed, without padding": "pad_to_sequence_len",
        "data needs no worker processes": "dataloader_num_workers num_workers",
        "fsdpctl has its own engine": "fsdp_version",
        "launch.timeout limits all communication": "comm",
        "one process per CPU core, at most 8, tokenizes chats": "dataset_num_proc",
        "padding is never a target, and has no token": "pad_token",
        "repeated blocks are detected": "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap",
        "the control token that ends a message is detected": "eot_tokens",
        "the directory's config.json determines it": "model_type",
        "Python's garbage collector keeps its defaults": "gc_freq gc_steps",
        "the directory's tokenizer is used": "tokenizer_type",
        "the first line determines the format": "conversation_column field_messages",
        "tokens are cached in XDG_CACHE_HOME": "dataset_prepared_path",
        "validation uses train.micro_batch_size": "eval_batch_size per_device_eval_batch_size",
    }
)
NOT_SUPPORTED = _by_name(
    {
        "tensor parallelism": (
            "enable_async_tensor_parallel tensor_model_parallel tensor_parallel tp tp_size"
        ),
        "pipeline parallelism": "pipeline_model_parallel pipeline_parallel pp pp_size",
        "sequence parallelism": "sequence_parallel",
        "expert parallelism": "expert_parallel ep ep_size",
        "fp8": "fp8 float8",
        "4-bit optimizer states; set optimizer.state_dtype=int8": "ao_adamw_4bit adamw_torch_4bit",
        "third-party kernels; set train.loss_chunk_tokens to save the memory of logits": (
            "cut_cross_entropy liger use_liger_kernel"
        ),
        "fp16; set precision=bf16, which needs no loss scaling": "fp16",
        "uploads; `fsdpctl consolidate-checkpoint` writes a directory to upload": (
            "hub_model_id push_to_hub"
        ),
        "frozen weights that are quantized already": "gptq",
        "quantization-aware training": "qat",
        "commands; loop over RUN/checkpoints/latest, as docs/watching.md shows": (
            "after_save after_save_timeout"
        ),
        "DoRA; set model.lora.rank=16 for LoRA": "peft_use_dora",
        "optimizers other than AdamW, Muon and SGD": "adafactor adamw_4bit dion galore lion",
        "streamed data; `fsdpctl tokenize` writes a file that is memory-mapped": "streaming",
        "reinforcement learning": "rl grpo",
        "code of models, which it never executes": "trust_remote_code",
        "early stopping": "early_stopping_patience",
        "noise in embeddings": "neftune_noise_alpha",
        "plugins of other tools": "plugins",
        "ReLoRA; set model.lora.rank=16 for LoRA": "relora relora_steps",
        "TF32; set precision=bf16": "tf32",
    }
)
_ENDS = re.compile(r"_degree$|_size$|(?<=^liger)_.*")  # that no name in the tables needs


def hint(word: str, known: list[str]) -> str:
    """Return the advice that follows an unknown `word`, or the nearest of the `known` words."""
    lower = word.lower().replace("-", "_")
    return _advice(word) or _advice(lower) or _similar(word, known) or _similar(lower, known)


def _advice(word: str) -> str:
    last = word.rsplit(".", 1)[-1].removeprefix("parallelism_config_")
    names, section = (word, last, _ENDS.sub("", last)), word.partition(".")[0]
    for each in names:
        if each in SYNONYMS:
            return f"; use {SYNONYMS[each]}"
    for each in (*names, section):
        if each in NOT_NEEDED:
            return f"; not needed: {NOT_NEEDED[each]}"
        if each in NOT_SUPPORTED:
            return f"; fsdpctl does not support {NOT_SUPPORTED[each]}"
    return ""


def _similar(word: str, known: list[str]) -> str:
    last = word.rsplit(".", 1)[-1]
    same_end = [name for name in known if name.rsplit(".", 1)[-1] == last]
    if same_end:
        return f"; did you mean {same_end[0]}?"
    section = [name for name in known if name.startswith(f"{word.partition('.')[0]}.")]
    return (nearest(word, section) if "." in word else "") or nearest(word, known)
