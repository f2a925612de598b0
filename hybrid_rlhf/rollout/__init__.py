"""Sampling and scoring of responses: the record of a rollout, and how it is collected."""

from hybrid_rlhf.rollout.record import Prompts, Rollout, Totals

__all__ = ["Prompts", "Rollout", "Totals"]
