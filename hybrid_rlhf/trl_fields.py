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


def _taken(option: str, note: str = "", kind: str = TAKEN, **defaults: object) -> dict[str, Field]:
    """Fields that are the option, or where it ends in a dot, the one of their name in that section."""
    return {name: Field(default, kind, note, option + (name if option.endswith(".") else ""))
            for name, default in defaults.items()}


def _read(option: str, note: str = "", **defaults: object) -> dict[str, Field]:
    return _taken(option, note, READ, **defaults)


def _idle(note: str, names: str = "", **defaults: object) -> dict[str, Field]:
    """names: those whose default is None."""
    return {name: Field(default, IDLE, note) for name, default in (dict.fromkeys(names.split()) | defaults).items()}


def _refused(note: str, **defaults: object) -> dict[str, Field]:
    return {name: Field(default, REFUSED, note) for name, default in defaults.items()}


_FORWARDS = "dropout is off where two forwards are compared"
_ORDER, _PADDING, _TRAINER = "rows come in an order drawn from the seed", "padding has no effect", "the trainer decides"
# transformers.TrainingArguments, with TRL's defaults.
_COMMON = {
    **_taken("output_dir", "the model is in its folder model/", output_dir=None),
    **_taken("train.", per_device_train_batch_size=8, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999,
             adam_epsilon=1e-8, max_grad_norm=1.0, num_train_epochs=3.0, per_device_eval_batch_size=8,
             learning_rate=1e-6),
    **_taken("train.", "micro-batches are chosen by memory; it multiplies the rows of a step",
             gradient_accumulation_steps=1),
    **_taken("train.", "None: 2", save_total_limit=None),
    **_taken("train.deterministic", full_determinism=False),
    **_taken("seed", seed=42), **_taken("run_name", run_name=None), **_read("report_to", report_to="none"),
    **_read("train.", "counts updates there; one rollout here may make several", max_steps=-1),
    **_read("train.", "linear, cosine, constant (without warm-up), constant_with_warmup", lr_scheduler_type="linear"),
    **_read("train.warmup_ratio", "as a share of the steps; the first update has a rate above 0", warmup_steps=0),
    **_read("train.", "AdamW, AdamW of 8 bits, SGD", optim="adamw_torch_fused"),
    **_read("train.", "metrics.jsonl has every step", logging_steps=10),
    **_read("train.eval_steps", "no: held-out rows are evaluated at the end only", eval_strategy="no"),
    **_read("train.save_steps", "a checkpoint is made every save_minutes and at the end, too", save_strategy="steps"),
    **_read("train.", eval_steps=None, save_steps=500),
    **_read("train.save_best", "the exported model is the best checkpoint's", load_best_model_at_end=False),
    **_read("train.save_best", metric_for_best_model=None),
    **_read("train.save_best", "losses, perplexities and KLs: smaller; all others: larger", greater_is_better=None),
    **_read("model.dtype", "bfloat16 weights with fp32 masters; False: fp32", bf16=None),
    **_read("model.dtype", fp16=False),
    **_read("model.", "off here unless it is given", gradient_checkpointing=True),
    **_read("resume", "auto: an unfinished run goes on by itself", resume_from_checkpoint=None),
    **_read("", "after training; the login is tried before it", push_to_hub=False),
    **_read("", "without it the name of output_dir", hub_model_id=None),
    **_read("", "private unless False", hub_private_repo=None),
    **_read("", "where there is a card: CUDA_VISIBLE_DEVICES= python script.py", use_cpu=False),
    **_idle(_TRAINER, "eval_accumulation_steps include_for_metrics label_names", do_train=False, do_eval=False,
            do_predict=False, prediction_loss_only=False, batch_eval_metrics=False, eval_do_concat_batches=True,
            eval_use_gather_object=False, remove_unused_columns=True, include_num_input_tokens_seen="no",
            use_cache=False, skip_memory_metrics=True, debug="", restore_callback_states_from_checkpoint=False,
            enable_jit_checkpoint=False),
    **_idle("rows are read, batched and dealt to processes here",
            "dataloader_prefetch_factor dataloader_multiprocessing_context data_seed", dataloader_drop_last=False,
            dataloader_num_workers=0, dataloader_pin_memory=True, dataloader_persistent_workers=False,
            dataloader_in_order=True, length_column_name="length", ignore_data_skip=False,
            average_tokens_across_devices=True),
    **_idle("the first step, warnings and the time left are always shown", "disable_tqdm", logging_strategy="steps",
            logging_first_step=False, logging_nan_inf_filter=True, log_level="passive", log_level_replica="warning",
            log_on_each_node=True),
    **_idle("a tracker's project is named by the stage",
            "trackio_space_id trackio_bucket_id trackio_static_space_id", project="huggingface"),
    **_idle("evaluations are made by eval_steps and after the last step", eval_on_start=False, eval_delay=0),
    **_idle("kernels and micro-batches are chosen by the machine",
            "torch_compile_backend torch_compile_mode liger_kernel_config tf32 torch_empty_cache_steps "
            "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs",
            torch_compile=False, use_liger_kernel=False, auto_find_batch_size=False, bf16_full_eval=False,
            fp16_full_eval=False),
    **_idle("processes come from torchrun or accelerate launch and speak through one group",
            "ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
            "ddp_static_graph", local_rank=-1, ddp_timeout=1800, save_on_each_node=False),
    **_idle("of the hub, only the model, its tokenizer and its card are uploaded, after training", "hub_revision",
            hub_strategy="every_save", hub_always_push=False),
    **_refused("log in by `hf auth login`, or set HF_TOKEN", hub_token=None),
    **_refused("set engine__zero_stage=1, 2 or 3 under torchrun, or engine__offload=['optimizer']", deepspeed=None,
               fsdp=None, fsdp_config=None, parallelism_config=None, accelerator_config=None),
    **_refused("a checkpoint holds all that exact resuming needs; leave it out", save_only_model=False),
    **_refused("leave it out; label_smoothing of DPOConfig is taken", label_smoothing_factor=0.0),
    **_refused("it is not offered; leave it out", neftune_noise_alpha=None, optim_args=None, optim_target_modules=None,
               lr_scheduler_kwargs=None),
    **_refused(f"{_ORDER}; leave it out", train_sampling_strategy="random"),
}
_MODEL = {
    **_read("model.dtype", "dtype, attn_implementation, trust_remote_code, load_in_4bit; others are refused",
            model_init_kwargs=None),
    **_taken("model.", trust_remote_code=False), **_idle(_PADDING, pad_to_multiple_of="auto"),
}
_EXPERTS = _idle("an expert model's own coefficient is used", "router_aux_loss_coef")
_CACHED = _idle("tokenized rows are cached", "dataset_num_proc")
_PAD, _FREE = _idle(_PADDING, "pad_token"), _idle(_PADDING, padding_free=False)
_EOS = _refused("the tokenizer's own end is used; give a processing_class that has another", eos_token=None)
_LENGTH = {**_taken("data.", "longer demonstrations lose their end, longer pairs are dropped and counted",
                    max_length=1024), **_read("engine.offload", activation_offloading=False)}
_TEMPLATE = _taken("data.chat_template", chat_template_path=None)
_CUT = _refused("only the end of a row can be cut off", truncation_mode="keep_start")
_REFERENCE = {**_refused("the reference is the start; leave it out", sync_ref_model=False),
              **_idle("sync_ref_model is off", ref_model_mixup_alpha=0.6, ref_model_sync_steps=512)}

SFT = _COMMON | _MODEL | _EXPERTS | _CACHED | _PAD | _FREE | _EOS | _LENGTH | _TEMPLATE | _CUT | {
    **_taken("train.", learning_rate=2e-5),
    **_taken("data.", "within each batch of rows; theirs packs first, and counts packed rows", packing=False),
    **_read("data.sources", "the column is renamed", dataset_text_field="text"),
    **_read("data.train_on", "of rows with prompt and completion; None: True", completion_only_loss=None),
    **_read("data.train_on", "of rows with messages", assistant_only_loss=False),
    **_idle("rows are shuffled", shuffle_dataset=False), **_idle("evaluated rows are never packed", "eval_packing"),
    **_refused("rows are packed by best fit", packing_strategy="bfd"),
    **_refused("rows are made into tokens here", dataset_kwargs=None),
    **_refused("only the negative log-likelihood is offered (chunked_nll is the same)", loss_type="nll"),
}
_PREFERENCES = _COMMON | _MODEL | _EXPERTS | _CACHED | _LENGTH | _REFERENCE | {
    **_taken("dpo.", "null: the usual value of each loss", beta=0.1), **_idle(_FORWARDS, disable_dropout=True),
    **_idle("the reference's log-probabilities are computed with each batch, by the same weights",
            "precompute_ref_batch_size", precompute_ref_log_probs=False),
}
DPO = _PREFERENCES | _PAD | _FREE | _CUT | {
    **_read("dpo.", "sigmoid, ipo, hinge; one of them", loss_type="sigmoid"), **_taken("dpo.", label_smoothing=0.0),
    **_refused("one loss at a time", loss_weights=None),
    **_refused("only the reverse KL of the paper is offered", f_divergence_type="reverse_kl", ld_alpha=None,
               use_weighting=False),
    **_idle("it belongs to losses that are not offered", f_alpha_divergence_coef=0.5, discopop_tau=0.05),
}
KTO = _PREFERENCES | _idle(_ORDER, train_sampling_strategy="sequential") | {
    **_taken("dpo.", desirable_weight=1.0, undesirable_weight=1.0),
    **_refused("only the loss of KTO is offered", loss_type="kto"),
}
REWARD = _COMMON | _MODEL | _CACHED | _PAD | _EOS | _LENGTH | _TEMPLATE | {
    **_taken("train.", learning_rate=1e-4), **_idle("dropout is off", disable_dropout=True),
    **_read("reward.center_coef", "None: 0", center_rewards_coefficient=None),
}
_SAMPLED = _COMMON | _MODEL | _EXPERTS | _REFERENCE | {
    **_taken("roles.actor.", learning_rate=1e-6),
    **_taken("train.", "counts answers there, prompts here", per_device_train_batch_size=8),
    **_taken("ppo.sampling.num_samples", num_generations=8),
    **_taken("ppo.sampling.max_new_tokens", max_completion_length=512),
    **_read("ppo.num_minibatches", "divided by gradient_accumulation_steps", steps_per_generation=None),
    **_read("train.per_device_train_batch_size", generation_batch_size=None),
    **_taken("ppo.sampling.", temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0),
    **_taken("data.", chat_template_kwargs=None), **_taken("ppo.num_ppo_epochs", num_iterations=1),
    **_read("ppo.cliprange", epsilon=0.2),
    **_read("ppo.cliprange_high", "for cispo theirs is the bound itself, ours + 1", epsilon_high=None),
    **_taken("reward.weights", reward_weights=None),
    **_taken("ppo.mask_truncated", "out of the loss, still in their group's baseline",
             mask_truncated_completions=False),
    **_idle(_FORWARDS, disable_dropout=False), **_idle("rows are shuffled", shuffle_dataset=True),
    **_idle("columns are handed to the reward functions", remove_unused_columns=False),
    **_idle("held-out prompts are answered once", "num_generations_eval"),
    **_idle("the model that is trained samples", "vllm_server_base_url vllm_max_model_length cache_implementation "
            "transformers_continuous_batching_config", use_vllm=False, vllm_mode="colocate", vllm_model_impl="vllm",
            vllm_enable_sleep_mode=False, vllm_server_host="0.0.0.0", vllm_server_port=8000,
            vllm_server_timeout=240.0, vllm_group_port=51216, vllm_gpu_memory_utilization=0.3,
            vllm_tensor_parallel_size=1, use_transformers_continuous_batching=False, use_transformers_paged=False,
            ds3_gather_for_generation=True),
    **_refused("answers of a given form are not offered", vllm_structured_outputs_regex=None),
    **_refused("write ppo__sampling__min_new_tokens=... and its like", generation_kwargs=None),
    **_idle("samples are always kept, in samples.jsonl and in the report", "num_completions_to_print",
            log_completions=False, log_multimodal=True, log_unique_prompts=False),
}
GRPO = _SAMPLED | {
    **_taken("ppo.kl_coef", beta=0.0),
    **_taken("ppo.dual_clip", "for a negative advantage; theirs also clips positive ones where it is below 1 + "
                              "epsilon_high", delta=None),
    **_read("ppo.policy_loss", "sequence: gspo", importance_sampling_level="token"),
    **_read("ppo.aggregation", "dapo, bnpo: token, over all tokens of the update; grpo: sequence; dr_grpo: constant; "
                               "luspo: sum; cispo, sapo, vespo: ppo.policy_loss", loss_type="dapo"),
    **_read("ppo.estimator", "group: grpo, batch: batch_grpo, none: dr_grpo", scale_rewards="group"),
    **_read("ppo.estimator", "normalize_then_sum: gdpo", multi_objective_aggregation="sum_then_normalize"),
    **_taken("ppo.", "of the whole update, theirs of each micro-batch", top_entropy_quantile=1.0),
    **_taken("ppo.max_off_policy_kl", off_policy_mask_threshold=None),
    **_read("ppo.kl_bias_correction", "where beta is not 0", use_bias_correction_kl=True),
    **_read("ppo.", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0,
            vespo_k_neg=3.0, vespo_lambda_neg=2.0),
    **_taken("ppo.", entropy_coef=0.0),
    **_taken("environment.max_turns", "one more, for theirs are those after the first; None: 10 turns",
             max_tool_calling_iterations=None),
    **_refused("write entropy_coef=0.01", use_adaptive_entropy=False),
    **_idle("use_adaptive_entropy is off", entropy_coef_min=0.0, entropy_coef_max=1.0, entropy_coef_delta=0.005,
            entropy_target=0.2),
    **_idle("the sampler's log-probabilities are the model's own, see ppo.importance",
            "vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
            vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="sequence_mask",
            vllm_importance_sampling_clip_max=3.0),
    **_idle("logits are computed in fp32", cast_lm_head_to_fp32=False),
    **_refused("samples stay on this machine", log_completions_hub_repo=None),
}
RLOO = _SAMPLED | {
    **_taken("ppo.sampling.num_samples", num_generations=2), **_taken("ppo.kl_coef", beta=0.05),
    **_taken("ppo.whiten_advantages", normalize_advantages=False),
    **_read("ppo.min_score", "and ppo.max_score", reward_clip_range=None),
}
PPO = _COMMON | {
    **_taken("roles.actor.", "the critic's too: roles.critic.learning_rate", learning_rate=5e-5),
    **_read("train.max_steps", "divided by the answers of a rollout; None: by the epochs", total_episodes=None),
    **_taken("ppo.num_minibatches", num_mini_batches=1),
    **_taken("ppo.sampling.max_new_tokens", response_length=53), **_taken("ppo.sampling.", temperature=0.7),
    **_read("ppo.", "None: 0", missing_eos_penalty=None),
    **_taken("ppo.", num_ppo_epochs=4, kl_coef=0.05, kl_estimator="k1", cliprange=0.2, cliprange_value=0.2, gamma=1.0,
             lam=0.95),
    **_idle("TRL's own script reads it; give model and reward_model", "sft_model_path reward_model_path"),
    **_idle("actor and critic have an optimizer each", vf_coef=0.1),
    **_idle(_TRAINER, "dataset_num_proc world_size num_total_batches micro_batch_size local_batch_size batch_size "
            "local_mini_batch_size mini_batch_size", exp_name="ppo_config", local_rollout_forward_batch_size=64,
            num_sample_generations=10, ds3_gather_for_generation=True),
    **_idle("an answer ends at the tokenizer's end", "stop_token stop_token_id"),
    **_refused("advantages are whitened instead (ppo__whiten_advantages)", whiten_rewards=False),
    **_refused("write peft_config, or model__lora__r=16", model_adapter_name=None, ref_adapter_name=None),
}
GKD = SFT | {
    **_idle("what is not sampled (lmbda below 1) is trained as SFTConfig does by default", "completion_only_loss",
            packing=False, assistant_only_loss=False), **_idle(_FORWARDS, disable_dropout=True),
    **_taken("distill.sampling.", "distill.temperature too", temperature=0.9), **_taken("distill.", lmbda=0.5),
    **_taken("distill.", "of the divergence jsd", beta=0.5), **_taken("distill.sampling.", max_new_tokens=128),
    **_taken("roles.actor.", learning_rate=2e-5),
    **_taken("roles.teacher.model_name_or_path", teacher_model_name_or_path=None),
    **_refused("write roles__teacher__dtype='bfloat16' and its like", teacher_model_init_kwargs=None),
    **_refused("write lmbda=0.0, or SFTTrainer on the teacher's answers", seq_kd=False),
}
CONFIGS = {"SFTConfig": SFT, "DPOConfig": DPO, "KTOConfig": KTO, "RewardConfig": REWARD, "GRPOConfig": GRPO,
           "RLOOConfig": RLOO, "PPOConfig": PPO, "GKDConfig": GKD}
# peft.LoraConfig: fields that are options here, and those without effect on what is trained.
LORA = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
LORA_IDLE = ("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode",
             "runtime_config", "megatron_core")
