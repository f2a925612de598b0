"""hybrid-rlhf label: let a judge compare responses, and write preference pairs for --stage dpo and --stage reward."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_rlhf.core import config as settings
from hybrid_rlhf.core import own_files
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.core.options import check_values, one_of, within
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.data.sources import as_sources
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.rewards.judge.judge_config import PAIRWISE, JudgeConfig

if TYPE_CHECKING:
    from hybrid_rlhf.data.labels import Asked
    from hybrid_rlhf.rewards import RewardSource
    from hybrid_rlhf.training.labelling import Judged

KEEPS = ("all", "best_worst")
LOCK, WRITTEN = "lock", "written"  # files of the work folder: the second has the digests of written outputs
UNUSED = {"judge.opponents": "every two responses to a prompt are compared",
          "judge.on_failure": "pairs without a verdict are left out and counted"}


@dataclass(frozen=True)
class LabelConfig:
    """Preferences of a judge.

    Attributes:
        data: Prompts, perhaps with responses: a file, a folder, a hub id, or a list, as data.sources of the stages.
        output: File of JSON lines to write. The judge's replies and the samples are kept in the folder OUTPUT.work
            beside it, from which the same command continues.
        responses: Columns of data that hold responses: a text, messages, or a list of either each; one or a list. null:
            the answers that the format of the rows has (chosen and rejected, completions, ...), and none with model.
        model: Run, folder or hub id of the model whose samples are judged.
        dtype: Of model's weights: auto, float32, bfloat16 or float16.
        load_in_4bit: Whether model's weights are loaded in 4 bits (needs bitsandbytes).
        num_samples: Samples of each prompt.
        temperature: Divides the logits of model; 0 is greedy, and all samples are the same.
        top_p: Samples come from the smallest set of tokens whose probability reaches this.
        max_new_tokens: Longest sample, in tokens.
        max_prompt_length: Longest prompt, in tokens of model; longer ones are left out.
        raw: Whether string prompts stay as they are also where there is a chat template, as data.raw of the stages.
        judge: The judge; mode pairwise compares every two responses in both orders, absolute grades each by itself,
            ranking shows all responses to a prompt together.
        reward_model: In place of a judge, a finished reward run or a sequence-classification model.
        keep: Which pairs are written: all of those with a better response, or best_worst, one of each prompt.
        min_margin: Pairs whose scores differ by less are left out, as ties are.
        margin: Whether the difference of the scores is written as the column margin, which --stage reward trains on.
        num_prompts: At most so many prompts are judged; null: all of them.
        batch_size: Prompts that are judged at a time.
        partial: Whether the pairs of the prompts that have been judged are written where the judge fails (a spent
            budget, an address that is gone); otherwise nothing is written then.
        seed: Seed of the samples, and of the judge.
    """

    data: list[dict | str] | dict | str | None = None
    output: str | None = None
    responses: list[str] | str | None = None
    model: str | None = None
    dtype: str = "auto"
    load_in_4bit: bool = False
    num_samples: int = 2
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    max_prompt_length: int = within(1024, "[2,")
    raw: bool = False
    judge: JudgeConfig = field(default_factory=lambda: JudgeConfig(mode=PAIRWISE))
    reward_model: str | None = None
    keep: str = one_of("all", KEEPS)
    min_margin: float = within(0.0, "[0,")
    margin: bool = False
    num_prompts: int | None = within(None, "[1,")
    batch_size: int = within(16, "[1,")
    partial: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", as_sources(self.data))
        check(bool(self.data), "no data; give --data FILE with prompts")
        check(self.output is not None and self.output.endswith(".jsonl"),
              f"output is {self.output}; give --output FILE.jsonl, where the pairs are written")
        check(self.judge.is_given != bool(self.reward_model),
              "no judge; give --judge.model, --judge.url or --reward_model" if not self.reward_model else
              "judge and reward_model are both given; choose one")
        check_values(self, "")
        if self.model:
            check(self.num_samples > 1 or self.responses is not None,
                  "num_samples is 1, and a pair has two responses; sample more, or name columns by responses")
            check(self.temperature > 0 or self.num_samples == 1,
                  "temperature is 0, so all samples of a prompt are the same; give a positive one")
        self.sampling  # noqa: B018 - its own checks

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(self.max_new_tokens, temperature=self.temperature, top_p=self.top_p,
                              num_samples=self.num_samples)

    @property
    def columns(self) -> list[str] | None:
        """The columns with responses, as a list; None: by the format of the rows."""
        return [self.responses] if isinstance(self.responses, str) else self.responses

    @property
    def work(self) -> Path:
        """The folder of the judge's replies and the samples."""
        return Path(f"{self.output}.work")


def parse(argv: list[str] | None) -> LabelConfig:
    """The command's options."""
    config, _ = settings.parse(LabelConfig, list(sys.argv[2:] if argv is None else argv), prog="hybrid-rlhf label",
                               description=(__doc__ or "").strip(), unused=UNUSED)
    return config  # type: ignore[return-value]  # parse knows no class


def _named(error: UserError) -> UserError:
    """The error with this command's names of the judge's options."""
    return type(error)(str(error).replace("reward.judge", "judge")) if "reward.judge" in str(error) else error


def label(config: LabelConfig) -> Judged:
    """Read, sample, judge and write; returns the counts and the pairs."""
    from hybrid_rlhf.run.runfile import claim, release
    from hybrid_rlhf.training import labelling

    lost, tally = Counter[str](), labelling.Judged()
    check(world_size() == 1, "label runs in one process; start it without torchrun or deepspeed")
    _check_place(config)
    asked = _asked(config, lost)
    source = _source(config)
    config.work.mkdir(parents=True, exist_ok=True)
    claim(config.work, LOCK)
    try:
        own_files.clear_unfinished(config.work)
        cut = _sampled(config, asked, lost) if config.model else 0
        few = sum(len(each.responses) < 2 for each in asked)
        lost.update({labelling.FEW: few} if few else {})
        check(few < len(asked), f"label: no prompt has two different responses{_reasons(lost)}; name a model that "
                                "samples them by --model, or columns that hold them by --responses")
        _judge(config, asked, source, tally)
    finally:
        release(config.work)
    changed = f", {tally.changed} changed with the order of the two" if tally.ordered else ""
    check(bool(tally.rows), f"label: no pair has a better response ({tally.ties} ties, {tally.failures} without a "
                            f"verdict, of {tally.compared}{changed}){_reasons(lost)}; nothing was written, try another "
                            "judge or rubric")
    _write(config, tally.rows)
    for line in (*labelling.lines_of(tally, source), *_left_out(lost, cut, config), f"written to {config.output}"):
        print(line)
    return tally


def _source(config: LabelConfig) -> RewardSource:
    """The judge, or the reward model in its place; reads no weights."""
    from hybrid_rlhf.rewards.judge import open_judge
    from hybrid_rlhf.roles.sharing import RolesConfig
    from hybrid_rlhf.training import builders
    from hybrid_rlhf.training.reward_sources import RewardConfig, open_sources

    if config.reward_model:
        return open_sources(RewardConfig(models=[config.reward_model]), RolesConfig(), config.raw)[0]
    judge = replace(config.judge, on_failure="skip", cache=config.judge.cache or str(config.work))
    if judge.model:
        judge = replace(judge, model=builders.model_folder(judge.model))
    return open_judge(judge, config.seed)


def _asked(config: LabelConfig, lost: Counter[str]) -> list[Asked]:
    """The prompts, with the data's responses if these are to be judged."""
    from hybrid_rlhf.data.labels import read_asked

    is_read = config.model is None or config.responses is not None
    asked = read_asked(as_sources(config.data), config.columns, is_read, lost)
    check(bool(asked), f"label: no row has a prompt{_reasons(lost)}; give other data")
    return asked[: config.num_prompts]


def _check_place(config: LabelConfig) -> None:
    """UserError where the pairs would overwrite a file that is not this command's."""
    output, mark = Path(str(config.output)), config.work / WRITTEN
    check(not output.is_dir(), f"output {output} is a folder; give a file")
    check(not os.path.lexists(config.work) or (config.work.is_dir() and not config.work.is_symlink()),
          f"{config.work} is not a folder of this command; remove it, or give another --output")
    is_ours = mark.is_file() and output.is_file() and _digest(output) in mark.read_bytes().split()
    check(not os.path.lexists(output) or is_ours,
          f"output {output} exists, and is not what this command has written there; give another file, or remove it")


def _sampled(config: LabelConfig, asked: Sequence[Asked], lost: Counter[str]) -> int:
    """Add the model's samples; returns how many were cut."""
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.training import builders, labelling
    from hybrid_rlhf.training.registry import READS

    model = ModelConfig(builders.model_folder(str(config.model)), dtype=config.dtype, load_in_4bit=config.load_in_4bit)
    builders.check_dtype(model)
    data = DataConfig(as_sources(config.data), raw=config.raw)
    tokenizer = builders.open_tokenizer(model, data, READS["ppo"], config.seed)
    return labelling.sample(asked, model, tokenizer, config.sampling, config.work / "samples.jsonl", raw=config.raw,
                            max_prompt_length=config.max_prompt_length, seed=config.seed, lost=lost)


def _judge(config: LabelConfig, asked: Sequence[Asked], source: RewardSource, tally: Judged) -> None:
    """Judge all prompts. If the judge fails, `partial` keeps the verdicts so far; else UserError says how to go on."""
    from hybrid_rlhf.training import labelling

    if hasattr(source, "open"):
        source.open()
    try:
        labelling.judged(asked, source, labelling.PairFilter(config.keep, config.min_margin, config.margin),
                         config.batch_size, tally)
    except UserError as error:
        ready = sum(len(each.responses) > 1 for each in asked)
        state = f"{tally.prompts} of {ready} prompts are judged"
        if not (config.partial and tally.rows):
            raise UserError(f"{error} ({state}; what was asked is kept in {config.work})") from error
        print(f"warning: {state}, for {_named(error)}", file=sys.stderr)


def _write(config: LabelConfig, rows: Sequence[dict]) -> None:
    """Write the pairs atomically. Their digest is recorded first, so that the file is known as ours after a crash."""
    fresh = own_files.fresh_path(config.work)
    with fresh.open("x", encoding="utf-8") as file:
        file.writelines(to_json(row, default=str) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    with (config.work / WRITTEN).open("ab") as mark:
        mark.write(_digest(fresh) + b"\n")
    os.replace(fresh, str(config.output))


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _left_out(lost: Counter[str], cut: int, config: LabelConfig) -> list[str]:
    few = [f"{count} left out: {reason}" for reason, count in lost.items()]
    return [*few, f"{cut} samples were cut at {config.max_new_tokens} tokens (max_new_tokens)"] if cut else few


def _reasons(lost: Counter[str]) -> str:
    return "".join(f"; {count} x {reason}" for reason, count in lost.items())


def main(argv: list[str] | None = None) -> int:
    """The entry point; returns 0. Raises UserError with this command's names of options."""
    from hybrid_rlhf.run.signals import stops_as_by_hand

    try:
        with stops_as_by_hand():
            label(parse(argv))
    except UserError as error:
        raise _named(error) from error
    return 0
