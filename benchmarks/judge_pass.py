"""Rollouts and a judge's questions about them on one base: two passes beside one batch, in tokens per second.

    python benchmarks/judge_pass.py [--shape llama134m] [--rows 32] [--repeats 3] [--cpu-time] [--quick] [--json FILE]

Two passes: the policy (a LoRA adapter on the base) samples all responses, then the judge (the base, adapter off) writes
a reply to one question about each, as reward.judge.model base does. One batch: each question enters the policy's batch
as soon as its response has ended, while others are still decoded. There every row runs the policy's adapter, so that
the judge's tokens are not those of the base: the engine has no choice of an adapter by row, and this measures what one
would be worth at most. Lengths of responses are ragged (16 to --response tokens), a reply has 24, all of random tokens.
On a machine without other work: `python benchmarks/judge_pass.py --repeats 5`; else add --cpu-time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from harness import Times, add_clock, alternate, machine, parse, parser_of, sizes_of, write_rows
from random_models import LORA, SHAPES, Tokenizer

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.models.lora import Adapters, add_lora
from hybrid_rlhf.training import builders

PROMPT, RUBRIC, REPLY = 32, 160, 24  # tokens


class Sides:
    """Both ways over the same requests. num_tokens: that each of them draws."""

    def __init__(self, shape: str, rows: int, longest: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        kind, settings = SHAPES[shape]
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        add_lora(model, LORA, "actor")
        adapters, tokenizer = Adapters(model), Tokenizer(config.vocab_size)
        model.requires_grad_(False)
        self.policy: HybridEngine = builders.policy_engine(model, tokenizer, 1, lambda: adapters.use("actor"))
        self.judge: HybridEngine = builders.policy_engine(model, tokenizer, 1, lambda: adapters.use(None))
        self.policy.eos_ids = self.judge.eos_ids = []  # lengths are the benchmark's
        draw = random.Random(0)
        self.prompts = [[draw.randrange(3, config.vocab_size) for _ in range(PROMPT)] for _ in range(rows)]
        self.rubric = [draw.randrange(3, config.vocab_size) for _ in range(RUBRIC)]
        self.limits = [draw.randint(min(16, longest), longest) for _ in range(rows)]
        self.capacity = PROMPT + longest + RUBRIC + REPLY
        self.sampling = SamplingConfig(max_new_tokens=longest)
        self.num_tokens = sum(self.limits) + rows * REPLY

    def _question(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        return [*self.rubric, *prompt, *response]

    def two_passes(self) -> None:
        with self.policy.inference():
            drawn = self.policy.generate(self.prompts, self.sampling, 0, limits=self.limits).tokens
        asked = [self._question(*each) for each in zip(self.prompts, drawn, strict=True)]
        with self.judge.inference():
            self.judge.generate(asked, self.sampling, 0, limits=[REPLY] * len(asked))

    def one_batch(self) -> None:
        with self.policy.inference():
            turns = self.policy.open_turns(2 * len(self.prompts), self.capacity, self.sampling)
            for i, (prompt, limit) in enumerate(zip(self.prompts, self.limits, strict=True)):
                turns.submit(Request(i, prompt, limit, may_go_on=True))
            while turns.is_busy:
                for request in turns.step():
                    turns.release(request)
                    if request.number < len(self.prompts):
                        turns.submit(Request(len(self.prompts) + request.number,
                                             self._question(request.prompt, request.tokens), REPLY, may_go_on=True))


def row_of(name: str, times: Times, sides: Sides) -> dict:
    return {"row": name, "seconds": times, "tokens_per_second": round(sides.num_tokens / times.median, 1),
            "kv_mib": round(max(sides.policy.kv_bytes, sides.judge.kv_bytes) / 2**20, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = add_clock(parser_of(__doc__, repeats=3), threads=None)
    parser.add_argument("--shape", choices=SHAPES, default="llama134m")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--response", type=int, default=128)
    options = parse(parser, argv)
    rows, longest = sizes_of(options, options.rows, options.response)
    sides = Sides("tiny" if options.quick else options.shape, rows, longest)
    times = alternate(options.repeats, sides.two_passes, sides.one_batch)
    lines = [row_of(name, each, sides) for name, each in zip(("two passes", "one batch"), times, strict=True)]
    for line in write_rows(({**line, "machine": machine()} for line in lines), options.json):
        print(line)


if __name__ == "__main__":
    main()
