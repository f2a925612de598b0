"""Collate rows into batches. Masks come from lengths, never from comparing ids with the pad id: pad may equal eos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.rollout import Prompts


@dataclass
class PairBatch:
    """P preference pairs: sequences of 2P rows, all chosen ones first, then all rejected ones; margin (P,).

    The sequences' loss_mask marks response tokens with EOS.
    """

    sequences: SequenceBatch
    margin: Tensor

    def __len__(self) -> int:
        return len(self.margin)

    def to(self, device: torch.device | str) -> PairBatch:
        return PairBatch(self.sequences.to(device), self.margin.to(device))


@dataclass
class LabelledBatch:
    """B responses with labels (B,) bool, whether they are desirable; loss_mask marks response tokens with EOS.

    mismatched: prompts of these rows, each with a response to another prompt (`mismatches`), cut to the maximum length;
    rows are left out if the batch has no other prompt.
    """

    sequences: SequenceBatch
    mismatched: SequenceBatch
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def collate_sft(rows: Sequence[dict], pad_id: int, packing_length: int | None = None) -> SequenceBatch:
    """Rows {input_ids, loss_mask} -> (B, T). With packing_length several share a row of at most that many tokens.

    Packed: position_ids restart at 0 with every sample (else None), and no sample's first token is predicted, since its
    predecessor belongs to another sample.
    """
    groups, images = [[i] for i in range(len(rows))], _images(rows)
    if images is not None:
        packing_length = None
    if packing_length is not None:
        groups = pack([len(r["input_ids"]) for r in rows], packing_length)
    ids = [[t for i in g for t in rows[i]["input_ids"]] for g in groups]
    marks = [[bool(m) and j > 0 for i in g for j, m in enumerate(rows[i]["loss_mask"])] for g in groups]
    lengths = torch.tensor([len(r) for r in ids])
    positions = None
    if packing_length is not None:
        positions = pad_right([[j for i in g for j in range(len(rows[i]["input_ids"]))] for g in groups], 0)
    return SequenceBatch(pad_right(ids, pad_id), length_mask(lengths), pad_right(marks, False, torch.bool), positions,
                         images=images)


def _images(rows: Sequence[dict]) -> list[tuple[ImageRef, ...]] | None:
    """The images of each row; None where no row has one."""
    images = [tuple(ImageRef(*image) for image in row.get("images", ())) for row in rows]
    return images if any(images) else None


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack rows into bins of at most `capacity` tokens, by first-fit decreasing; a longer row has its own bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = next((b for b, left in enumerate(room) if left >= lengths[i]), None)
        if fit is None:
            bins.append([])
            room.append(capacity)
            fit = len(bins) - 1
        bins[fit].append(i)
        room[fit] -= lengths[i]
    return bins


def collate_pairs(rows: Sequence[dict], pad_id: int) -> PairBatch:
    """Rows {chosen_ids, rejected_ids, num_prompt_tokens, num_prompt_tokens_rejected, chosen_mask, rejected_mask,
    margin} -> PairBatch.

    The last four may be missing: the same prompt tokens, responses of one turn, and no margin.
    """
    ids = [r["chosen_ids"] for r in rows] + [r["rejected_ids"] for r in rows]
    prompts = [r["num_prompt_tokens"] for r in rows]
    prompts += [r.get("num_prompt_tokens_rejected", r["num_prompt_tokens"]) for r in rows]
    marks = [r.get(f"{side}_mask") for side in ("chosen", "rejected") for r in rows]
    mask = length_mask(torch.tensor([len(r) for r in ids]))
    answers = _responses(mask, prompts, marks)
    margin = torch.tensor([float(r.get("margin") or 0.0) for r in rows])
    images = _images([*rows, *rows])  # both answers follow the same prompt
    return PairBatch(SequenceBatch(pad_right(ids, pad_id), mask, answers, images=images), margin)


def _responses(mask: Tensor, starts: Sequence[int], marks: Sequence[list[bool] | None]) -> Tensor:
    """(B, T) response tokens: those that a row marks, else all after its prompt."""
    answers = mask & ~length_mask(torch.tensor(starts), mask.shape[1])
    for i, mark in enumerate(marks):
        if mark is not None:
            answers[i, : len(mark)] &= torch.tensor(mark, dtype=torch.bool)
    return answers


def collate_labelled(rows: Sequence[dict], pad_id: int, max_length: int) -> LabelledBatch:
    """Rows {input_ids, num_prompt_tokens, loss_mask, label} -> LabelledBatch. loss_mask may be missing: a response of
    one turn. max_length: of a mismatched row, in tokens."""
    starts = [r["num_prompt_tokens"] for r in rows]
    prompts = [list(r["input_ids"][:n]) for r, n in zip(rows, starts, strict=True)]
    answers = [list(r["input_ids"][n:]) for r, n in zip(rows, starts, strict=True)]
    marks = [list(r["loss_mask"][n:]) if "loss_mask" in r else [True] * (len(r["input_ids"]) - n)
             for r, n in zip(rows, starts, strict=True)]

    images = _images(rows)
    asked = prompts if images is None else list(zip(prompts, images, strict=True))

    def batch(pairs: list[tuple[int, int]], longest: int | None = None) -> SequenceBatch:
        """The prompt of row i with the response of row j, for each (i, j)."""
        ids = [[*prompts[i], *answers[j]][:longest] for i, j in pairs]
        trained = [[*[False] * len(prompts[i]), *marks[j]][:longest] for i, j in pairs]
        mask = length_mask(torch.tensor([len(r) for r in ids]))
        return SequenceBatch(pad_right(ids, pad_id), mask, pad_right(trained, False, torch.bool),
                             images=images and [images[i] for i, _ in pairs])  # they are in prompts alone

    return LabelledBatch(batch([(i, i) for i in range(len(rows))]), batch(mismatches(asked), max_length),
                         torch.tensor([bool(r["label"]) for r in rows]))


def mismatches(prompts: Sequence, rows: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """(i, j) for each i of `rows` (all, if not given): j is the nearest row before i, cyclically, with another prompt:
    its tokens, with its images where there are some. Empty for a batch with one prompt.

    KTO's reference point is the KL on responses to other prompts (2402.01306, section 4); responses to the same prompt
    are what the loss itself changes.
    """
    size = len(prompts)
    pairs = [(i, next((j % size for j in range(i - 1, i - size, -1) if prompts[j % size] != prompts[i]), None))
             for i in (range(size) if rows is None else rows)]
    return [(i, j) for i, j in pairs if j is not None]


def collate_prompts(rows: Sequence[dict]) -> Prompts:
    """Rows {prompt_ids, text, ...} -> Prompts; every other key becomes a column, None where a row lacks it."""
    names = dict.fromkeys(name for r in rows for name in r if name not in ("prompt_ids", "text"))
    columns, images = {name: [r.get(name) for r in rows] for name in names}, _images(rows)
    if images is not None:
        columns["images"] = images
    return Prompts([list(r["prompt_ids"]) for r in rows], [r["text"] for r in rows], columns, images or [])
