"""Random models, prompts and rows for the benchmarks, and our trainers' parts built from them as the stages do it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig, ZeroConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora, save_adapter
from hybrid_rlhf.rewards.model import ModelSource
from hybrid_rlhf.roles import Actor
from hybrid_rlhf.roles.sharing import RoleConfig, RolesConfig, Start, resolve
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from hybrid_rlhf.training import builders
from hybrid_rlhf.training.build_roles import build
from hybrid_rlhf.training.stage_config import OnPolicyConfig

SHAPES = {
    "opt125m": ("opt", dict(hidden_size=768, ffn_dim=3072, num_hidden_layers=12, num_attention_heads=12,
                            vocab_size=50272, word_embed_proj_dim=768, max_position_embeddings=512, dropout=0.0)),
    "llama134m": ("llama", dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                                num_key_value_heads=12, vocab_size=32000, max_position_embeddings=512)),
    "llama4m": ("llama", dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
                              num_key_value_heads=4, vocab_size=2048, max_position_embeddings=512)),
    "tiny": ("llama", dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=4, vocab_size=512, max_position_embeddings=512)),
}
LORA = LoraConfig(r=16)


class Tokenizer:
    """As much of a tokenizer as the roles ask for; there is no text here."""

    pad_token_id, eos_token_id = 0, None

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def decode(self, ids: list[int], **_options: object) -> str:
        return ""


def tokenizer_of(size: int):  # noqa: ANN201
    """One word per id, such as <7>; 0 pads and 2 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(size)}, unk_token="<1>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<0>", eos_token="<2>")


def make_folders(shape: str, place: Path, has_reward: bool = True) -> None:
    """place/base (a causal model, bf16), place/reward (the same shape with a scalar head), place/adapter (LoRA)."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind, settings = SHAPES[shape]
    config = AutoConfig.for_model(kind, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.save_pretrained(place / "base")
    config.num_labels = 1
    if has_reward:
        scalar = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
        scalar.save_pretrained(place / "reward")
    add_lora(base, LORA, "reward")
    save_adapter(base, place / "adapter", "reward")


def roles_of(place: Path, *, lora: bool, share: str, micro_batch_tokens: int):  # noqa: ANN201
    """(Roles, Reward) of models in bf16; share as in roles.share_base. One base: the reward is an adapter on it."""
    base, reward, adapter = (str(place / n) for n in ("base", "reward", "adapter"))
    is_one = share == "all"
    policy = Start(base, dtype="bfloat16")
    scalar = Start(base if is_one else reward, adapter if is_one else None, reward, dtype="bfloat16")
    starts = {"actor": policy, "ref": policy, "critic": scalar, "reward": scalar}
    roles = RolesConfig(share, actor=RoleConfig(learning_rate=1e-5), critic=RoleConfig(learning_rate=1e-5))
    layout, _ = resolve(roles, starts, lora)
    zero = ZeroConfig(micro_batch_tokens=micro_batch_tokens)
    config = OnPolicyConfig(model=policy_config(place, lora), roles=roles, engine=zero)
    built = build(config, starts, layout, Tokenizer(_vocab(base)), dict.fromkeys(("actor", "critic"), 1000), None)
    built[0].actor.engine.eos_ids = []  # lengths are the benchmark's
    return built


def _vocab(folder: str) -> int:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder).vocab_size


def trainer_of(roles, reward, max_new_tokens: int) -> PPOTrainer:  # noqa: ANN001
    """PPO with one epoch and one minibatch: each step is one update of actor and critic."""
    config = PPOConfig(sampling=SamplingConfig(max_new_tokens=max_new_tokens), num_ppo_epochs=1, num_minibatches=1,
                       kl_coef=0.05, missing_eos_penalty=0.0)
    return PPOTrainer(roles, ModelSource(reward), config, seed=0)


class TimedStep:
    """step() does one step of `trainer`, whose responses have the lengths `limits`; .seconds: its phases, and drift."""

    def __init__(self, trainer: PPOTrainer, engine: HybridEngine, prompts: Prompts, limits: list[int]) -> None:
        self.trainer, self.prompts, generate = trainer, prompts, engine.generate
        engine.generate = lambda *inputs, **named: generate(*inputs, **named | {"limits": limits})
        self.seconds: dict[str, float] = {}

    def step(self) -> None:
        metrics = self.trainer.step(self.prompts).compute()
        self.seconds = {k: v for k, v in metrics.items() if k.startswith("time/") or k == "engine/logprob_drift"}


def actor_of(place: Path, tokenizer, is_lora: bool = False, zero: ZeroConfig | None = None) -> Actor:  # noqa: ANN001
    """The base of `place` as an actor that can be trained."""
    model, zero = policy_config(place, is_lora), zero or ZeroConfig()
    engine = builders.policy_engine(builders.open_policy(model, tokenizer, 0, dropout=True), tokenizer)
    return Actor(prepared(engine, zero), tokenizer, zero.micro_batch_tokens)


def policy_config(place: Path, is_lora: bool = False) -> ModelConfig:
    return ModelConfig(model_name_or_path=str(place / "base"), dtype="bfloat16", lora=LORA if is_lora else LoraConfig())


def prepared(engine: HybridEngine, zero: ZeroConfig) -> HybridEngine:
    """The engine, ready to be trained."""
    train = TrainConfig(learning_rate=1e-6, lr_scheduler_type="constant")
    engine.prepare_training(builders.optimizer_of(train, train.learning_rate), builders.schedule_of(train, 1000), zero)
    return engine


# -- prompts and rows --------------------------------------------------------------------------------------------------


def prompts_of(place: Path, rows: int, length: int) -> Prompts:
    """Distinct random prompts of one length."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(3, _vocab(str(place / "base")), (rows, length), generator=draws).tolist()
    return Prompts(ids, [text_of(row).strip() for row in ids])


def text_of(ids: list[int]) -> str:
    """The text that `tokenizer_of` makes these ids of."""
    return "".join(f" <{i}>" for i in ids)


def rows_of(count: int, lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    """Distinct random rows of token ids, their lengths even between both, which are included."""
    draws = torch.Generator().manual_seed(seed)
    sizes = torch.randint(lengths[0], lengths[1] + 1, (count,), generator=draws).tolist()
    return [torch.randint(3, vocab, (n,), generator=draws).tolist() for n in sizes]


def ragged_limits(count: int, mean: int, most: int, draws: torch.Generator) -> list[int]:
    """Response lengths from a geometric law, at least 1 and at most `most`."""
    return torch.empty(count).geometric_(1 / mean, generator=draws).clamp(1, most).int().tolist()


def limits_of(count: int, length: int, is_ragged: bool) -> list[int]:
    """Response lengths of a step: all the same, or drawn once with mean 24 and at most `length`."""
    return ragged_limits(count, 24, length, torch.Generator().manual_seed(2)) if is_ragged else [length] * count
