"""Ranks of a tensor-parallel group generate as one: the same requests, the same tokens, errors raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import ProcessGroup

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import RankGroup
from hybrid_rlhf.engine.decode.sampling import SamplingConfig


def as_group(tp: RankGroup | ProcessGroup | None) -> RankGroup | None:
    """`tp` as a group of two or more ranks, or None."""
    ranks = tp if tp is None or isinstance(tp, RankGroup) else RankGroup(tp)
    return None if ranks is None or ranks.degree == 1 else ranks


def all_agree(ranks: RankGroup, answer: Callable[[], object]) -> list:
    """answer() of each rank of the group (numbers, strings, lists). An error on one of them is raised on all."""
    failure, value = None, None
    try:
        value = answer()
    except Exception as error:  # sent to the others before it is raised
        failure = error
    answers = ranks.exchange([value, None if failure is None else str(failure), isinstance(failure, UserError)])
    if failure is not None:
        raise failure
    for i, (_, error, is_users) in enumerate(answers):
        if error is not None:
            raise (UserError if is_users else RuntimeError)(f"rank {i} of the tensor-parallel group: {error}")
    return [value for value, _, _ in answers]


@contextmanager
def propagate_errors(ranks: RankGroup) -> Iterator[None]:
    """An error in the block on this rank alone ends the group, so that the others raise too instead of waiting. A
    UserError is raised on all ranks by construction and leaves the group usable."""
    try:
        yield
    except UserError:
        raise
    except BaseException:
        ranks.abandon()
        raise


def draw_together(ranks: RankGroup, asked: Sequence[tuple], sampling: SamplingConfig, check: Callable[[], None],
                  draw: Callable[[list[tuple]], list]) -> list:
    """This rank's requests (number, prompt, limit, seed), drawn by all ranks with those of the others; equal ones once.

    check: raises UserError where this rank's requests cannot be drawn. draw: runs requests, the same ones on every
    rank, and returns them with their tokens.
    """

    def checked_requests() -> list:
        check()
        return [repr(sampling), [list(request) for request in asked]]

    with propagate_errors(ranks):
        answers = all_agree(ranks, checked_requests)
        if len({settings for settings, _ in answers}) > 1:
            raise UserError("the ranks of a tensor-parallel group were given different sampling settings; "
                            "give all the same")
        everyones = {_name(request): tuple(request) for _, requests in answers for request in requests}
        drawn = dict(zip(everyones, draw(list(everyones.values())), strict=True))
        if len(set(all_agree(ranks, lambda: hash(tuple(t for request in drawn.values() for t in request.tokens))))) > 1:
            raise RuntimeError("the ranks of a tensor-parallel group drew different tokens")
        return [drawn[_name(request)] for request in asked]


def _name(request: Sequence) -> tuple:
    number, prompt, limit, seed = request
    return number, tuple(prompt), limit, seed
