"""Every field of TRL 1.16's configurations: the option here that it is, or why it has no effect here, or what to do
instead. trl_configs.py reads it, and docs/coming-from.md's table is made of it.
"""

from __future__ import annotations

from typing import NamedTuple

TAKEN, READ, IDLE, REFUSED = "taken", "read", "no effect", "refused"


class Field(NamedTuple):
    """kind: TAKEN (option: the one here; note: how the meaning differs), READ (taken, but by trl_configs.py, in other
    words than the option's or with other fields), IDLE (note: why no value has an effect), or REFUSED (note: what to
    do instead of a value that is not the default)."""

    default: object
    kind: str
    note: str = ""
    option: str = ""


def _taken(default: object, option: str, note: str = "") -> Field:
    return Field(default, TAKEN, note, option)


def _read(default: object, option: str, note: str = "") -> Field:
    return Field(default, READ, note, option)


def _idle(note: str, names: str) -> dict[str, Field]:
    return {name: Field(None, IDLE, note) for name in names.split()}


def _refused(note: str, **defaults: object) -> dict[str, Field]:
    return {name: Field(default, REFUSED, note) for name, default in defaults.items()}


_RATE = "train.learning_rate"
# transformers.TrainingArguments, with TRL's defaults. {} stands for the stage's own name of the option.
_COMMON = {
    "output_dir": _taken(None, "output_dir", "the model is in its folder model/"),
    "per_device_train_batch_size": _taken(8, "train.per_device_train_batch_size"),
    "gradient_accumulation_steps": _taken(1, "train.gradient_accumulation_steps", "micro-batches are chosen by memory; "
                                          "it multiplies the rows of a step"),
    "learning_rate": _taken(1e-6, _RATE),
    "weight_decay": _taken(0.0, "train.weight_decay"),
    "adam_beta1": _taken(0.9, "train.adam_beta1"), "adam_beta2": _taken(0.999, "train.adam_beta2"),
    "adam_epsilon": _taken(1e-8, "train.adam_epsilon"),
    "max_grad_norm": _taken(1.0, "train.max_grad_norm"),
    "num_train_epochs": _taken(3.0, "train.num_train_epochs"),
    "max_steps": _read(-1, "train.max_steps", "counts updates there; one rollout here may make several"),
    "lr_scheduler_type": _read("linear", "train.lr_scheduler_type", "linear, cosine, constant (without warm-up), "
                                "constant_with_warmup"),
    "warmup_steps": _read(0, "train.warmup_ratio", "as a share of the steps; the first update has a rate above 0"),
    "optim": _read("adamw_torch_fused", "train.optim", "AdamW, AdamW of 8 bits, SGD"),
    "per_device_eval_batch_size": _taken(8, "train.per_device_eval_batch_size"),
    "logging_steps": _read(10, "train.logging_steps", "metrics.jsonl has every step"),
    "eval_strategy": _read("no", "train.eval_steps", "no: held-out rows are evaluated at the end only"),
    "eval_steps": _read(None, "train.eval_steps"),
    "save_strategy": _read("steps", "train.save_steps", "a checkpoint is made every save_minutes and at the end, too"),
    "save_steps": _read(500, "train.save_steps"),
    "save_total_limit": _taken(None, "train.save_total_limit", "None: 2"),
    "load_best_model_at_end": _read(False, "train.save_best", "the exported model is the best checkpoint's"),
    "metric_for_best_model": _read(None, "train.save_best"),
    "seed": _taken(42, "seed"),
    "bf16": _read(None, "model.dtype", "bfloat16 weights with fp32 masters; False: fp32"),
    "fp16": _read(False, "model.dtype"),
    "gradient_checkpointing": _read(True, "model.gradient_checkpointing", "off here unless it is given"),
    "report_to": _read("none", "report_to"),
    "full_determinism": _taken(False, "train.deterministic"),
    "resume_from_checkpoint": _read(None, "resume", "auto: an unfinished run goes on by itself"),
    "push_to_hub": _read(False, "push_to_hub", "after training; the login is tried before it"),
    "hub_model_id": _read(None, "push_to_hub", "without it the name of output_dir"),
    "hub_private_repo": _read(None, "push_to_hub", "private unless False"),
    **_idle("the trainer decides",
            "do_train do_eval do_predict prediction_loss_only batch_eval_metrics eval_do_concat_batches "
            "eval_use_gather_object eval_accumulation_steps include_for_metrics include_num_input_tokens_seen "
            "remove_unused_columns label_names use_cache skip_memory_metrics debug "
            "restore_callback_states_from_checkpoint enable_jit_checkpoint"),
    **_idle("rows are read, batched and dealt to processes here",
            "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
            "dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context length_column_name "
            "ignore_data_skip data_seed average_tokens_across_devices"),
    **_idle("the first step, warnings and the time left are always shown",
            "logging_strategy logging_first_step logging_nan_inf_filter disable_tqdm log_level log_level_replica "
            "log_on_each_node"),
    "run_name": _taken(None, "run_name"),
    **_idle("a tracker's project is named by the stage",
            "project trackio_space_id trackio_bucket_id trackio_static_space_id"),
    **_idle("evaluations are made by eval_steps and after the last step", "eval_on_start eval_delay"),
    "greater_is_better": _read(None, "train.save_best", "losses, perplexities and KLs: smaller; all others: larger"),
    **_idle("kernels and micro-batches are chosen by the machine",
            "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config tf32 "
            "auto_find_batch_size torch_empty_cache_steps gradient_checkpointing_kwargs activation_checkpointing "
            "activation_checkpointing_kwargs bf16_full_eval fp16_full_eval"),
    **_idle("processes come from torchrun or accelerate launch and speak through one group",
            "local_rank ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_timeout "
            "ddp_static_graph save_on_each_node"),
    **_idle("of the hub, only the model, its tokenizer and its card are uploaded, after training",
            "hub_strategy hub_always_push hub_revision"),
    **_refused("log in by `hf auth login`, or set HF_TOKEN", hub_token=None),
    **_refused("set engine__zero_stage=1, 2 or 3 under torchrun, or engine__offload=['optimizer']", deepspeed=None,
               fsdp=None, fsdp_config=None, parallelism_config=None, accelerator_config=None),
    **_refused("a checkpoint holds all that exact resuming needs; leave it out", save_only_model=False),
    **_refused("leave it out; label_smoothing of DPOConfig is taken", label_smoothing_factor=0.0),
    **_refused("it is not offered; leave it out", neftune_noise_alpha=None, optim_args=None, optim_target_modules=None,
               lr_scheduler_kwargs=None),
    **_refused("rows come in an order drawn from the seed; leave it out", train_sampling_strategy="random"),
    "use_cpu": _read(False, "", "where there is a card: CUDA_VISIBLE_DEVICES= python script.py"),
}
_MODEL = {
    "model_init_kwargs": _read(None, "model.dtype", "dtype, attn_implementation, trust_remote_code, load_in_4bit; "
                                                     "others are refused"),
    "trust_remote_code": _taken(False, "model.trust_remote_code"),
    **_idle("padding has no effect", "pad_to_multiple_of"),
}
_EXPERTS = _idle("an expert model's own coefficient is used", "router_aux_loss_coef")
_CACHED = _idle("tokenized rows are cached", "dataset_num_proc")
_PAD = _idle("padding has no effect", "pad_token")
_FREE = _idle("padding has no effect", "padding_free")
_EOS = _refused("the tokenizer's own end is used; give a processing_class that has another", eos_token=None)
_LENGTH = {"max_length": _taken(1024, "data.max_length", "longer demonstrations lose their end, longer pairs are "
                                                         "dropped and counted"),
           "activation_offloading": _read(False, "engine.offload")}
_CUT = _refused("only the end of a row can be cut off", truncation_mode="keep_start")
_NO_DROPOUT = _idle("dropout is off where two forwards are compared", "disable_dropout")
_REFERENCE = {**_refused("the reference is the start; write roles__ref__model_name_or_path=FOLDER for another",
                         sync_ref_model=False), **_idle("sync_ref_model is off",
                                                        "ref_model_mixup_alpha ref_model_sync_steps")}
_PRECOMPUTED = _idle("the reference's log-probabilities are computed with each batch, by the same weights",
                     "precompute_ref_log_probs precompute_ref_batch_size")

SFT = _COMMON | _MODEL | _EXPERTS | _CACHED | _PAD | _FREE | _EOS | _LENGTH | _CUT | {
    "learning_rate": _taken(2e-5, _RATE),
    "chat_template_path": _taken(None, "data.chat_template"),
    "dataset_text_field": _read("text", "data.sources", "the column is renamed"),
    "packing": _taken(False, "data.packing", "within each batch of rows; theirs packs first, and counts packed rows"),
    "completion_only_loss": _read(None, "data.train_on", "of rows with prompt and completion; None: True"),
    "assistant_only_loss": _read(False, "data.train_on", "of rows with messages"),
    **_idle("rows are shuffled", "shuffle_dataset"),
    **_idle("evaluated rows are never packed", "eval_packing"),
    **_refused("rows are packed by best fit", packing_strategy="bfd"),
    **_refused("rows are made into tokens here", dataset_kwargs=None),
    **_refused("only the negative log-likelihood is offered (chunked_nll is the same)", loss_type="nll"),
}
_BETA = "null: the usual value of each loss"
_PREFERENCES = _COMMON | _MODEL | _EXPERTS | _CACHED | _LENGTH | _NO_DROPOUT | _REFERENCE | _PRECOMPUTED
DPO = _PREFERENCES | _PAD | _FREE | _CUT | {
    "learning_rate": _taken(1e-6, _RATE),
    "loss_type": _read("sigmoid", "dpo.loss_type", "sigmoid, ipo, hinge; one of them"),
    "beta": _taken(0.1, "dpo.beta", _BETA),
    "label_smoothing": _taken(0.0, "dpo.label_smoothing"),
    **_refused("one loss at a time", loss_weights=None),
    **_refused("only the reverse KL of the paper is offered", f_divergence_type="reverse_kl", ld_alpha=None,
               use_weighting=False),
    **_idle("it belongs to losses that are not offered", "f_alpha_divergence_coef discopop_tau"),
}
KTO = _PREFERENCES | {
    "learning_rate": _taken(1e-6, _RATE),
    "beta": _taken(0.1, "dpo.beta", _BETA),
    "desirable_weight": _taken(1.0, "dpo.desirable_weight"),
    "undesirable_weight": _taken(1.0, "dpo.undesirable_weight"),
    **_refused("only the loss of KTO is offered", loss_type="kto"),
    **_idle("rows come in an order drawn from the seed", "train_sampling_strategy"),
}
REWARD = _COMMON | _MODEL | _CACHED | _PAD | _EOS | _LENGTH | {
    "learning_rate": _taken(1e-4, _RATE),
    "chat_template_path": _taken(None, "data.chat_template"),
    "center_rewards_coefficient": _read(None, "reward.center_coef", "None: 0"),
    **_idle("dropout is off", "disable_dropout"),
}
_SAMPLED = {
    "learning_rate": _taken(1e-6, "roles.actor.learning_rate"),
    "per_device_train_batch_size": _taken(8, "train.per_device_train_batch_size", "counts answers there, prompts here"),
    "num_generations": _taken(8, "ppo.sampling.num_samples"),
    "max_completion_length": _taken(512, "ppo.sampling.max_new_tokens"),
    "steps_per_generation": _read(None, "ppo.num_minibatches", "divided by gradient_accumulation_steps"),
    "generation_batch_size": _read(None, "train.per_device_train_batch_size"),
    "temperature": _taken(1.0, "ppo.sampling.temperature"), "top_p": _taken(1.0, "ppo.sampling.top_p"),
    "top_k": _taken(0, "ppo.sampling.top_k"), "min_p": _taken(None, "ppo.sampling.min_p"),
    "repetition_penalty": _taken(1.0, "ppo.sampling.repetition_penalty"),
    "chat_template_kwargs": _taken(None, "data.chat_template_kwargs"),
    "num_iterations": _taken(1, "ppo.num_ppo_epochs"),
    "epsilon": _read(0.2, "ppo.cliprange"),
    "epsilon_high": _read(None, "ppo.cliprange_high", "for cispo theirs is the bound itself, ours + 1"),
    "reward_weights": _taken(None, "reward.weights"),
    "mask_truncated_completions": _taken(False, "ppo.mask_truncated", "out of the loss, still in their group's "
                                                                      "baseline"),
    **_idle("dropout is off where two forwards are compared", "disable_dropout"),
    **_idle("rows are shuffled", "shuffle_dataset"),
    **_idle("columns are handed to the reward functions", "remove_unused_columns"),
    **_idle("held-out prompts are answered once", "num_generations_eval"),
    **_idle("the model that is trained samples",
            "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host "
            "vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
            "vllm_max_model_length vllm_tensor_parallel_size cache_implementation "
            "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged "
            "ds3_gather_for_generation"),
    **_refused("answers of a given form are not offered", vllm_structured_outputs_regex=None),
    **_refused("write ppo__sampling__min_new_tokens=... and its like", generation_kwargs=None),
    **_idle("samples are always kept, in samples.jsonl and in the report",
            "log_completions log_multimodal num_completions_to_print log_unique_prompts"),
}
GRPO = _COMMON | _MODEL | _EXPERTS | _REFERENCE | _SAMPLED | {
    "beta": _taken(0.0, "ppo.kl_coef"),
    "delta": _taken(None, "ppo.dual_clip", "for a negative advantage; theirs also clips positive ones where it is "
                                           "below 1 + epsilon_high"),
    "importance_sampling_level": _read("token", "ppo.policy_loss", "sequence: gspo"),
    "loss_type": _read("dapo", "ppo.aggregation", "dapo, bnpo: token, over all tokens of the update; grpo: sequence; "
                        "dr_grpo: constant; luspo: sum; cispo, sapo, vespo: ppo.policy_loss"),
    "scale_rewards": _read("group", "ppo.estimator", "group: grpo, batch: batch_grpo, none: dr_grpo"),
    "multi_objective_aggregation": _read("sum_then_normalize", "ppo.estimator", "normalize_then_sum: gdpo"),
    "top_entropy_quantile": _taken(1.0, "ppo.top_entropy_quantile", "of the whole update, theirs of each micro-batch"),
    "off_policy_mask_threshold": _taken(None, "ppo.max_off_policy_kl"),
    "use_bias_correction_kl": _read(True, "ppo.kl_bias_correction", "where beta is not 0; by the token's "
                                     "ratio, also with importance_sampling_level sequence"),
    "sapo_temperature_pos": _read(1.0, "ppo.sapo_temperature_pos"),
    "sapo_temperature_neg": _read(1.05, "ppo.sapo_temperature_neg"),
    "vespo_k_pos": _read(2.0, "ppo.vespo_k_pos"), "vespo_lambda_pos": _read(3.0, "ppo.vespo_lambda_pos"),
    "vespo_k_neg": _read(3.0, "ppo.vespo_k_neg"), "vespo_lambda_neg": _read(2.0, "ppo.vespo_lambda_neg"),
    "entropy_coef": _taken(0.0, "ppo.entropy_coef"),
    "max_tool_calling_iterations": _taken(None, "environment.max_turns", "one more, for theirs are those after "
                                          "the first; None: 10 turns"),
    **_refused("write entropy_coef=0.01", use_adaptive_entropy=False),
    **_idle("use_adaptive_entropy is off", "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"),
    **_idle("the sampler's log-probabilities are the model's own, see ppo.importance",
            "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
            "vllm_importance_sampling_clip_min vllm_importance_sampling_cap"),
    **_idle("logits are computed in fp32", "cast_lm_head_to_fp32"),
    **_refused("samples stay on this machine", log_completions_hub_repo=None),
}
RLOO = _COMMON | _MODEL | _EXPERTS | _REFERENCE | _SAMPLED | {
    "num_generations": _taken(2, "ppo.sampling.num_samples"),
    "beta": _taken(0.05, "ppo.kl_coef"),
    "normalize_advantages": _taken(False, "ppo.whiten_advantages", "over tokens, theirs over responses"),
    "reward_clip_range": _read(None, "ppo.min_score", "and ppo.max_score"),
}
PPO = _COMMON | {
    "learning_rate": _taken(5e-5, "roles.actor.learning_rate", "the critic's too: roles.critic.learning_rate"),
    "total_episodes": _read(None, "train.max_steps", "divided by the answers of a rollout; None: by the epochs"),
    "num_mini_batches": _taken(1, "ppo.num_minibatches"), "num_ppo_epochs": _taken(4, "ppo.num_ppo_epochs"),
    "response_length": _taken(53, "ppo.sampling.max_new_tokens"),
    "temperature": _taken(0.7, "ppo.sampling.temperature"),
    "missing_eos_penalty": _read(None, "ppo.missing_eos_penalty", "None: 0"),
    "kl_coef": _taken(0.05, "ppo.kl_coef"), "kl_estimator": _taken("k1", "ppo.kl_estimator"),
    "cliprange": _taken(0.2, "ppo.cliprange"), "cliprange_value": _taken(0.2, "ppo.cliprange_value"),
    "gamma": _taken(1.0, "ppo.gamma"), "lam": _taken(0.95, "ppo.lam"),
    **_idle("TRL's own script reads it; give model and reward_model", "sft_model_path reward_model_path"),
    **_idle("actor and critic have an optimizer each", "vf_coef"),
    **_idle("the trainer decides",
            "exp_name dataset_num_proc local_rollout_forward_batch_size num_sample_generations "
            "ds3_gather_for_generation world_size num_total_batches micro_batch_size local_batch_size batch_size "
            "local_mini_batch_size mini_batch_size"),
    **_idle("an answer ends at the tokenizer's end", "stop_token stop_token_id"),
    **_refused("advantages are whitened instead (ppo__whiten_advantages)", whiten_rewards=False),
    **_refused("write peft_config, or model__lora__r=16", model_adapter_name=None, ref_adapter_name=None),
}
_DEMONSTRATIONS = "what is not sampled (lmbda below 1) is trained as SFTConfig does by default"
GKD = SFT | {
    **_idle(_DEMONSTRATIONS, "packing completion_only_loss assistant_only_loss"),
    "temperature": _taken(0.9, "distill.sampling.temperature", "distill.temperature too"),
    "lmbda": _taken(0.5, "distill.lmbda"),
    "beta": _taken(0.5, "distill.beta", "of the divergence jsd"),
    "max_new_tokens": _taken(128, "distill.sampling.max_new_tokens"),
    "learning_rate": _taken(2e-5, "roles.actor.learning_rate"),
    "teacher_model_name_or_path": _taken(None, "roles.teacher.model_name_or_path"),
    **_refused("write roles__teacher__dtype='bfloat16' and its like", teacher_model_init_kwargs=None),
    **_refused("write lmbda=0.0, or SFTTrainer on the teacher's answers", seq_kd=False),
    **_idle("dropout is off where two forwards are compared", "disable_dropout"),
}
CONFIGS = {"SFTConfig": SFT, "DPOConfig": DPO, "KTOConfig": KTO, "RewardConfig": REWARD, "GRPOConfig": GRPO,
           "RLOOConfig": RLOO, "PPOConfig": PPO, "GKDConfig": GKD}
# peft.LoraConfig: fields that are options here, and those without effect on what is trained.
LORA = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
LORA_IDLE = ("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode",
             "runtime_config", "megatron_core")
