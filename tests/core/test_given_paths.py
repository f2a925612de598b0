"""Paths as people write them: ~ is the home folder wherever one is given, and what is read as a file is one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybrid_rlhf import SFTTrainer, cli
from hybrid_rlhf.api_inputs import rewards_of
from hybrid_rlhf.commands import export, init
from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.core.options import expanded, value_of
from hybrid_rlhf.data import cache, chat, sources
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.inference.chat.session import read_conversation
from hybrid_rlhf.inference.conversation import Conversation
from hybrid_rlhf.inference.server import serve
from hybrid_rlhf.kernels import build
from hybrid_rlhf.training import evaluate, rejection, step1_sft, step2_reward, step3_ppo
from tests.factories.tiny import chatml_tokenizer


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The home folder; another one is the current."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


@pytest.mark.parametrize(("given", "meant"), [
    ("~", "HOME"), ("~/", "HOME/"), ("~/x y", "HOME/x y"), ("a.b-1=~/x", "a.b-1=HOME/x"), ("~/r.py:f", "HOME/r.py:f"),
    ("x~/y", "x~/y"), ("./~nosuchuser", "./~nosuchuser"), ("a b=~/x", "a b=~/x"), ("dir/a=~/x", "dir/a=~/x"), ("", ""),
])
def test_the_home_folder_stands_for_its_mark_where_a_path_begins(home, given, meant):
    assert expanded(given) == meant.replace("HOME", str(home))


@pytest.mark.parametrize(("given", "user"), [
    ("~nosuchuser", "~nosuchuser"), ("~nosuchuser/x", "~nosuchuser"), ("n=~nosuchuser/x", "~nosuchuser")])
def test_the_home_of_a_user_that_there_is_not_is_refused(given, user):
    with pytest.raises(UserError) as caught:
        expanded(given)
    assert str(caught.value) == (f"{given}: the home folder of {user} is not known; write the path out, or ./ before "
                                 "it where it is a name")


@pytest.mark.parametrize("given", ["outputs/stf", "sft=outputs/stf", "sft=outputs/sfft"])
@pytest.mark.parametrize("program", [repl, serve])
def test_two_letters_swapped_in_a_model_s_folder_are_recognised(home, capsys, program, given):
    Path("outputs/sft").mkdir(parents=True)
    assert program.main(["--model", given, *(["--port", "0"] if program is serve else [])]) == 2
    assert " does not exist (did you mean sft?); give a run's folder" in capsys.readouterr().err


# stage -> options that name files and folders, as given and as they must be
OPTIONS = [
    (step1_sft, {"output_dir": "~/out", "resume": "~/out/checkpoints/step-1", "model.model_name_or_path": "~/m",
                 "model.tokenizer_name_or_path": "~/t", "data.cache_dir": "~/c"}),
    (step2_reward, {"model.model_name_or_path": "~/m", "output_dir": "~"}),
    (step3_ppo, {"roles.actor.model_name_or_path": "~/a", "roles.critic.model_name_or_path": "~/b",
                 "roles.ref.model_name_or_path": "~/c", "roles.reward.model_name_or_path": "~/d",
                 "reward.functions": ["~/r.py:f", "builtin:exact_match"], "reward.models": ["~/j", "hub/id"]}),
    (rejection, {"reward.functions": "~/r.py:f", "reward.models": "~/j"}),
    (evaluate, {"evaluate.models": ["~/a", "b=~/b"], "evaluate.reference": "~/a"}),
]


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize(("stage", "given"), OPTIONS, ids=[stage.__name__ for stage, _ in OPTIONS])
def test_home_is_written_out_in_every_option_that_is_a_path(home, stage, given, is_file):
    words = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items()]
    if is_file:
        nested: dict = {}
        for name, value in given.items():
            *sections, last = name.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        (home / "c.yaml").write_text(json.dumps(nested))
        words = ["--config", "~/c.yaml"]
    config, _ = parse(stage.Config, words, prog="p")
    for name, value in given.items():
        meant = json.loads(json.dumps(value).replace("~", str(home)))
        assert value_of(config, name) == meant, name


def test_home_is_written_out_in_sources_and_in_nothing_that_is_no_path(home):
    config, _ = parse(step3_ppo.Config, [
        "--data.sources=['~/a.jsonl', {path: ~/b, name: '~/n', columns: {prompt: '~/q'}}]",
        "--reward.functions=~/r.py:f",
        "--reward.options={f: {path: '~/x'}}"], prog="p")
    assert config.data.sources == [Source(f"{home}/a.jsonl"), Source(f"{home}/b", name="~/n", columns={
        "prompt": "~/q"})]
    assert config.reward.options == {"f": {"path": "~/x"}}


@pytest.mark.parametrize("option", ["--config", "--output_dir", "--data.sources", "--model.model_name_or_path"])
def test_an_option_of_an_unknown_user_is_one_line(home, option):
    with pytest.raises(UserError, match=r"^~nosuchuser/c: the home folder of ~nosuchuser is not known"):
        parse(step1_sft.Config, [f"{option}=~nosuchuser/c"], prog="p")


def test_every_path_that_a_command_takes_may_begin_at_home(home):
    talk = repl.parse(["--model", "~/a", "b=~/b", "--reward_model=~/r"])
    assert (talk.model, talk.reward_model) == ([f"{home}/a", f"b={home}/b"], f"{home}/r")
    server = serve.parse(["--model=~/a", "--reward_model", "~/r"])
    assert (server.model, server.reward_model) == ([f"{home}/a"], f"{home}/r")
    out = export.parse(["--model=~/a", "--output_dir=~/o", "--base=~/b"])
    assert (out.model, out.output_dir, out.base) == (f"{home}/a", f"{home}/o", f"{home}/b")
    asked = init.parse(["--data=~/d.jsonl", "--model=~/a", "--output_dir=~/o", "--file=~/f.yaml"])
    assert [asked.data, asked.model, asked.output_dir, asked.file] == [
        f"{home}/{name}" for name in ("d.jsonl", "a", "o", "f.yaml")]
    given = {"goal": "sft", "data": "x", "model": "x", "card": "cpu", "output_dir": None}
    assert init.ask(given, lambda _question: "~/o")["output_dir"] == f"{home}/o"


def test_what_is_given_under_an_unknown_user_is_refused_in_one_line(home, capsys):
    place = "~nosuchuser/x"
    assert cli.main(["export", f"--model={place}", "--output_dir=o"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    talk = Conversation(None, None)
    talk.messages = [{"role": "user", "content": "a"}]
    for act in (lambda: talk.save(place), lambda: read_conversation(place),
                lambda: sources.read(Source(f"{place}.jsonl"))):
        with pytest.raises(UserError, match="is not known"):
            act()
    assert not os.listdir()


def test_a_conversation_is_saved_at_home_and_read_from_there(home):
    talk = Conversation(None, None)
    talk.messages = [{"role": "user", "content": "a"}]
    talk.save("~/talk.jsonl")
    assert (home / "talk.jsonl").is_file()
    assert read_conversation("~/talk.jsonl") == (talk.messages, [])


def test_the_stages_from_python_take_paths_at_home(home):
    trainer = SFTTrainer("~/m", "~/a.jsonl", output_dir="~/out", cache_dir="~/c")
    assert trainer.output_dir == trainer.config.output_dir == f"{home}/out"
    assert trainer.config.model.model_name_or_path == f"{home}/m"
    assert (trainer.config.data.sources, trainer.config.data.cache_dir) == ([Source(f"{home}/a.jsonl")], f"{home}/c")
    rows = SFTTrainer("~/m", [{"prompt": "a", "completion": "b"}], settings={"output_dir": "~/out"})
    rows._rows["data.sources"].write(rows.output_dir)
    assert Path(rows.config.data.sources[0].path).is_file() and Path(rows.output_dir) == home / "out"
    assert rewards_of("~/f.py:g", str)[1] == {"reward.functions": ["~/f.py:g"]}  # written out where options are


def test_caches_named_by_the_mark_are_at_home(home, monkeypatch, capsys):
    monkeypatch.setenv("HYBRID_RLHF_CACHE", "~/c")
    assert (cache.folder(None), build.cache_folder()) == (home / "c", home / "c" / "kernels")
    monkeypatch.setenv("HYBRID_RLHF_CACHE", "~nosuchuser/c")
    for folder in (lambda: cache.folder(None), build.cache_folder):
        with pytest.raises(UserError, match="the home folder of ~nosuchuser is not known"):
            folder()
    assert cli.main(["doctor", "--no_compile"]) == 2
    assert "the home folder of ~nosuchuser is not known" in capsys.readouterr().err
    monkeypatch.delenv("HYBRID_RLHF_CACHE")
    assert (cache.folder(None), build.cache_folder()) == (home / ".cache/hybrid_rlhf/data",
                                                          home / ".cache/hybrid_rlhf/kernels")


def test_a_template_in_a_file_at_home_is_read_and_one_that_is_text_may_begin_as_it_likes(home):
    (home / "c.jinja").write_text("{{ messages }}")
    tokenizer = chatml_tokenizer()
    for given, text in (("~/c.jinja", "{{ messages }}"), ("~{{ messages }}", "~{{ messages }}")):
        config, _ = parse(step1_sft.Config, [f"--data.chat_template={given}"], prog="p")
        chat.ensure_template(tokenizer, config.data.chat_template)
        assert tokenizer.chat_template == text


def test_settings_are_read_from_a_shells_substitution(tmp_path):
    out, into = os.pipe()
    os.write(into, b"seed: 3\n")
    os.close(into)
    assert parse(step1_sft.Config, ["--config", f"/dev/fd/{out}"], prog="p")[0].seed == 3
    os.close(out)
