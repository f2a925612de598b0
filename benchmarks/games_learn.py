"""A small model learns a game of many turns: guess a number, told higher or lower, in as few turns as binary search.

    python benchmarks/games_learn.py [--seeds 0,1,2] [--work DIR]

Per seed: SFT on games whose guesses are random, which teaches the format and how the game answers, and no strategy;
then PPO on episodes of `builtin:guess_number`, with the reward of each turn at that turn's last token. Measured over
all secrets, sampled and greedy; binary search needs 3.375 turns on average. A run that is there is not run again, so
the command can be stopped and given again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import methods
from harness import ROOT, machine, table_of

HIGH, MOST = 16, 10  # secrets 1 to HIGH; a game ends after MOST guesses
NUM_DEMONSTRATIONS, NUM_PROMPTS = 20_000, 4096
NUM_GAMES = 64  # played against each secret to measure
PROMPT = [{"role": "user", "content": "Guess my number."}]
OPTIONS = {"high": HIGH, "max_guesses": MOST, "has_rules": False, "cost": 0.1}
PER_TURN = {"max_turns": MOST, "max_new_tokens_per_turn": 4, "num_workers": 0}
MAX_NEW_TOKENS = 160

# train_on all: to say what the game answers, a model has to find the bounds that its earlier guesses have left
SFT = ["--stage=sft", "--model.preset=demo", "--model.vocab_size=320", "--model.dtype=float32", "--data.train_on=all",
       "--data.max_length=160", "--train.max_steps=400", "--train.per_device_train_batch_size=64",
       "--train.learning_rate=3e-3", "--train.warmup_ratio=0.1", "--train.logging_steps=100"]
PPO = ["--stage=ppo", "--model.dtype=float32", "--data.eval_fraction=0", "--data.max_prompt_length=40",
       "--environment.factory=builtin:guess_number", f"--environment.options={json.dumps(OPTIONS)}",
       *(f"--environment.{name}={value}" for name, value in PER_TURN.items()),
       f"--ppo.sampling.max_new_tokens={MAX_NEW_TOKENS}", "--train.max_steps=120",
       "--train.per_device_train_batch_size=256", "--train.warmup_ratio=0.05", "--train.logging_steps=20",
       "--roles.actor.learning_rate=3e-3", "--roles.critic.learning_rate=3e-3", "--ppo.num_ppo_epochs=2",
       "--ppo.num_minibatches=4", "--ppo.critic_warmup_steps=1", "--ppo.kl_coef=0",
       "--ppo.missing_eos_penalty=1"]  # a game given up, by a turn that does not end, is worth 0: more than one lost


class Play(NamedTuple):
    """How a player does: mean turns (a game that is lost has MOST), and the share of games won."""

    turns: float
    won: float


# -- data --------------------------------------------------------------------------------------------------------------


def random_game(rng: random.Random) -> list[dict]:
    """A game as it is not to be played: any number every time."""
    secret, messages = rng.randint(1, HIGH), list(PROMPT)
    for turn in range(MOST):
        guess = rng.randint(1, HIGH)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or turn == MOST - 1:
            break
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
    return messages


def write_data(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = {"games": [{"messages": random_game(rng)} for _ in range(NUM_DEMONSTRATIONS)],
            "secrets": [{"prompt": PROMPT, "secret": 1 + i % HIGH} for i in range(NUM_PROMPTS)]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


# -- one seed ----------------------------------------------------------------------------------------------------------


def train(folder: Path, seed: int, sft: Sequence[str] = (), ppo: Sequence[str] = ()) -> dict[str, float]:
    """Seconds of the two runs below `folder`. sft, ppo: words that override the settings above."""
    if not (folder / "secrets.jsonl").exists():
        write_data(folder, seed)
    words = {"sft": [*SFT, f"--data.sources=[{folder}/games.jsonl]", *sft],
             "ppo": [*PPO, f"--data.sources=[{folder}/secrets.jsonl]", f"--model.model_name_or_path={folder}/sft",
                     *ppo]}
    return {name: methods.launch([*given, "--seed", str(seed)], folder / name) for name, given in words.items()}


def measured(model: str, temperature: float, seed: int, num_games: int = NUM_GAMES) -> Play:
    """A model's games against every secret: num_games each, one where it is greedy."""
    from hybrid_rlhf.data import chat
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.environments.open import EnvironmentConfig, open_environments
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.models.tokenizer import load_tokenizer
    from hybrid_rlhf.rollout import Prompts
    from hybrid_rlhf.rollout.episodes import EpisodePlayer
    from hybrid_rlhf.training import scored_answers

    factory, tokenizer = "builtin:guess_number", load_tokenizer(model)
    actor = scored_answers.open_actor(ModelConfig(model, dtype="float32"), tokenizer)
    actor.episodes = EpisodePlayer(open_environments(factory, [], OPTIONS), EnvironmentConfig(factory, **PER_TURN),
                                   tokenizer)
    secrets = [secret for secret in range(1, HIGH + 1) for _ in range(num_games if temperature else 1)]
    asked, text = chat.encode_prompt(tokenizer, PROMPT), chat.compose_prompt(tokenizer, PROMPT).shown
    prompts = Prompts([asked] * len(secrets), [text] * len(secrets),
                      {"prompt": [PROMPT] * len(secrets), "secret": secrets})
    with actor.inference():
        sampling = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=temperature)
        episodes = actor.generate(prompts, sampling, seed).episodes
    has_won = [episode.messages[-1]["content"] == "right" for episode in episodes]
    turns = [len(e.turn_ends) if won else MOST for e, won in zip(episodes, has_won, strict=True)]
    return Play(sum(turns) / len(turns), sum(has_won) / len(has_won))


def run(work: Path, seed: int) -> dict:
    folder = work / f"seed{seed}"
    seconds = train(folder, seed)
    return {"seed": seed, "seconds": seconds, **{
        (stage, how): measured(f"{folder}/{stage}/model", temperature, seed)
        for stage in ("sft", "ppo") for how, temperature in (("sampled", 1.0), ("greedy", 0.0))}}


def cells_of(found: dict) -> list[str]:
    plays = [found[stage, how] for how in ("sampled", "greedy") for stage in ("sft", "ppo")]
    return [f"PPO, seed {found['seed']}", *(f"{play.turns:.2f} ({play.won:.0%})" for play in plays),
            " + ".join(f"{seconds:.0f}" for seconds in found["seconds"].values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "games")
    options = parser.parse_args()
    print(machine(), "\n", flush=True)
    rows = [cells_of(run(options.work.resolve(), seed)) for seed in map(int, options.seeds.split(","))]
    print(table_of(("model", "sampled, before", "after", "greedy, before", "after", "seconds (SFT + PPO)"), rows))


if __name__ == "__main__":
    main()
