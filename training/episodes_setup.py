"""Open the tools and environments of a run, and check them against the model's chat template and lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import print_main
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.added_turns import check_turns
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.datasets import StageData
from hybrid_rlhf.data.messages import with_tools
from hybrid_rlhf.environments.contract import Environments
from hybrid_rlhf.environments.isolated import open_isolated
from hybrid_rlhf.environments.open import EnvironmentConfig, open_environments
from hybrid_rlhf.models.load import ModelConfig, configured_positions
from hybrid_rlhf.models.tokenizer import Tokenizer
from hybrid_rlhf.models.tool_calls import check_tools
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from hybrid_rlhf.training import builders


def open_of(section: EnvironmentConfig, *, raw: bool) -> Environments | None:
    """Open the environments that the settings name; None where there are none. UserError for what cannot be opened.
    raw: data.raw."""
    if not section.is_given:
        return None
    check(not raw, "data.raw is true, and what an environment says is written by the chat template; leave data.raw out")
    if section.isolate:
        return open_isolated(section)
    return open_environments(section.factory, section.tool_list, section.options)


def player_of(section: EnvironmentConfig, environments: Environments | None, tokenizer: Tokenizer
              ) -> EpisodePlayer | None:
    """The player that samples episodes with this tokenizer; UserError for a chat template that cannot write them."""
    if environments is None:
        return None
    check(bool(tokenizer.chat_template), "environment: the model has no chat template, by which messages are written; "
                                         "give data.chat_template, or train it with --stage sft first")
    if any(kind.schemas for kind in environments.kinds):
        check_tools(tokenizer)
    asked = [("tool", True) for kind in environments.kinds if kind.schemas]
    asked += [("user", bool(kind.schemas)) for kind in environments.kinds if kind.has_step]
    rewritten = {role: how for role, has_tools in asked if (how := check_turns(tokenizer, role, has_tools))}
    for role, how in rewritten.items():
        print_main(f"history: the chat template rewrites earlier turns when messages of role {role} follow ({how}); in "
                   "episodes they stay as they were sampled; chat, server and export use the template as it is")
    return EpisodePlayer(environments, section, tokenizer)


def first_rows(environments: Environments, rows: Sequence[Mapping]) -> dict[str, Mapping]:
    """The first row of each kind of environment; a warning where rows have tools of their own, which are never called.
    UserError where a column is missing, or a row names an unknown environment."""
    environments.check_columns([name for name in rows[0] if name not in ("prompt_ids", "text")])
    kinds = {environments.of(rows[0]).name: rows[0]}
    for each in rows if environments.is_chosen_by_row else ():
        kinds.setdefault(environments.of(each).name, each)
    for row in kinds.values():
        row_tools = row["prompt"][0].get("tools") if isinstance(row["prompt"], list) else None
        if row_tools:
            what = "are not shown" if environments.of(row).schemas else "are shown, and no call of theirs is made"
            print_main(f"warning: rows have tools of their own, which {what}: what the model may call is "
                       "environment.tools and the environment's methods; leave the column tools out")
            break
    return kinds


def check_rows(environments: Environments, data: StageData, tokenizer: Tokenizer, model: ModelConfig,
               longest: int, option: str) -> None:
    """UserError where a row, held-out or not, names no environment, where rows lack a column, or where a prompt with
    the tools in it is too long. longest: tokens of a prompt and a response; option: its name in messages."""
    for row in data.held_out if environments.is_chosen_by_row else ():
        environments.of(row)
    for first in first_rows(environments, data.train).values():
        schemas = environments.of(first).schemas
        if not schemas:
            continue
        asked = with_tools(chat.as_turn(tokenizer, first["prompt"]), schemas)
        try:
            extra = len(chat.encode_prompt(tokenizer, asked)) - len(first["prompt_ids"])
        except SkipRow as error:
            raise UserError(f"environment: a prompt with the tools in it cannot be written: {error}; give another "
                            "data.chat_template") from error
        names = ", ".join(schema["function"]["name"] for schema in schemas)
        kind = f" of {environments.of(first).name}" if environments.is_chosen_by_row else ""
        print_main(f"tools{kind}: {names} ({extra} tokens of each prompt)")
        folder = builders.model_folder(model.model_name_or_path or "")
        limit = configured_positions(replace(model, model_name_or_path=folder))
        check(limit is None or longest + extra <= limit,
              f"{option} is {longest}, and the tools take {extra} tokens of each prompt beside it, but "
              f"{model.model_name_or_path} has {limit} positions; lower {option} to {(limit or 0) - extra} or less")
