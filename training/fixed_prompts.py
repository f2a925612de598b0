"""Fixed-prompt samples: a run's answers to a few held-out prompts, before its first step and after its last.

Answers are greedy, so that a difference between the two comes from the model and not from sampling.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import print_main
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.data import collate
from hybrid_rlhf.data.datasets import StageData
from hybrid_rlhf.data.turns import IMAGE_SHOWN
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.models.images import reader_of
from hybrid_rlhf.models.tokenizer import completion_text
from hybrid_rlhf.rewards import RewardSource, part_scores
from hybrid_rlhf.roles import Actor, Reward
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.collect import pictured, shown

MAX_NEW_TOKENS, START_OF_TEXT = 64, 16  # tokens: of an answer without a setting; of the start of a text without prompt
Answers = Callable[[], list[dict]]


def of_policy(actor: Actor, prompts: Prompts, sampling: SamplingConfig, source: RewardSource | None = None,
              ends: Sequence[bool] = ()) -> Answers:
    """One greedy answer to each prompt, with its score where there is a source (None where that skipped it).

    ends: which of them are expected to end within max_new_tokens; these also report whether they "ended".
    """
    greedy = replace(sampling, num_samples=1, temperature=0.0)

    @torch.no_grad()
    def answers() -> list[dict]:
        with actor.inference():
            rollout = actor.generate(prompts, greedy, 0)
        scores = [{}] * len(rollout) if source is None else [
            {"score": None if s != s else s} for s in part_scores(source, rollout).tolist()]
        ended = [{"ended": has if can else None} for has, can in zip(rollout.has_eos.tolist(), ends, strict=False)]
        texts = [rollout.shown(i) for i in range(len(rollout))]
        return [{"prompt": prompt, **pictured(rollout.prompts, i), "completion": text, **end, **score}
                for i, (prompt, text, end, score) in enumerate(
                    zip(shown(rollout.prompts), texts, ended or [{}] * len(scores), scores, strict=True))]

    return answers


def of_demonstrations(actor: Actor, data: StageData, count: int, max_length: int) -> Answers | None:
    """Answers to the prompts of held-out rows (of training rows where none are held out) of an offline stage, as long
    as fit into `max_length` tokens, at most MAX_NEW_TOKENS. A model that cannot be sampled has none, with one line."""
    rows = _first(data, count)
    if not rows:
        return None
    prompts = _asked(rows, actor.tokenizer)
    limit = max(1, min(MAX_NEW_TOKENS, max_length - max(map(len, prompts.ids))))
    right = [_answer_of(row)[:limit] for row in rows]  # a longer one is cut, and has no end
    ends = [bool(answer) and answer[-1] in actor.engine.eos_ids for answer in right]
    sample = of_policy(actor, prompts, SamplingConfig(max_new_tokens=limit), ends=ends)

    def answers() -> list[dict]:
        try:
            return sample()
        except UserError as error:
            print_main(f"the report has no answers of this model: {error}")
            return []

    return answers


def of_reward(reward: Reward, tokenizer, data: StageData, count: int) -> Answers | None:  # noqa: ANN001
    """The scores of both responses of held-out pairs."""
    rows = _first(data, count)
    if not rows:
        return None
    batch = collate.collate_pairs(rows, reward.engine.pad_id).sequences  # the chosen ones, then the rejected ones

    def ids_of(mask: Tensor) -> list[list[int]]:
        return [ids[of].tolist() for ids, of in zip(batch.input_ids, mask, strict=True)]

    asked = ids_of(batch.attention_mask.bool() & ~batch.loss_mask)
    prompts = _as_prompts(asked, batch.images or [()] * len(asked), tokenizer)
    texts = shown(prompts)
    responses = [completion_text(tokenizer, ids) for ids in ids_of(batch.loss_mask)]

    def answers() -> list[dict]:
        return [{"prompt": p, **pictured(prompts, i), "completion": c, "score": s,
                 "side": ("chosen", "rejected")[i >= len(rows)]}
                for i, (p, c, s) in enumerate(zip(texts, responses, reward.score(batch).tolist(), strict=True))]

    return answers


def first_prompts(data: StageData, count: int) -> Prompts | None:
    """The first held-out prompts of a stage that samples."""
    rows = _first(data, count)
    return collate.collate_prompts(rows) if rows else None


def prompts_of(data: StageData, tokenizer, count: int) -> Prompts:  # noqa: ANN001
    """The first `count` distinct held-out prompts of an offline stage (of training prompts where none are held out)."""
    rows: dict[tuple, dict] = {}
    for row in _first(data, len(data.held_out) or len(data.train)):
        rows.setdefault((*_prompt_of(row), *map(tuple, row.get("images", ()))), row)
        if len(rows) == count:
            break
    return _asked(list(rows.values()), tokenizer)


def _first(data: StageData, count: int) -> list[dict]:
    rows = data.held_out if len(data.held_out) else data.train
    return [rows[i] for i in range(min(count, len(rows)))]


def _asked(rows: Sequence[dict], tokenizer) -> Prompts:  # noqa: ANN001
    """The prompts of rows of an offline stage."""
    ids, images = zip(*(_with_images(_prompt_of(row), row, tokenizer) for row in rows), strict=True)
    return _as_prompts(ids, images, tokenizer)


def _as_prompts(ids: Sequence[list[int]], images: Sequence[tuple[ImageRef, ...]], tokenizer) -> Prompts:  # noqa: ANN001
    """Prompts with their texts as the model reads them, special tokens too."""
    texts = tokenizer.batch_decode(list(ids), skip_special_tokens=False)
    for i, of in enumerate(images):
        for image in of:
            texts[i] = texts[i].replace(reader_of(tokenizer).read(image).text, IMAGE_SHOWN, 1)
    return Prompts(list(ids), texts, images=list(images))


def _with_images(ids: list[int], row: dict, tokenizer) -> tuple[list[int], tuple[ImageRef, ...]]:  # noqa: ANN001
    """The tokens of a prompt up to an image that is not whole, and the images before it: a row's answers and what
    follows them are cut off."""
    images = tuple(ImageRef(*image) for image in row.get("images", ()))
    if not images:
        return ids, images
    reader = reader_of(tokenizer)
    places = [n for n, i in enumerate(ids) if i in reader.token_ids]
    ends = [0, *accumulate(reader.read(image).num_tokens for image in images)]
    whole = bisect_right(ends, len(places)) - 1
    return ids[:places[ends[whole]]] if ends[whole] < len(places) else ids, images[:whole]


def _prompt_of(row: dict) -> Sequence[int]:
    """The tokens before the first trained one; the beginning of a text that is trained on as a whole."""
    ids = row.get("input_ids", row.get("chosen_ids"))
    length = row["num_prompt_tokens"] if "num_prompt_tokens" in row else next(
        (i for i, is_trained in enumerate(row["loss_mask"]) if is_trained), len(ids))
    return list(ids[:length if length > 1 else min(START_OF_TEXT, max(1, len(ids) // 2))])


def _answer_of(row: dict) -> list[int]:
    """The row's answer to that prompt: the first run of trained tokens, or the chosen answer."""
    ids = row.get("input_ids", row.get("chosen_ids"))
    if "num_prompt_tokens" in row:
        return list(ids[row["num_prompt_tokens"]:])
    trained = list(row["loss_mask"])
    start = next((i for i, is_trained in enumerate(trained) if is_trained), len(ids))
    return list(ids[start:next((i for i in range(start, len(ids)) if not trained[i]), len(ids))])
