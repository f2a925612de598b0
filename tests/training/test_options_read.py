"""Every option that a stage has is read by it: each access is recorded over tiny runs that switch everything on."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.training.registry import STAGES
from hybrid_rlhf.training.unread_options import of_stage as unused_by
from tests.factories.stage_options import used
from tests.factories.tiny import own_cache, save_tiny

WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon", "tree", "old book"]
COMMON = ["--model.dtype", "float32", "--data.eval_fraction", "0.2", "--data.max_length", "48",
          "--data.max_prompt_length", "32"]
TRAIN = ["--train.max_steps", "2", "--train.per_device_train_batch_size", "4"]
# read elsewhere than from the settings: of the record by the reporter, and where the disk refuses a checkpoint
ELSEWHERE = {"report_to": "hybrid_rlhf/run/reporter.py", "train.max_failed_saves": "hybrid_rlhf/run/checkpointing.py"}
LORA, EPOCH = ["--model.lora.r=2"], ["--train.max_steps=-1", "--train.per_device_train_batch_size=16"]
FUNCTION = ["--reward.functions=builtin:length_penalty",
            "--reward.options={length_penalty: {max_tokens: 4, buffer: 2}}"]
SERVICE = ["--reward.url=http://127.0.0.1:9/score", "--reward.retries=0"]
OFFLINE = [[*LORA, *EPOCH]]
JUDGED = ["--reward.judge.url=http://127.0.0.1:9/v1", "--reward.judge.http_retries=0"]
JUDGE = ["--reward.judge.model={folder}/judge", "--reward.judge.score=probability"]
SAMPLED = [[*LORA, *FUNCTION, *EPOCH], SERVICE, JUDGED, JUDGE]
ON_POLICY = [*SAMPLED, ["--ppo.kl_target=3", "--ppo.importance=masked", "--ppo.old_logprobs=recompute",
                        "--ppo.ema=true", "--ppo.overlong_penalty=1", "--ppo.overlong_buffer=2", "--ppo.ptx_coef=1",
                        "--distill.coef=0.5", "--distill.divergence=jsd", "--distill.beta=0.3",
                        "--data.max_length=48"],
             ["--ppo.policy_loss=sapo", "--ppo.kl_in=loss"], ["--ppo.policy_loss=vespo"]]
TEXTS = ["--distill.lmbda=0.5", "--data.max_length=48"]
JSD = ["--distill.divergence=jsd", "--distill.beta=0.3", "--distill.temperature=2", "--distill.top_k=5"]
# what else a stage is run with, so that every switch is on in one of its runs
MORE: dict[str, list[list[str]]] = {
    "sft": [["--model.preset=tiny"], *OFFLINE], "conditional_sft": OFFLINE, "reward": OFFLINE,
    "dpo": OFFLINE, "kto": OFFLINE, "ppo": ON_POLICY, "grpo": ON_POLICY,
    "distill": [*SAMPLED, TEXTS, JSD, ["--distill.divergence=policy_gradient"]],
    "online_dpo": SAMPLED, "rejection": SAMPLED, "evaluate": [FUNCTION, JUDGED, JUDGE]}
SECTIONS = {"distill": "distill", "online_dpo": "online", "rejection": "rejection", "evaluate": "evaluate"}


def test_every_recipe_is_among_them() -> None:
    assert {STAGES[name].module for name in MORE} == {row.module for row in STAGES.values()} - {STAGES["all"].module}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reads")
    rows = [{"prompt": f"say {w} {i}", "chosen": w, "rejected": "no no", "answer": w} for i in range(2) for w in WORDS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_tiny(folder / "base")
    save_tiny(folder / "judge", max_position_embeddings=1024)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        assert main(argv_of(folder, "reward", "reward")) == 0
        yield folder


def argv_of(folder: Path, stage: str, out: str, *more: str) -> list[str]:
    source = f"{{path: {folder}/rows.jsonl}}, {{path: {folder}/rows.jsonl, stages: [ptx], name: texts}}"
    words = [*COMMON, "--model.model_name_or_path", f"{folder}/base"]
    if "--model.preset=tiny" in more:
        words = words[:-2]
    if stage in SECTIONS or "roles.ref.tp" in unused_by(stage):
        words += [f"--{SECTIONS.get(stage, 'ppo')}.sampling.max_new_tokens=6"]
        is_paid = any(word.startswith(("--reward.f", "--reward.u", "--reward.judge")) for word in more)
        words += [] if is_paid else ["--roles.reward.model_name_or_path", f"{folder}/reward"]
    if stage == "distill" or "--distill.coef=0.5" in more:
        words += [f"--roles.teacher.model_name_or_path={folder}/base"]
    words += [f"--evaluate.models=[{folder}/base, other={folder}/base]", f"--evaluate.labels={folder}/rows.jsonl",
              "--evaluate.num_labels=4"] if stage == "evaluate" else TRAIN
    return ["--stage", stage, "--output_dir", f"{folder}/{out}", f"--data.sources=[{source}]", *used(stage, words),
            *(word.format(folder=folder) if "{folder}" in word else word for word in more)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", MORE)
def test_a_stage_reads_every_option_that_it_has(place, stage) -> None:
    seen: set[str] = set()
    for number, more in enumerate([[], *MORE[stage]]):
        with recorded(stage) as read:
            code = main(argv_of(place, stage, f"{stage}{number}", *more))
        assert code == 0 or {"--reward.retries=0", "--reward.judge.http_retries=0"} & {*more}  # nobody answers there
        seen |= read
    hidden = tuple(f"{option}." for option in unused_by(stage))
    own = {option for option, _, _ in leaves(config_of(stage)) if not f"{option}.".startswith(hidden)}
    assert own - seen - set(ELSEWHERE) == set()


def test_what_is_read_elsewhere_is_read_there() -> None:
    root = Path(__file__).parents[2]
    for option, file in ELSEWHERE.items():
        assert option.rpartition(".")[2] in (root / file).read_text(encoding="utf-8")


# --- Which options a run reads: every access to a field of a settings class, but for those that only check or copy it

# Who looks at every field whatever it is for: checks of values, copies, comparisons, records, and these tests.
ONLOOKERS = {"__post_init__", "_check_role", "_check_method", "given", "refuse", "_lines", "leaves", "asdict",
             "_asdict_inner", "replace", "__eq__", "__repr__", "_get", "_with", "value_of"}


def leaves(config: object, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """(dotted option, the part that holds it, its name there) of nested settings; a list is one option."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", config, field.name


def config_of(stage: str) -> object:
    return importlib.import_module(STAGES[stage].module).Config()


@contextmanager
def recorded(stage: str) -> Iterator[set[str]]:
    """The options of `stage` that are read within the block.

    A part is known by its class, and where two parts are of one class (roles.ref and roles.reward) by `roles`, which
    hands them out.
    """
    parts: dict[type, set[str]] = {}
    for option, part, name in leaves(config_of(stage)):
        parts.setdefault(type(part), set()).add(option.removesuffix(name))
    seen, owners = set(), {}

    def spy(kind: type):  # noqa: ANN202
        names = {f.name for f in dataclasses.fields(kind)}

        def read(self, name: str):  # noqa: ANN001, ANN202
            value = object.__getattribute__(self, name)
            if dataclasses.is_dataclass(value) and len(parts.get(type(value), ())) > 1:
                owners[id(value)] = (value, f"roles.{name}.")
            if name in names and sys._getframe(1).f_code.co_name not in ONLOOKERS:
                own = parts[kind] if len(parts[kind]) == 1 else {owners.get(id(self), (None, "?"))[1]}
                seen.update(prefix + name for prefix in own)
            return value

        return read

    with pytest.MonkeyPatch.context() as patch:
        for kind in parts:
            patch.setattr(kind, "__getattribute__", spy(kind), raising=False)
        yield seen


# --- --print_config=comments: a stage's file with every option and what it means, which runs as the stage alone does

def printed(capsys, *words: str) -> str:
    with pytest.raises(SystemExit):
        main(list(words))
    return capsys.readouterr().out


@pytest.mark.parametrize("stage", STAGES)
def test_the_printed_file_says_what_each_option_means_and_runs_as_the_stage_alone_does(stage, tmp_path, capsys):
    text = printed(capsys, "--stage", stage, "--print_config=comments")
    assert f"stage: {stage}" in text and text.count("# ") > 20
    (tmp_path / "stage.yaml").write_text(text)
    given = printed(capsys, "--stage", stage, "--config", str(tmp_path / "stage.yaml"), "--print_config")
    assert given == printed(capsys, "--stage", stage, "--print_config")
