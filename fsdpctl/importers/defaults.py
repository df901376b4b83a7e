"""Defaults of other tools, and those of their keys that change the training.

`convert` writes a setting for each key of these tables, with the value of the file or the default,
even if fsdpctl's own is the same today. They are those of axolotl 0.18 to 0.21 (utils/schemas,
core/builders/base.py, utils/data/utils.py), TRL 1.16 (trainer/sft_config.py, base_config.py and
model_config.py), and transformers 5.23 and 5.24 (training_args.py), read on 2026-11-29.
"""

from collections.abc import Mapping

# By key: the value that stands for a missing key, empty if the tool requires it.
Defaults = Mapping[str, str]
HUGGING_FACE: Defaults = {
    "weight_decay": "0", "adam_beta1": "0.9", "adam_beta2": "0.999", "adam_epsilon": "1e-8",
    "max_grad_norm": "1.0", "seed": "42",
}  # fmt: skip
AXOLOTL: Defaults = {
    **HUGGING_FACE,
    "sample_packing": "false", "train_on_inputs": "false", "val_set_size": "0",
    "excess_length_strategy": "drop", "learning_rate": "", "lr_scheduler": "cosine",
    "warmup_ratio": "0.03",  # of the steps, at most 100
    "num_epochs": "1", "lora_alpha": "", "lora_dropout": "0",
}  # fmt: skip
TRL: Defaults = {
    **HUGGING_FACE,
    "eval_strategy": "no", "lr_scheduler_type": "linear", "warmup_steps": "0",
    "num_train_epochs": "3", "packing": "false", "assistant_only_loss": "false",
    "truncation_mode": "keep_start", "learning_rate": "2e-5", "lora_dropout": "0.05",
    "logging_steps": "10",
}  # fmt: skip
# Patterns of keys that change the training and have no counterpart, unless a row names them.
_CHANGES_HUGGING_FACE = (
    "average_tokens_across_devices", "data_seed", "dataloader_drop_last", "group_by_length",
    "label_*", "lr_scheduler_kwargs*", "neftune*", "optim_args*", "optim_target_modules*",
    "auto_find_batch_size", "accelerator_config.*", "resume_from_checkpoint", "fp16", "float16",
    "early_stopping_*", "ignore_data_skip", "remove_unused_columns",
)  # fmt: skip
CHANGES_AXOLOTL = (
    *_CHANGES_HUGGING_FACE, "adam_beta3", "adam_epsilon2", "added_tokens*", "balance_labels",
    "batch_flattening",
    "bnb_config_kwargs*", "chat_template*", "cosine_*", "curriculum_sampling", "dataset_exact_*",
    "dataset_shard_*", "default_system_message", "dion_*", "eaft_*",
    "embedding*", "embeddings_*", "eot_tokens*", "eval_sample_packing", "model_config.*",
    "fix_untrained_tokens", "fp32_norm*", "freeze_*",
    "jagged_*", "lisa_*", "llmcompressor*", "lora_alpha_pattern*", "lora_rank_pattern*",
    "loraplus_*", "loss_watchdog_*", "lr_groups*", "lr_quadratic_warmup", "max_prompt_len",
    "mean_resizing_embeddings", "min_sample_len", "multipack_real_batches", "noisy_embedding_alpha",
    "num_labels", "peft.*", "peft_init*", "peft_layer*", "peft_trainable*", "pose_*", "pretrain*",
    "pretraining_sample_*", "processor_*", "qgalore_*", "reinit_weights", "relora*",
    "resize_token_*", "role_boundaries*", "roles_to_train*", "sample_packing_sequentially",
    "scaling_softmax*", "shrink_embeddings", "shuffle_*", "skip_prepare_dataset",
    "special_tokens.[!p]*", "streaming*", "tokenizer_config", "tokenizer_legacy",
    "tokenizer_use_mistral*", "tokens.*", "train_on_e*", "trainer_cls", "unfrozen_parameters*",
    "use_eaft", "use_pose", "liger_use_token_scaling",
)  # fmt: skip
CHANGES_TRL = (
    *_CHANGES_HUGGING_FACE, "chat_template*", "completion_only_loss", "dataset_config",
    "dataset_kwargs*", "dataset_streaming", "dataset_text_field", "dataset_train_split",
    "eos_token", "eval_packing", "lora_target_parameters*", "loss_type",
    "model_init_kwargs*", "packing_strategy", "padding_free", "router_aux_loss_coef",
    "shuffle_dataset", "streaming", "test_split_size", "train_sampling_strategy", "use_rslora",
)  # fmt: skip
# Keys of DeepSpeed's files that change the training.
OF_DEEPSPEED = (
    "optimizer.params.adam_w_mode", "optimizer.params.bias_correction",
    "*curriculum*", "progressive_layer_drop.*", "sparse_attention.*", "communication_data_type",
    "fp16.enabled", "data_efficiency.*", "prescale_gradients", "gradient_predivide_factor",
    "dataloader_drop_last",
)  # fmt: skip
# Values of such keys that change nothing here; empty: none. Of others, those that turn a key off.
HARMLESS = {
    "router_aux_loss_coef": "", "eval_sample_packing": "true",
    "chat_template_kwargs.*": "",
    "dataset_train_split": "train", "dataset_text_field": "text", "train_on_eos": "turn",
    "train_on_eot": "turn", "chat_template": "tokenizer_default", "packing_strategy": "bfd",
    "train_sampling_strategy": "random", "average_tokens_across_devices": "true",
    "remove_unused_columns": "true", "shuffle_merged_datasets": "true",
    "roles_to_train": "assistant", "loss_type": "nll chunked_nll",
}  # fmt: skip
