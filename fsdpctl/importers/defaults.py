"""Defaults of other tools, and those of their keys that change the training.

`convert` writes a setting for each key of these tables, with the value of the file or the default,
even if fsdpctl's own is the same today. The sources are files of axolotl 0.18.0 (067b021, in
src/axolotl), TRL 1.16 (in trl), and transformers 5.23.
"""

from collections.abc import Mapping

# By key: the value that stands for a missing key, empty if the tool requires it, and its source.
Defaults = Mapping[str, tuple[str, str]]
_HUGGING_FACE: Defaults = {
    "weight_decay": ("0", "transformers: training_args.py:822"),
    "adam_beta1": ("0.9", "transformers: training_args.py:828"),
    "adam_beta2": ("0.999", "transformers: training_args.py:834"),
    "adam_epsilon": ("1e-8", "transformers: training_args.py:840"),
    "max_grad_norm": ("1.0", "transformers: training_args.py:866"),
    "seed": ("42", "transformers: training_args.py:1293"),
}
AXOLOTL: Defaults = {
    **_HUGGING_FACE,
    "sample_packing": ("false", "utils/schemas/config.py:688"),
    "train_on_inputs": ("false", "utils/schemas/training.py:103"),
    "val_set_size": ("0", "utils/schemas/config.py:1084"),
    "excess_length_strategy": ("drop", "utils/data/utils.py:334"),
    "learning_rate": ("", "utils/schemas/training.py:116"),
    "lr_scheduler": ("cosine", "utils/schemas/training.py:144"),
    "warmup_ratio": ("0.03", "core/builders/base.py:248"),  # of the steps, at most 100
    "num_epochs": ("1", "utils/schemas/training.py:267"),
    "lora_alpha": ("", "utils/schemas/peft.py:54"),
    "lora_dropout": ("0", "utils/schemas/peft.py:80"),
}
TRL: Defaults = {
    **_HUGGING_FACE,
    "packing": ("false", "trainer/sft_config.py:222"),
    "assistant_only_loss": ("false", "trainer/sft_config.py:273"),
    "eval_strategy": ("no", "transformers: training_args.py:1106"),
    "truncation_mode": ("keep_start", "trainer/sft_config.py:210"),
    "learning_rate": ("2e-5", "trainer/sft_config.py:140"),
    "lr_scheduler_type": ("linear", "transformers: training_args.py:788"),
    "warmup_steps": ("0", "transformers: training_args.py:798"),
    "num_train_epochs": ("3", "transformers: training_args.py:778"),
    "lora_dropout": ("0.05", "trainer/model_config.py:115"),
    "logging_steps": ("10", "trainer/base_config.py:55"),
}
# Patterns of keys that change the training and have no counterpart, unless a row names them.
_CHANGES_HUGGING_FACE = (
    "average_tokens_across_devices", "data_seed", "dataloader_drop_last", "group_by_length",
    "label_*", "lr_scheduler_kwargs*", "neftune*", "optim_args*", "optim_target_modules*",
    "auto_find_batch_size", "accelerator_config.*", "resume_from_checkpoint", "fp16", "float16",
    "early_stopping_*", "ignore_data_skip", "remove_unused_columns",
)  # fmt: skip
CHANGES_AXOLOTL = (
    *_CHANGES_HUGGING_FACE, "adam_beta3", "adam_epsilon2", "added_tokens*", "batch_flattening",
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
