"""The settings of a judge: its model or address, its rubric and mode, its budget."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.options import check_values, one_of, within

ABSOLUTE, PAIRWISE, RANKING = "absolute", "pairwise", "ranking"
MODES = (ABSOLUTE, PAIRWISE, RANKING)
VERDICT, PROBABILITY = "verdict", "probability"
DTYPES = ("auto", "float32", "bfloat16", "float16")
ON_FAILURE = ("mean", "skip", "stop")
BASE = "base"  # in the place of a model: the policy's own, without its adapter
MAX_TOGETHER = 26  # responses in one prompt: one letter each


@dataclass(frozen=True)
class JudgeConfig:
    """A judge: a language model that reads a rubric and the responses.

    Attributes:
        model: Folder, run or hub id of a chat model, which is loaded beside the others and has its own chat template;
            base for the model that the policy starts from, or the folder of an adapter on it: both are computed on the
            policy's own weights, which model.lora.r keeps frozen, and load none.
        url: In place of model: an OpenAI-compatible address, such as http://localhost:8000/v1.
        api_model: Name of the model at url.
        api_key_env: Name of the environment variable that holds the key for url; never the key itself.
        api_options: Further fields of a request to url; null leaves one of ours out.
        rubric: YAML file with weighted items, or the same as a mapping; null takes a general one.
        images: Whether url is sent the images of prompts, as data URLs: api_model must read images. A model here that
            reads images always gets them; other judges read [image].
        template: File of the prompt, a copy of one of hybrid_rlhf/rewards/judge/templates that you have changed; null
            takes the one of the mode.
        mode: absolute (each response by itself), pairwise (against others of its prompt, in both orders; the score is
            the share of wins) or ranking (all responses to a prompt together, relative scores).
        score: verdict (the judge writes its verdict) or probability (that of the verdict's word; nothing is written).
        opponents: With pairwise, how many others of its group each response meets at least; null: all of them.
        max_new_tokens: Longest reply, in tokens.
        temperature: Of the judge's replies; 0 is greedy decoding.
        retries: How often a judge whose reply cannot be read is told so and asked again.
        on_failure: What a response without a verdict gets: mean (that of the others of its prompt, or else of all),
            skip (no score from the judge) or stop (the run ends).
        dtype: Of model's weights: auto, float32, bfloat16 or float16.
        load_in_4bit: Whether model's weights are kept in 4 bits (needs bitsandbytes).
        batch_size: Replies that model writes at once.
        concurrency: Requests to url at a time.
        timeout: Seconds that url may be silent during a request.
        http_retries: How often a request to url that is refused, or answered "too busy", is retried, each time after
            twice the wait.
        max_calls: Most questions that one process asks in a run, repeated ones counted; null: no bound.
        max_cost: Most that one process may spend in a run, in the unit of the next two; null: no bound.
        cost_per_1m_input: Price of a million tokens that url reads.
        cost_per_1m_output: Price of a million tokens that url writes.
        cache: Folder that keeps the judge's replies for later runs; null: they are kept while the run lasts.
    """

    model: str | None = None
    url: str | None = None
    api_model: str = "default"
    api_key_env: str | None = None
    api_options: dict[str, object] = field(default_factory=dict)
    rubric: dict | str | None = None
    images: bool = False
    template: str | None = None
    mode: str = one_of(ABSOLUTE, MODES)
    score: str = one_of(VERDICT, (VERDICT, PROBABILITY))
    opponents: int | None = within(None, "[1,")
    max_new_tokens: int = within(512, "[1,")
    temperature: float = within(0.0, "[0,")
    retries: int = within(1, "[0,")
    on_failure: str = one_of("mean", ON_FAILURE)
    dtype: str = one_of("auto", DTYPES)
    load_in_4bit: bool = False
    batch_size: int = within(16, "[1,")
    concurrency: int = within(8, "[1,")
    timeout: float = within(60.0, "(0,")
    http_retries: int = within(3, "[0,")
    max_calls: int | None = within(None, "[1,")
    max_cost: float | None = within(None, "[0,")
    cost_per_1m_input: float = within(0.0, "[0,")
    cost_per_1m_output: float = within(0.0, "[0,")
    cache: str | None = None

    def __post_init__(self) -> None:
        check(not (self.model and self.url), "reward.judge.model and reward.judge.url are both given; choose one")
        check_values(self, "reward.judge.")
        # not shown: it may be the key itself
        check(self.api_key_env is None or re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", self.api_key_env) is not None,
              "reward.judge.api_key_env is not the name of an environment variable in capitals; give the name, such as "
              "OPENAI_API_KEY, and never the key itself")
        check(not (self.images and self.model), "reward.judge.images is for reward.judge.url; a model here that reads "
                                                "images gets them anyway, so leave it out")
        check(self.mode != RANKING or self.score == VERDICT,
              "reward.judge.score is probability, and a ranking has no word of its own; choose verdict, or mode "
              "pairwise")
        check(self.opponents is None or self.mode == PAIRWISE,
              f"reward.judge.opponents is given, and mode is {self.mode}; it is for mode pairwise")

    def num_questions(self, num_prompts: int, num_samples: int) -> int:
        """The most questions about so many prompts with so many responses each. All items share a question; with score
        probability each item has its own, and this counts them as one."""
        if self.mode == RANKING:
            return num_prompts
        if self.mode == ABSOLUTE:
            return num_prompts * num_samples
        met = min(num_samples - 1, num_samples if self.opponents is None else self.opponents + self.opponents % 2)
        return num_prompts * num_samples * met  # half as many pairs, in both orders

    @property
    def is_given(self) -> bool:
        return bool(self.model or self.url)
