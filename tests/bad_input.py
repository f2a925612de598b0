"""What can be wrong with a command line, its files and folders: the table of test_bad_input.py.

PLACE stands for the folder that the test fills.
"""

from __future__ import annotations

import torch


def sources(*names: str) -> str:
    return "--data.sources=[" + ", ".join(f"{{path: '{n}'}}" for n in names) + "]"


MODEL = ["--model.model_name_or_path", "PLACE/good"]
SMALL = ["--data.split", "null", "--data.max_length", "64", "--data.max_prompt_length", "32", "--train.max_steps", "1"]
OUT = ["--output_dir", "PLACE/runs/out"]
DEMOS, PAIRS, PROMPTS = (sources(f"PLACE/{n}.jsonl") for n in ("demos", "pairs", "prompts"))
SFT = ["--stage", "sft", *OUT, *MODEL, DEMOS, *SMALL]
REWARD = ["--stage", "reward", *OUT, *MODEL, PAIRS, *SMALL]
PPO = ["--stage", "ppo", *OUT, *MODEL, PROMPTS, *SMALL, "--roles.reward.model_name_or_path", "PLACE/good",
       "--ppo.sampling.max_new_tokens", "8"]
DPO = ["--stage", "dpo", *OUT, *MODEL, PAIRS, *SMALL]
ALL = ["--stage", "all", *OUT, "--model.preset", "tiny", DEMOS, *SMALL[:6]]


def data(stage: list[str], name: str) -> list[str]:
    """`stage` on PLACE/name instead of its data."""
    return [sources(f"PLACE/{name}") if w.startswith("--data.sources") else w for w in stage]


def model(name: str, stage: list[str] = SFT) -> list[str]:
    return [*stage, "--model.model_name_or_path", f"PLACE/{name}"]


def put(stage: list[str], name: str) -> list[str]:
    """`stage` with its output in PLACE/name."""
    return [*stage, "--output_dir", f"PLACE/{name}"]


# what is wrong, the command line, what the message must hold
BAD = [
    ("unknown flag", [*SFT, "--train.learning_rat", "1"], ["train.learning_rat", "did you mean train.learning_rate?"]),
    ("unknown flag with =", [*SFT, "--data.pakcing=true"], ["data.pakcing", "did you mean data.packing?"]),
    ("unknown flag of no section", [*SFT, "--learning_rate", "1"], ["did you mean train.learning_rate?"]),
    ("flag of another stage", [*SFT, "--ppo.kl_coef", "1"], ["ppo.kl_coef"]),
    ("stray word", [*SFT, "whatever"], ["whatever"]),
    ("unknown stage", ["--stage", "pop"], ["--stage pop", "did you mean ppo?", "sft, reward, ppo, all"]),
    ("no stage", DEMOS.split(), ["--stage is missing", "sft, reward, ppo, all"]),
    ("stage without a value", ["--stage"], ["--stage needs a value", "sft"]),
    ("flag without a value", [*SFT, "--seed"], ["seed"]),
    ("text for an integer", [*SFT, "--train.max_steps", "many"], ["train.max_steps", "int", "many"]),
    ("text for a boolean", [*SFT, "--data.packing", "perhaps"], ["data.packing", "perhaps"]),
    ("text for a float", [*SFT, "--train.learning_rate", "fast"], ["train.learning_rate", "float", "fast"]),
    ("fraction for an integer", [*SFT, "--train.max_steps", "1.5"], ["train.max_steps", "1.5"]),
    ("sources that are no list", [*SFT, "--data.sources", "3"], ["data.sources"]),
    ("source with an unknown key", [*SFT, "--data.sources=[{path: a.jsonl, wieght: 1}]"],
     ["unknown key wieght in data.sources (did you mean weight?)", "path, name, split"]),
    ("source with a column that is no name", [*SFT, "--data.sources=[{path: a.jsonl, columns: {prompt: 1}}]"],
     ["data.sources", "columns", "Expected a str"]),
    ("source without a path", ["--stage", "sft", *OUT, *MODEL, "--data.sources=[{weight: 1}]"],
     ["data.sources", "path"]),
    ("missing config file", [*SFT, "--config", "PLACE/none.yaml"], ["none.yaml"]),
    ("config file that is a folder", [*SFT, "--config", "PLACE/good"], ["PLACE/good", "Is a directory"]),
    ("malformed YAML", [*SFT, "--config", "PLACE/torn.yaml"], ["PLACE/torn.yaml line 2"]),
    ("YAML that is a list", [*SFT, "--config", "PLACE/list.yaml"], ["PLACE/list.yaml", "list"]),
    ("YAML that is binary", [*SFT, "--config", "PLACE/binary.yaml"], ["PLACE/binary.yaml", "YAML"]),
    ("unknown key in YAML", [*SFT, "--config", "PLACE/unknown.yaml"], ["did you mean train.learning_rate?"]),
    ("unknown section in YAML", [*SFT, "--config", "PLACE/section.yaml"], ["trian", "did you mean train"]),
    ("wrong type in YAML", [*SFT, "--config", "PLACE/type.yaml"], ["train.max_steps", "many"]),

    ("no data", [w for w in SFT if w != DEMOS], ["no data for stage sft", "data.sources"]),
    ("missing data file", data(SFT, "none.jsonl"), ["PLACE/none.jsonl", "does not exist"]),
    ("empty jsonl", data(SFT, "empty.jsonl"), ["PLACE/empty.jsonl", "empty"]),
    ("malformed jsonl", data(SFT, "torn.jsonl"), ["PLACE/torn.jsonl line 3", "not valid JSON"]),
    ("jsonl of numbers", data(SFT, "numbers.jsonl"), ["PLACE/numbers.jsonl line 1", "object"]),
    ("unknown columns", data(SFT, "columns.jsonl"), ["PLACE/columns.jsonl", "alpha, beta", "prompt"]),
    ("prompts where demonstrations are needed", data(SFT, "prompts.jsonl"), ["PLACE/prompts.jsonl", "stage sft"]),
    ("demonstrations where pairs are needed", data(REWARD, "demos.jsonl"), ["PLACE/demos.jsonl", "stage reward"]),
    ("unknown kind of file", data(SFT, "good/config.xyz"), ["config.xyz", ".jsonl"]),
    ("unknown embedded data", [*SFT, sources("demo/demonstration")], ["did you mean demo/demonstrations?"]),
    ("no row usable after truncation, sft", [*data(SFT, "long.jsonl"), "--data.max_length", "16"],
     ["no usable row", "dropped"]),
    ("no row usable after truncation, reward", [*data(REWARD, "long_pairs.jsonl"), "--data.max_length", "16"],
     ["no usable row", "dropped"]),
    ("no row usable after truncation, ppo", [*data(PPO, "long.jsonl"), "--data.max_prompt_length", "8"],
     ["no usable row", "dropped"]),
    ("column mapping to nothing", [*SFT, "--data.sources=[{path: PLACE/demos.jsonl, columns: {prompt: promt}}]"],
     ["promt", "did you mean prompt?"]),

    ("no model", [*SFT, "--model.model_name_or_path", "null"], ["model.model_name_or_path", "model.preset"]),
    ("missing model folder", model("none"), ["PLACE/none", "does not exist"]),
    ("model that is a file", model("demos.jsonl"), ["PLACE/demos.jsonl", "is a file"]),
    ("folder that is no model", model("no_model"), ["PLACE/no_model", "config.json"]),
    ("model without weights", model("no_weights"), ["PLACE/no_weights", "no weights"]),
    ("model without tokenizer", model("no_tokenizer"), ["PLACE/no_tokenizer", "no tokenizer"]),
    ("pickled weights only", model("pickled"), ["PLACE/pickled", "pytorch_model.bin", "safetensors"]),
    ("damaged weights", model("damaged"), ["PLACE/damaged"]),
    ("damaged configuration", model("bad_config"), ["PLACE/bad_config"]),
    ("damaged tokenizer", model("bad_tokenizer"), ["PLACE/bad_tokenizer"]),
    ("configuration of no known model", model("unknown_type"), ["PLACE/unknown_type"]),
    ("reward from a model without weights", model("no_weights", REWARD), ["PLACE/no_weights", "no weights"]),
    ("ppo from a model without weights", model("no_weights", PPO), ["PLACE/no_weights", "no weights"]),
    ("reward model without weights", [*PPO, "--roles.reward.model_name_or_path", "PLACE/no_weights"],
     ["PLACE/no_weights", "no weights"]),
    ("encoder-decoder", model("t5"), ["PLACE/t5", "encoder-decoder"]),
    ("unknown preset", ["--stage", "sft", *OUT, DEMOS, "--model.preset", "tini"], ["did you mean tiny?"]),
    ("preset and model", [*SFT, "--model.preset", "tiny"], ["model.preset", "model.model_name_or_path"]),
    ("freeze that matches nothing", [*SFT, "--model.freeze=[nowhere]"], ["model.freeze", "nowhere"]),
    ("freeze of everything", [*SFT, "--model.freeze=['.']"], ["model.freeze", "every parameter"]),
    ("LoRA target that matches nothing", [*SFT, "--model.lora.r", "4", "--model.lora.target_modules=[c_attn]"],
     ["lora.target_modules", "c_attn", "q_proj"]),
    ("packing on Mamba", [*model("mamba"), "--data.packing", "true"], ["data.packing", "MambaForCausalLM"]),

    ("reward without sft", [*REWARD, "--model.model_name_or_path", "null"],
     ["PLACE/runs/sft", "--stage sft", "model.model_name_or_path"]),
    ("ppo without sft", [*PPO, "--model.model_name_or_path", "null"], ["PLACE/runs/sft", "--stage sft"]),
    ("ppo without reward", [*PPO, "--roles.reward.model_name_or_path", "null"],
     ["PLACE/runs/reward", "--stage reward", "roles.reward.model_name_or_path"]),
    ("reward function that names none", [*PPO, "--reward.functions", "pay"], ["reward.functions", "path.py:name"]),
    ("reward function of no file", [*PPO, "--reward.functions", "PLACE/pay.py:f"], ["PLACE/pay.py is no Python file"]),
    ("reward service without an address", [*PPO, "--reward.url", "localhost:8000"], ["reward.url", "http://"]),
    ("unknown builtin reward", [*PPO, "--reward.functions=[builtin:fromat]"], ["did you mean format?"]),
    ("reward function without its column", [*PPO, "--reward.functions", "builtin:numeric_match"],
     ["numeric_match needs a column answer"]),
    ("weights of another number than sources", [*PPO, "--reward.functions", "builtin:exact_match",
                                                "--reward.weights=[1]"], ["reward.weights", "model, exact_match"]),
    ("critic that is a head without a reward model",
     [*PPO, "--roles.reward.model_name_or_path", "null", "--reward.functions", "builtin:exact_match",
      "--roles.critic.kind", "head"], ["roles.critic.kind is head", "roles.reward.model_name_or_path"]),
    ("unfinished predecessor", put([*REWARD, "--model.model_name_or_path", "null"], "half/reward"),
     ["PLACE/half/sft", "not finished", "--stage sft"]),
    ("predecessor of another stage", model("other_stage", REWARD), ["PLACE/other_stage", "reward run", "sft"]),
    ("critic with another tokenizer", [*PPO, "--roles.critic.model_name_or_path", "PLACE/other_tokens"],
     ["PLACE/other_tokens", "tokenizers differ"]),
    ("reference with another tokenizer", [*PPO, "--roles.ref.model_name_or_path", "PLACE/other_tokens"],
     ["PLACE/other_tokens", "tokenizers differ"]),

    ("tensor parallelism without enough processes", [*PPO, "--roles.actor.tp", "2"],
     ["roles.actor.tp is 2, but there is 1 process", "--nproc_per_node 2"]),
    ("grpo with groups of one", [*PPO, "--ppo.estimator", "grpo"],
     ["ppo.estimator grpo", "ppo.sampling.num_samples is 1", "2 or more"]),
    ("rloo by its stage with groups of one", ["--stage", "rloo", *PPO[2:], "--ppo.sampling.num_samples", "1"],
     ["ppo.estimator rloo", "ppo.sampling.num_samples is 1"]),
    ("unknown estimator", [*PPO, "--ppo.estimator", "grop"], ["ppo.estimator", "did you mean grpo?"]),
    ("unknown policy loss", [*PPO, "--ppo.policy_loss", "gsop"], ["ppo.policy_loss", "did you mean gspo?"]),
    ("k1 in the loss", [*PPO, "--ppo.kl_in", "loss", "--ppo.kl_estimator", "k1"], ["k1", "choose k2 or k3"]),
    ("critic warm-up without a critic", ["--stage", "grpo", *PPO[2:], "--ppo.critic_warmup_steps", "2"],
     ["ppo.critic_warmup_steps is 2", "grpo has no critic"]),
    ("overlong buffer beyond the response", [*PPO, "--ppo.overlong_penalty", "1", "--ppo.overlong_buffer", "9"],
     ["ppo.overlong_buffer is 9", "[1, ppo.sampling.max_new_tokens 8]"]),
    ("refills without groups", [*PPO, "--ppo.max_refills", "2"], ["ppo.max_refills is 2", "num_samples is 1"]),
    ("dual clip of cispo", ["--stage", "cispo", *PPO[2:], "--ppo.dual_clip", "3"], ["ppo.dual_clip", "cispo"]),
    ("weights against nothing", [*PPO, "--ppo.importance", "token", "--ppo.old_logprobs", "sampler"],
     ["ppo.importance token", "choose recompute"]),

    ("output_dir with something else", put(SFT, "thesis"), ["PLACE/thesis", "chapter.txt"]),
    ("output_dir that is a file", put(SFT, "demos.jsonl"), ["PLACE/demos.jsonl", "is a file"]),
    ("output_dir below a file", put(SFT, "demos.jsonl/run"), ["PLACE/demos.jsonl", "is a file"]),
    ("output_dir of another stage", put(SFT, "other_stage"), ["PLACE/other_stage", "reward run"]),
    ("output_dir with other settings", put(SFT, "other_settings"), ["other settings", "seed", "--resume never"]),
    ("output_dir with a damaged record", put(SFT, "damaged_record"), ["PLACE/damaged_record/run.json"]),
    ("unknown resume", [*SFT, "--resume", "maybe"], ["resume", "maybe", "auto", "never"]),
    ("unknown tracker", [*SFT, "--report_to=[tensorbord]"], ["tensorbord", "did you mean tensorboard?"]),

    ("max_length above the model's positions", [*SFT, "--data.max_length", "257"], ["data.max_length", "257", "256"]),
    ("max_length above the reward model's positions", [*REWARD, "--data.max_length", "257"],
     ["data.max_length", "257", "256"]),
    ("prompt and response above the model's positions", [*PPO, "--ppo.sampling.max_new_tokens", "225"],
     ["data.max_prompt_length", "ppo.sampling.max_new_tokens", "257", "256"]),
    ("prompt and response above the reward model's positions",
     [*PPO, "--roles.reward.model_name_or_path", "PLACE/short"], ["data.max_prompt_length", "40", "PLACE/short", "32"]),
    ("negative learning rate", [*SFT, "--train.learning_rate", "-1"], ["train.learning_rate", "-1"]),
    ("learning rate that is no number", [*SFT, "--train.learning_rate", "nan"], ["train.learning_rate", "nan"]),
    ("infinite learning rate", [*SFT, "--train.learning_rate", "inf"], ["train.learning_rate", "inf"]),
    ("no steps", [*SFT, "--train.max_steps", "0"], ["train.max_steps"]),
    ("unknown schedule", [*SFT, "--train.lr_scheduler_type", "cosin"], ["did you mean cosine?"]),
    ("split of two shares", [*SFT, "--data.split=[1, 2]"], ["data.split", "three"]),
    ("unknown dtype", [*SFT, "--model.dtype", "bf16"], ["model.dtype", "bf16", "bfloat16"]),
    ("ZeRO 7", [*SFT, "--engine.zero_stage", "7"], ["engine.zero_stage", "7", "0, 1, 2 or 3"]),
    ("offload of what does not exist", [*SFT, "--engine.offload=[optimiser]"], ["engine.offload", "did you mean opt"]),
    ("parameters offloaded at ZeRO 2", [*SFT, "--engine.zero_stage", "2", "--engine.offload=[parameters]"],
     ["engine.offload", "engine.zero_stage 3"]),
    ("optimizer offloaded at ZeRO 0", [*PPO, "--engine.zero_stage", "0", "--engine.offload=[optimizer]"],
     ["engine.offload", "engine.zero_stage 1"]),
    ("unknown optimizer", [*SFT, "--train.optim", "adamv"], ["train.optim", "did you mean adamw?"]),
    ("unknown attention", [*SFT, "--model.attn_implementation", "flash_attn"], ["did you mean flash_attention_2?"]),
    *([] if torch.cuda.is_available() else [
        ("flash attention on a CPU", [*SFT, "--model.attn_implementation", "flash_attention_2"],
         ["model.attn_implementation", "accelerator", "sdpa"])]),
    ("ZeRO 0 with bfloat16 and sgd",
     [*SFT, "--engine.zero_stage", "0", "--model.dtype", "bfloat16", "--train.optim", "sgd"], ["engine.zero_stage"]),
    *([] if torch.cuda.is_available() else [("float16 on a CPU", [*SFT, "--model.dtype", "float16"],
                                             ["model.dtype", "float16", "bfloat16"])]),
    ("negative LoRA rank", [*SFT, "--model.lora.r", "-1"], ["lora.r", "-1"]),
    ("negative centering", [*REWARD, "--reward.center_coef", "-1"], ["reward.center_coef"]),
    ("demonstrations where pairs are needed, dpo", data(DPO, "demos.jsonl"),
     ["PLACE/demos.jsonl", "pairs for stage dpo"]),
    ("demonstrations where labels are needed", ["--stage", "kto", *data(DPO, "demos.jsonl")[2:]],
     ["PLACE/demos.jsonl", "labelled answers for stage kto"]),
    ("demonstrations where labels are needed, by the switch", [*data(DPO, "demos.jsonl"), "--dpo.loss_type", "kto"],
     ["PLACE/demos.jsonl", "labelled answers for stage kto"]),
    ("demonstrations where scores are needed", ["--stage", "conditional_sft", *data(SFT, "demos.jsonl")[2:]],
     ["PLACE/demos.jsonl", "graded answers for stage conditional_sft"]),
    ("dpo without sft", [*DPO, "--model.model_name_or_path", "null"],
     ["PLACE/runs/sft", "--stage sft", "model.model_name_or_path"]),
    ("preset as the policy's start", ["--stage", "ipo", *OUT, PAIRS, *SMALL, "--model.preset", "tiny"],
     ["model.preset", "ipo starts", "--stage sft"]),
    ("beta 0", [*DPO, "--dpo.beta", "0"], ["dpo.beta is 0", "positive", "0.1"]),
    ("negative beta", ["--stage", "simpo", *DPO[2:], "--dpo.beta", "-1"], ["dpo.beta is -1", "2.0"]),
    ("unknown loss", [*DPO, "--dpo.loss_type", "sigmoidal"], ["dpo.loss_type", "did you mean sigmoid?", "ipo, hinge"]),
    ("smoothing of a loss that has none", ["--stage", "hinge", *DPO[2:], "--dpo.label_smoothing", "0.1"],
     ["dpo.label_smoothing", "hinge", "sigmoid or simpo"]),
    ("kto of single rows", ["--stage", "kto", *DPO[2:], "--train.per_device_train_batch_size", "1"],
     ["train.per_device_train_batch_size", "2 or more"]),
    ("score template without a score", [*SFT, "--data.score_template", "{prompt}"], ["data.score_template", "{score}"]),
    ("top_p 2", [*PPO, "--ppo.sampling.top_p", "2"], ["top_p", "2", "(0, 1]"]),
    ("negative kl_coef", [*PPO, "--ppo.kl_coef", "-1"], ["ppo.kl_coef"]),
    ("negative role learning rate", [*PPO, "--roles.actor.learning_rate", "-1"], ["learning_rate", "-1"]),
    ("learning rate of a role that is not trained", [*PPO, "--roles.ref.learning_rate", "1"],
     ["roles.ref.learning_rate"]),
    ("unknown sharing", [*PPO, "--roles.share_base", "pair"], ["roles.share_base", "did you mean pairs?"]),
    ("unknown kind of critic", [*PPO, "--roles.critic.kind", "heads"], ["roles.critic.kind", "did you mean head?"]),
    ("both quantisations", [*SFT, "--model.load_in_4bit", "true", "--model.load_in_8bit", "true"], ["load_in_8bit"]),
    ("quantised base with full fine-tuning", [*SFT, "--model.load_in_4bit", "true"],
     ["model.load_in_4bit", "model.lora.r"]),
    ("LoRA target that matches nothing", [*SFT, "--model.lora.r", "4", "--model.lora.target_modules=[query_key_value]"],
     ["query_key_value", "q_proj"]),
    ("minibatch larger than the rollout", [*PPO, "--ppo.minibatch_size", "9"], ["ppo.minibatch_size", "9", "8"]),
    ("ZeRO 0 with bfloat16 and sgd, ppo",
     [*PPO, "--engine.zero_stage", "0", "--model.dtype", "bfloat16", "--train.optim", "sgd"],
     ["zero_stage 0", "bfloat16", "choose 1"]),
    ("the same in all stages", [*ALL, "--ppo.minibatch_size", "9"], ["ppo.minibatch_size", "9", "8"]),
    ("ppo alone in all stages", [*ALL, "--run_stages=[pppo]"], ["run_stages", "pppo", "sft, reward, ppo"]),
    ("preset as the reward model's start", ["--stage", "reward", *OUT, PAIRS, *SMALL, "--model.preset", "tiny"],
     ["model.preset", "--stage sft"]),
]
