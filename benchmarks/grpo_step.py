"""Seconds of one whole GRPO step beside TRL's GRPOTrainer (peers/trl_grpo.py), alternating in one run.

    python benchmarks/grpo_step.py [--cases fixed ragged rloo] [--json FILE] [--profile]

Llama-shaped 134M, bf16, random weights; 2 prompts of 36 tokens, 8 samples each, a reward function, KL to the reference
in the loss (beta 0.04). `fixed`: 64 response tokens each; `ragged`: lengths drawn once from a geometric law with mean
24, at most 64, the same for both sides; `rloo`: fixed ones, by RLOO (TRL's RLOOTrainer), whose KL is in the reward.
floor_ratio is our time over that of the step's matrix products at the measured rate plus its unavoidable bytes (weights
read once per decode step, optimizer state) at the measured bandwidth, the prompt counted in every row;
floor_ratio_shared counts it once per group, as ours computes it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import torch
from floors import Shape, decode_bytes, floor_of
from harness import Times, alternate, machine, step_parser, write_rows
from peers.trl_grpo import TrlGRPO
from ppo_models import SHAPES, make_folders

from hybrid_rlhf.core.allocator import keep_freed_blocks
from hybrid_rlhf.engine import SamplingConfig, ZeroConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.rewards.functions import FunctionSource
from hybrid_rlhf.roles.sharing import ActorConfig, Layout, RolesConfig, Start
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from hybrid_rlhf.training.build_roles import RoleInputs, build

PROMPTS, SAMPLES, PROMPT, RESPONSE, MEAN, BETA = 2, 8, 36, 64, 24, 0.04
CASES = {"fixed": False, "ragged": True, "rloo": False}  # whether responses are ragged


def limits_of(is_ragged: bool) -> list[int]:
    if not is_ragged:
        return [RESPONSE] * PROMPTS * SAMPLES
    generator = torch.Generator().manual_seed(2)
    return torch.empty(PROMPTS * SAMPLES).geometric_(1 / MEAN, generator=generator).clamp(1, RESPONSE).int().tolist()


def evenness(completion_ids: list[list[int]], **_columns: list) -> list[float]:
    """The reward function of both sides: the share of even tokens."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def tokenizer_of(size: int):  # noqa: ANN201
    """One word per id, such as <7>; 0 pads and 2 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(size)}, unk_token="<1>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<0>", eos_token="<2>")


def prompts_of(vocab: int) -> Prompts:
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (PROMPTS, PROMPT), generator=draws).tolist()
    return Prompts(ids, [" ".join(f"<{i}>" for i in row) for row in ids])


class Ours:
    """Our step, with lengths given from outside."""

    def __init__(self, base: Path, tokenizer, prompts: Prompts, limits: list[int],  # noqa: ANN001
                 samples: int = SAMPLES, estimator: str = "grpo") -> None:
        self.prompts = prompts
        start = Start(str(base), dtype="bfloat16")
        parts = RoleInputs(ModelConfig(model_name_or_path=str(base), dtype="bfloat16"),
                           RolesConfig(actor=ActorConfig(learning_rate=1e-5)), ZeroConfig(),
                           TrainConfig(), seed=0)
        roles, _ = build(parts, {"actor": start, "ref": start}, Layout((("actor",), ("ref",)), "model"), tokenizer,
                         {"actor": 1000}, None)
        engine, generate = roles.actor.engine, roles.actor.engine.generate
        engine.eos_ids = []  # lengths are the benchmark's
        engine.generate = lambda *given, **named: generate(*given, **named | {"limits": limits})
        sampling = SamplingConfig(max_new_tokens=max(limits), num_samples=samples)
        config = PPOConfig(sampling=sampling, estimator=estimator, num_ppo_epochs=1, num_minibatches=1, kl_coef=BETA,
                           missing_eos_penalty=0.0)
        self.trainer = PPOTrainer(roles, FunctionSource("evenness", evenness), config, seed=0)
        self.seconds: dict[str, float] = {}

    def step(self) -> None:
        metrics = self.trainer.step(self.prompts).compute()
        self.seconds = {k: v for k, v in metrics.items() if k.startswith("time/") or k == "engine/logprob_drift"}


def floor_seconds(shape: str, limits: list[int], prompts: int = PROMPTS * SAMPLES) -> tuple[float, str]:
    """Seconds that the step's products and bytes take at this machine's own rates, and a line about them.

    A backward costs two forwards; the head is needed where tokens are predicted only; each prompt is prefilled once.
    prompts: how many are read when a pass reads them.
    """
    model = Shape.of(SHAPES[shape][1])
    answered, read = sum(limits), prompts * PROMPT + sum(limits)
    passes = 4 + PROMPTS * PROMPT / read  # the reference, the actor, its backward; prefilling
    return floor_of(model, read, passes, (answered, 4), decode_bytes(model, [PROMPT] * len(limits), limits),
                    model.body + 2 * model.head)


def peer_of(name: str, shape: str, place: Path, is_autocast: bool) -> TrlGRPO:
    vocab = SHAPES[shape][1]["vocab_size"]
    return TrlGRPO(place / "base", tokenizer_of(vocab), prompts_of(vocab).texts, SAMPLES, limits_of(CASES[name]),
                   evenness, BETA, place / "trl", is_autocast, estimator_of(name))


def estimator_of(case: str) -> str:
    return "rloo" if case == "rloo" else "grpo"


def measure(name: str, shape: str, place: Path, repeats: int, trl: TrlGRPO) -> dict:
    limits, vocab = limits_of(CASES[name]), SHAPES[shape][1]["vocab_size"]
    ours = Ours(place / "base", tokenizer_of(vocab), prompts_of(vocab), limits, estimator=estimator_of(name))
    mine, theirs = alternate(repeats, ours.step, trl.step)
    floor, line = floor_seconds(shape, limits)
    shared, _ = floor_seconds(shape, limits, PROMPTS)
    row = {"case": name, "ours": mine.median, "peer": theirs.median, "ratio": theirs.median / mine.median,
           "floor_ratio": mine.median / floor, "unit": "s/step", "machine": machine(), "phases": ours.seconds,
           "ours_range": mine[1:], "peer_range": theirs[1:], "tokens": sum(limits),
           "floor_ratio_shared": mine.median / shared}
    report(name, mine, theirs, row, line)
    return row


def report(name: str, mine: Times, theirs: Times, row: dict, line: str) -> None:
    print(f"{name:8} ours {mine}  TRL {theirs} s/step  ratio {row['ratio']:.2f}  floor_ratio {row['floor_ratio']:.2f}",
          flush=True)
    phases = ", ".join(f"{k} {v:.3f}" for k, v in sorted(row["phases"].items()))
    print(f"{'':8} {row['tokens']} response tokens; floor_ratio with each prompt once {row['floor_ratio_shared']:.2f}; "
          f"{line}\n{'':8} {phases}", flush=True)


def profile(name: str, shape: str, place: Path) -> None:
    """Where one of our steps spends its time, by operation."""
    from torch.profiler import ProfilerActivity, profile

    vocab = SHAPES[shape][1]["vocab_size"]
    ours = Ours(place / "base", tokenizer_of(vocab), prompts_of(vocab), limits_of(CASES[name]))
    ours.step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        ours.step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    parser = step_parser(__doc__, CASES)
    parser.add_argument("--profile", action="store_true", help="print where our step spends its time instead")
    parser.add_argument("--autocast", action="store_true", help="TRL's bf16=True, which computes by autocast")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_blocks()  # as the launcher does; TRL, in the same process, profits as well
    with tempfile.TemporaryDirectory() as folder:
        make_folders(options.shape, Path(folder))
        if options.profile:
            for name in options.cases:
                profile(name, options.shape, Path(folder))
            return
        # before ours, which makes a process group: with one, TRL would wrap its model for several processes
        peers = {name: peer_of(name, options.shape, Path(folder), options.autocast) for name in options.cases}
        write_rows((measure(name, options.shape, Path(folder), options.repeats, trl) for name, trl in peers.items()),
                   options.json)


if __name__ == "__main__":
    main()
