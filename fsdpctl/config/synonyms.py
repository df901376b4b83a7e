"""Names of settings in other tools, and fsdpctl's counterparts: hints for unknown keys.

The tools are torchtitan, axolotl, accelerate, transformers, TRL, litgpt, torchtune, LLaMA-Factory
and DeepSpeed.
"""

import re

from fsdpctl.errors import did_you_mean
from fsdpctl.plan.strategy import STRATEGY_ALIASES


def _by_name(table: str) -> dict[str, str]:
    """Return the answer for each name in rows `answer | names`; an indented line continues one."""
    rows = (row.split(" | ") for row in table.replace("\n  ", " ").strip().splitlines())
    return {name: answer for answer, names in rows for name in names.split()}


SYNONYMS = _by_name("""
--resume PATH | checkpoint.load_step checkpoint.restore_from resume_from_checkpoint
accumulation.steps | grad_acc_steps grad_accum_steps gradient_accumulation_iters
  gradient_accumulation_steps
accumulation=last, or accumulation=every for false | defer_fsdp_grad_sync
activation_checkpointing | ac_mode activation_checkpoint activation_checkpoint.mode
  activation_checkpointing.mode
activation_checkpointing.offload=true | activation_checkpointing_offload activation_offload
  activation_offloading enable_activation_offloading
activation_checkpointing=auto | activation_checkpoint.memory_budget activation_memory_budget
  memory_budget
activation_checkpointing.blocks=full:N | recompute_num_layers
activation_checkpointing=full | enable_activation_checkpointing enable_ac gradient_checkpointing
activation_checkpointing=selective | selective_ac selective_ac_option
checkpoint.every | checkpoint.enable checkpoint.enable_checkpoint checkpoint.enabled
  checkpoint.interval checkpoint_interval ckpt_every_steps save_interval save_steps save_strategy
  saves_per_epoch
checkpoint.keep_best=true | load_best_model_at_end save_best save_best_only
checkpoint.keep_best=true, by the validation loss | greater_is_better metric_for_best_model
checkpoint.keep_every | save_retain_interval
checkpoint.keep_last | keep_latest_k save_total_limit
checkpoint.mode | async_mode async_save
checkpoint.remote | remote_save_folder remote_sync
cluster | gpu
cluster.memory | gpu_memory
data | dataset dataset._target_
data.date | date_string
data.new_tokens | add_special_tokens add_tokens additional_special_tokens new_special_tokens
data.packing | eval_packing eval_sample_packing neat_packing packed packing sample_packing
data.packing=true | group_by_length
data.packing=true and train.seq_len | packed_sequence_size
data.path | data_path dataset_name dataset_path path_or_dataset path_or_dataset_id
data.path=hf://ORG/NAME:CONFIG/SPLIT | dataset.split dataset_config dataset_train_split
data.prompt | prompt_style
data.template | chat_template chat_template_jinja chat_template_path template
data.tokenizer | tokenizer_name tokenizer_name_or_path tokenizer_path
data.too_long | excess_length_strategy truncation truncation_mode
data.train_on | roles_to_train
data.train_on=all | train_on_input train_on_inputs train_on_prompt
data.train_on=assistant | answer_only_loss_mask assistant_only_loss completion_only_loss
  train_on_responses_only
data.train_on=last | last_response_only mask_history
data.val_fraction | test_size test_split_size val_set_size val_size validation_split
data.val_path | dataset_test_split eval_dataset test_datasets validation.dataset
  validation.dataset_path validation_dataset validation_dataset.dataset_name
  validation_dataset.path_or_dataset validation_dataset.path_or_dataset_id validation_file
data=chat and data.path | train_file
data=text or data=chat, and data.path=FILES | datasets
`fsdpctl estimate-memory` | memory_estimation memory_estimation.enabled
`fsdpctl estimate-memory --from FILE` | compute_environment
`fsdpctl train FILE.yaml` | config_file
full_shard | FULL_SHARD
hybrid_shard | HYBRID_SHARD
launch.allocator | expandable_segments
launch.device=cpu | cpu use_cpu
launch.interface | gloo_socket_ifname nccl_socket_ifname
launch.max_restarts | max_restarts
launch.nnodes | nnodes num_machines num_nodes
launch.nnodes_min | min_nnodes min_nodes
launch.node_rank | machine_rank node_rank
launch.nproc_per_node | devices nproc nproc_per_node num_processes
launch.nproc_per_node and launch.nnodes | num_gpus world_size
launch.rdzv_endpoint=HOST:PORT | main_process_ip main_process_port master_addr master_port
  rdzv_endpoint
launch.time_limit, in seconds | max_time
launch.timeout, in seconds | ddp_timeout timeout_minutes
log.memory_snapshot | enable_memory_snapshot
log.project | mlflow.experiment_name mlflow_experiment_name trackio_project_name wandb.project
  wandb_project
log.trackers | logger_name report_to trackers
log.trackers=mlflow | use_mlflow mlflow
log.trackers=tensorboard | enable_tensorboard save_tb_folder tensorboard
log.trackers=trackio | use_trackio trackio
log.trackers=wandb | enable_wandb use_wandb wandb wandb.enable
lr_scheduler.decay_ratio, a share of the steps | num_decay_steps wsd_decay_steps
lr_scheduler.decay_type | lr_wsd_decay_style
lr_scheduler.min_lr_ratio | cosine_min_lr_ratio min_lr_factor min_lr_rate
lr_scheduler.min_lr_ratio, a share of optimizer.lr | eta_min min_lr
lr_scheduler.start_lr_ratio, a share of optimizer.lr | init_lr lr_warmup_init
lr_scheduler.warmup_ratio | lr_warmup_fraction warmup_ratio
lr_scheduler.warmup_steps | lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_iters
  warmup_steps
lr_scheduler; `fsdpctl list lr_scheduler` shows its options | lr_decay_style lr_scheduler_type
  scheduler
model.attention | attn_implementation
model.attention=flash | flash_attention
model.head_dim | head_size kv_channels
model.hidden_size | n_embd
model.init=random | from_scratch reinit_weights
model.intermediate_size | ffn_dim ffn_hidden_size
model.lora.alpha | lora_alpha
model.lora.also | additional_target lora_modules_to_save modules_to_save
model.lora.dropout | lora_dropout
model.lora.path | adapter_name_or_path lora_model_dir
model.lora.rank | lora_r lora_rank peft.dim
model.lora.rank=16 | lora peft peft._target_ peft_config use_peft
model.lora.rank=16 and model.base_dtype=int8 | load_in_8bit
model.lora.rank=16 and model.base_dtype=nf4 | bnb_4bit_quant_type load_in_4bit qlora use_qlora
model.lora.rank=16, or model.trainable=REGEX | finetuning_type
model.lora.rank=16, with model.base_dtype=nf4 for QLoRA, or model.lora.path | adapter
model.lora.rslora=true | use_rslora peft_use_rslora
model.lora.targets | exclude_modules lora_target lora_target_modules target_modules
model.lora.targets=all_linear | lora_target_linear match_all_linear
model.max_seq_len | max_position_embeddings
model.num_heads | n_head num_attention_heads
model.num_kv_heads | num_key_value_heads
model.num_layers | n_layer num_hidden_layers
model.overrides.hidden_act | activation
model.overrides.initializer_range | init_std
model.overrides.KEY, with a key of config.json | attention_bias first_sliding_layer mlp_bias
  model_overrides norm_eps rms_norm_eps layer_norm_epsilon rope_high_freq_factor
  rope_low_freq_factor sliding_window
model.overrides.model_type=qwen3 | architecture qk_norm
model.overrides.rope_scaling.factor | rope_factor
model.overrides.rope_scaling.original_max_position_embeddings | rope_original_len
model.overrides.rope_scaling.rope_type | rope_scaling
model.overrides.rope_theta | rope_theta
model.overrides.tie_word_embeddings | tie_embeddings
model.path | hf_assets_path initial_load_path
model.quantize_experts | quantize_moe_experts
model.router_aux_loss | moe_aux_loss_coeff router_aux_loss_coef
model.trainable=REGEX | trainable_layers unfrozen_parameters
model.trainable=REGEX, which selects the parameters that aren't frozen | freeze freeze_layers
model.vocab_size | padded_vocab_size
model; `fsdpctl list model` shows its options | flavor model._target_ model.name model_name
model=hf and model.path | model_name_or_path pretrained_model_name_or_path weights base_model
  initial_load_in_hf
no_shard | NO_SHARD
optimizer | optim
optimizer.beta1 | adam_beta1 adam_beta_1
optimizer.beta1 and optimizer.beta2 | betas
optimizer.beta2 | adam_beta2
optimizer.eps | adam_epsilon
optimizer.lr | learning_rate lr max_lr
optimizer.max_grad_norm | clip_grad_norm grad_clip gradient_clip_val gradient_clipping max_norm
optimizer.momentum | muon_momentum
optimizer.nesterov | muon_nesterov muon_use_nesterov
optimizer.ns_steps | muon_num_ns_steps
optimizer.state_dtype=int8 | adam8bit adamw8bit adamw_8bit adamw_bnb_8bit adamw_torch_8bit
  ao_adamw_8bit exp_avg_dtype optim_8bit paged_adamw_8bit PagedAdamW8bit
optimizer.weight_decay | weight_decay
optimizer; `fsdpctl list optimizer` shows its options | optimizer._target_ optimizer.name
precision | dtype mixed_precision torch_dtype
precision.master_dtype | main_params_dtype
precision.param_dtype | mixed_precision_param
precision.reduce_dtype | mixed_precision_reduce
precision=bf16 | bf16
precision=bf16_true | bfloat16
precision=fp32 | fp32
precision=tf32, without bf16 | tf32
prefetch | fsdp_backward_prefetch fsdp_forward_prefetch
prefetch=backward | backward_prefetch
shard_grad_op | SHARD_GRAD_OP
strategy | distributed._target_ distributed_type fsdp_config fsdp_sharding_strategy
  sharding_strategy
strategy.dp_shard_size | data_parallel_shard_degree fsdp_size
strategy.dp_shard_size, the ranks of a replica | dp_replicate data_parallel_replicate_degree
  dp_replicate_size
strategy.offload=all | cpu_offload enable_cpu_offload fsdp_offload_params offload offload_policy
strategy.offload=params | offload_param offload_params param_offload
strategy.offload=states,gradients | offload_optimizer optim_cpu_offload optimizer_cpu_offload
  optimizer.offload optimizer_offload
strategy; `fsdpctl list strategy` shows its options | deepspeed deepspeed_config
strategy=full_shard | optim_grads_params
strategy=full_shard, or strategy=shard_grad_op for false | reshard_after_forward
  fsdp_reshard_after_forward
strategy=hybrid_shard_optimizer and strategy.dp_shard_size | zero_hpz_partition_size
strategy=zero1, zero2 or zero3 | zero_stage
train.compile | compile compile.components compile.enable compile.enabled enable_compile
  torch_compile
train.context_parallel | context_parallel context_parallel_degree context_parallel_size cp
  cp_degree cp_size sequence_parallel_degree sequence_parallel_size sp_size
  ulysses_sequence_parallel_size
train.deterministic | full_determinism use_deterministic_algorithms
train.epochs | epochs num_epochs num_train_epochs
train.eval_batches | eval.max_iters eval_iters limit_val_batches validation.steps
train.eval_every | eval.interval eval_freq eval_interval eval_steps eval_strategy evals_per_epoch
  evaluation_strategy val_check_interval val_every_steps val_interval validation.enable
  validation.freq
train.final_eval_batches | eval.final_validation final_validation
train.global_batch_size | batch_size
train.global_batch_tokens | num_tokens_per_train_step
train.log_every | log_freq logging_steps
train.loss_chunk_tokens | chunked_cross_entropy chunked_cross_entropy_num_chunks loss_fn
  loss_fn._target_ num_output_chunks
train.max_skips | loss_watchdog_patience
train.micro_batch_size | batch_size_per_device dataloader.batch_size local_batch_size
  micro_batch_size per_device_train_batch_size
train.mlp_chunk_tokens=auto | tiled_mlp
train.on_nonfinite | check_for_nan_in_loss_and_grad
train.patience | early_stopping early_stopping_patience
train.profile | enable_profiling profile_freq profiler_steps save_traces_folder
train.run_dir | checkpoint.folder checkpoint_dir dump_folder logging_dir out_dir output_dir run
  run_name wandb.name wandb_name
train.sample_tokens | max_new_tokens
train.seed | seed
train.seq_len | context_length max_seq_length seq_len seq_length sequence_len sequence_length
  block_size cutoff_len max_context_length max_length sample_packing_seq_len
train.spike_factor | check_for_spiky_loss loss_watchdog_threshold
train.steps | max_iters max_steps steps training_steps
train.tokens | max_tokens
""") | {name: f"strategy={ours}" for name, ours in STRATEGY_ALIASES.items()}
NOT_NEEDED = _by_name("""
`auto` selects by prediction; `fsdpctl compare` measures | auto auto.probe
`fsdpctl compare` runs each variant once; set its length with --steps | rounds
a message is trained on with the token that ends it | train_on_eos
AdamW steps in one kernel | foreach optimizer.fused optimizer.implementation
checkpoints can be read on any number of ranks | fsdp_state_dict_type
documents are concatenated or packed, without padding | pad_to_sequence_len
data needs no worker processes | dataloader_num_workers num_workers
fsdpctl has its own engine | fsdp_version
launch.timeout limits all communication | comm
one process per CPU core, at most 8, tokenizes chats | dataset_num_proc
padding is never a target, and has no token | pad_token
repeated blocks are detected | fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap
the control token that ends a message is detected | eot_tokens
the directory's config.json determines it | model_type
all ranks collect garbage together, every 50 steps | gc_freq gc_steps
the directory's tokenizer is used | tokenizer_type
the first line determines the format | conversation_column dataset_text_field field_messages
  text_column text_field
tokens are cached in XDG_CACHE_HOME | dataset_prepared_path
validation uses train.micro_batch_size | eval_batch_size per_device_eval_batch_size
  validation.local_batch_size
`fsdpctl consolidate-checkpoint` writes a model directory | export_dtype last_save_in_hf
  last_save_model_only model_save_format save_consolidated save_only_model save_safetensors
schedules end with the run | lr_decay_iters lr_decay_steps
the device determines it | backend ddp_backend
train.seed determines the order of the data | data_seed shuffle shuffle_dataset
validation keeps no logits | eval_accumulation_steps
""")
NOT_SUPPORTED = _by_name("""
tensor parallelism | disable_loss_parallel enable_async_tensor_parallel enable_loss_parallel
  tensor_model_parallel tensor_parallel tp tp_size
pipeline parallelism | pipeline_model_parallel pipeline_parallel pipeline_parallel_microbatch_size
  pipeline_parallel_schedule pp pp_size
sequence parallelism | sequence_parallel
expert parallelism | expert_parallel ep ep_size
fp8 | enable_fsdp_float8_all_gather float8 fp8
4-bit optimizer states; set optimizer.state_dtype=int8 | ao_adamw_4bit adamw_torch_4bit
third-party kernels; set train.loss_chunk_tokens to save the memory of logits | cut_cross_entropy
  liger use_liger_kernel
fp16; set precision=bf16, which needs no loss scaling | fp16
uploads; `fsdpctl consolidate-checkpoint` writes a directory to upload | hub_model_id push_to_hub
frozen weights that are quantized already | gptq
quantization-aware training | qat
commands; loop over RUN/checkpoints/latest, as docs/watching.md shows | after_save
  after_save_timeout
DoRA; set model.lora.rank=16 for LoRA | peft_use_dora use_dora
optimizers other than AdamW, Muon and SGD | adafactor adamw_4bit dion galore lion
streamed data; `fsdpctl tokenize` writes a file that is memory-mapped | streaming
reinforcement learning | rl grpo
code of models, which it never executes | trust_remote_code
noise in embeddings | neftune_noise_alpha
plugins of other tools | plugins
ReLoRA; set model.lora.rank=16 for LoRA | relora relora_steps
label smoothing | label_smoothing label_smoothing_factor
trackers other than those of log.trackers | comet swanlab
losses other than cross-entropy | loss_type
thresholds of early stopping: any lower validation loss counts | early_stopping_threshold
""")
_IGNORED_SUFFIXES = re.compile(r"_degree$|_size$|(?<=^liger)_.*")  # in the last attempt


def hint(name: str, names: list[str]) -> str:
    """Return advice for an unknown name of a setting, else the most similar of `names`."""
    lower = name.lower().replace("-", "_")
    return _advice(name) or _advice(lower) or _similar(name, names) or _similar(lower, names)


def _advice(name: str) -> str:
    last = name.rsplit(".", 1)[-1].removeprefix("parallelism_config_")
    names, section = (name, last, _IGNORED_SUFFIXES.sub("", last)), name.partition(".")[0]
    for each in names:
        if each in SYNONYMS:
            return f"; use {SYNONYMS[each]}"
    for each in (*names, section):  # a section may be unneeded or unsupported as a whole
        if each in NOT_NEEDED:
            return f"; not needed: {NOT_NEEDED[each]}"
        if each in NOT_SUPPORTED:
            return f"; fsdpctl does not support {NOT_SUPPORTED[each]}"
    return ""


def _similar(name: str, names: list[str]) -> str:
    last = name.rsplit(".", 1)[-1]
    same_end = [each for each in names if each.rsplit(".", 1)[-1] == last]
    if same_end:
        return f"; did you mean {same_end[0]}?"
    section = [each for each in names if each.startswith(f"{name.partition('.')[0]}.")]
    return (did_you_mean(name, section) if "." in name else "") or did_you_mean(name, names)
