"""A new run from the page: what the launcher would refuse is one line, code that settings name is not run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_rlhf.core.hub import stay_offline_if_unreachable
from tests.factories.asked_new_run import answers, post
from tests.factories.tiny import save_tiny

# --- settings --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("changes", "option", "said"), [
    ({"train.max_step": 3}, "train.max_step", "did you mean train.max_steps?"),
    ({"train.max_steps": "many"}, "train.max_steps", "many"), ({"model.lora.r": -1}, "model.lora.r", "lora.r is -1"),
    ({"data.sources": []}, "data.sources", "no data for stage grpo"),
    ({"data.sources": ["./none.jsonl"]}, "data.sources", "does not exist"),
    ({"model.model_name_or_path": "./none"}, "model.model_name_or_path", "does not exist"),
    ({"model.model_name_or_path": None}, "model.model_name_or_path", "no finished sft run"),
    ({"reward.functions": ["builtin:nope"]}, "reward.functions", "there is no builtin:nope"),
    ({"reward.functions": ["nope.py:f"], "reward.options": {}}, "reward.functions", "nope.py does not exist"),
    ({"reward.functions": ["nope"], "reward.options": {}}, "reward.functions", "names no function"),
    ({"reward.functions": [], "reward.options": {}}, "roles.reward.model_name_or_path", "no finished reward run"),
    ({"reward.options": {"numeric_match": {"colum": "x"}}}, None, "colum"),
    ({"ppo.estimator": "rloo"}, "ppo.estimator", "is --stage ppo with ppo.estimator grpo"),
    ({"stage": "ppo2"}, "stage", "there is no such stage"), ({"config": "x"}, None, "cannot name another"),
    ({"print_config": "x"}, "print_config", "unknown option print_config"), ({"plan": True}, None, ""),
    ({"data.chat_template": "#a"}, None, ""),
    ({"a\nb": 1}, None, "unknown option"), ({"model": {"class_path": "os.system"}}, "model", "both given"),
    ({"train": {"class_path": "subprocess.Popen"}}, None, "unknown option train.class_path"),
    ({"reward.options": {"numeric_match": {"class_path": "os.system"}}}, None, "there is no class_path"),
    ({"reward.judge.model": "a", "reward.judge.url": "http://b"}, "reward.judge.model", "choose one"),
    ({"seed": 10**400}, None, ""), ({"data.eval_fraction": 2}, "data.eval_fraction", "must lie in"),
])
def test_what_the_launcher_would_refuse_is_one_line_about_an_option(client, place, changes, option, said):
    found = post(client, "settings", stage="grpo", settings=answers(place, "function") | changes)
    assert found["error"] is not None or not said
    if found["error"]:
        assert said in found["error"]["text"] and "\n" not in found["error"]["text"], found["error"]
        assert option is None or found["error"]["option"] == option
        assert "/tmp" not in found["error"]["text"] or str(place) in found["error"]["text"]


def test_a_teacher_and_a_start_are_asked_for_where_they_are_missing(client, place):
    chosen = answers(place, "distil")
    del chosen["roles.teacher.model_name_or_path"]
    assert post(client, "settings", stage="distill", settings=chosen)["error"] == {
        "option": "roles.teacher.model_name_or_path",
        "text": "no teacher: give roles.teacher.model_name_or_path (a model or run with the student's tokenizer)"}
    for stage in ("sft", "all"):
        found = post(client, "settings", stage=stage, settings={"data.sources": str(place / "reward.jsonl")})
        assert found["error"]["option"] == "model.model_name_or_path" and "no model" in found["error"]["text"]
    assert post(client, "settings", stage="sft", settings={
        "data.sources": "demo/demonstrations", "model.preset": "tiny"})["error"] is None


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a b", "there"])
def test_a_run_gets_no_name_that_leads_elsewhere_or_is_taken(client, place, name):
    (place / "outputs" / "there").mkdir(parents=True, exist_ok=True)
    found = post(client, "settings", stage="sft", settings=answers(place, "imitate"), run=name)
    assert found["error"]["option"] == "output_dir" and found["file"] == "settings.yaml"
    assert "output_dir" not in found["given"]


def test_folders_are_relative_where_the_file_can_be_taken_elsewhere(client, place, monkeypatch):
    monkeypatch.chdir(place)
    found = post(client, "settings", stage="sft", settings=answers(place, "imitate"), run="a/b")
    assert found["settings"]["output_dir"] == "outputs/a/b"


# --- what is not run -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["settings", "preview", "plan"])
def test_no_code_that_settings_name_is_run(client, place, tmp_path, kind):
    """--preview and --plan of the launcher run none either."""
    for name in ("pay", "env"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'was_run')!r}, 'w')\ndef f(completions, **_): return [0.0]\n"
            "class E:\n    def reset(self): return ''\n    def get_reward(self): return 0.0\n")
    chosen = answers(place, "function") | {
        "reward.functions": [f"{tmp_path}/pay.py:f"], "reward.options": {},
        "environment.tools": [f"{tmp_path}/env.py:f"], "environment.factory": f"{tmp_path}/env.py:E"}
    found = post(client, kind, stage="grpo", settings=chosen)
    assert found.get("error") is None and not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("kind", ["preview", "plan"])
def test_code_of_models_is_refused(client, place, tmp_path, kind):
    save_tiny(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "own.Own")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    (tmp_path / "m" / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    chosen = answers(place, "imitate") | {"model.model_name_or_path": str(tmp_path / "m")}
    found = post(client, kind, 400, stage="sft", settings=chosen | {"model.trust_remote_code": True})
    assert "a look runs no code" in found["error"] and found["option"] == "model.trust_remote_code"
    client.post(f"/api/{kind}", json={"stage": "sft", "settings": chosen})
    post(client, "settings", stage="sft", settings=chosen | {"model.trust_remote_code": True})
    assert not (tmp_path / "was_run").exists()


# --- data ------------------------------------------------------------------------------------------------------------

ROW = json.dumps({"prompt": "p", "completion": "c"})
DATA = {
    "control.jsonl": (json.dumps({"prompt": "\x1b[2J\u202e\x07", "completion": "c"}).encode(), True,
                      "prompt-completion"),
    "utf8.jsonl": (b'{"prompt": "\xff"}\n', False, "byte 0xff is not utf-8"),
    "line.jsonl": (b'{"prompt": "' + b"x" * 3_000_000 + b'", "completion": "c"}\n', True, "prompt-completion"),
    "empty.jsonl": (b"", False, "is empty"), "list.json": (b"[1, 2]", False, "a JSON object is needed"),
    "no.jsonl": (b"{", False, "line 1: not valid JSON"),
    "odd.jsonl": (b'{"riddle": "q", "solution": "s"}', False, "columns riddle, solution fit no known format"),
    "wrong.jsonl": (b'{"prompt": 3, "completion": "c"}', False, "row 1: prompt must be a string"),
    "dropped.jsonl": (b'{"prompt": null, "completion": "c"}', True, "row 1 would be dropped (no prompt)"),
    "nan.jsonl": (b'{"prompt": "p", "completion": "c", "x": NaN, "y": Infinity}', True, "prompt-completion"),
    "b.parquet": (b"PAR1", False, "not a readable parquet file"), "x.docx": (b"x", False, "unknown kind of file"),
    "huge.jsonl": ((ROW.encode() + b"\n") * 2_000_000, True, "prompt-completion")}


@pytest.mark.parametrize("name", DATA)
def test_odd_data_is_one_line_and_quickly(client, tmp_path, name):
    content, fits, said = DATA[name]
    (tmp_path / name).write_bytes(content)
    begun = time.monotonic()
    found = post(client, "data", path=str(tmp_path / name), stage="sft")
    assert time.monotonic() - begun < 20  # a second, but for a machine with much to do
    assert found["fits"] == fits and said in found["why"] and "\n" not in found["why"], found["why"]
    shown = json.dumps(found, ensure_ascii=False)
    assert len(shown) < 20_000 and not {"\x1b", "\u202e", "\x07"} & {*shown}
    assert found["rows"] == (None if name == "huge.jsonl" else 1 if fits else found["rows"])


def test_what_is_no_file_is_one_line(client, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # as where there is no network
    stay_offline_if_unreachable.cache_clear()
    (tmp_path / "folder").mkdir()
    for path, said in ((tmp_path / "none.jsonl", "does not exist"), (tmp_path / "folder", "holds no data"),
                       ("  ", "give a file"), ("no/such-data-set-here", "from the hub failed"),
                       ("demo/nope", "there is no embedded data set"), ("~nobody-here/x.jsonl", "home folder")):
        found = post(client, "data", path=str(path), stage="sft")
        assert not found["fits"] and said in found["why"] and "\n" not in found["why"], (path, found)


def test_data_that_does_not_serve_a_stage_says_what_would(client, place, tmp_path):
    found = post(client, "data", path=str(place / "sft.jsonl"), stage="dpo")
    assert (found["fits"], found["format"], found["columns"]) == (False, "prompt-completion", ["prompt", "completion"])
    assert "make no pair; --stage dpo needs pair rows" in found["why"] and len(found["first"]) == 3
    assert post(client, "data", path=str(place / "reward.jsonl"), stage="all")["fits"]
    assert not post(client, "data", path=str(place / "ppo.jsonl"), stage="all")["fits"]
    (tmp_path / "sub").mkdir()
    for split in ("train", "test"):
        (tmp_path / "sub" / f"{split}.jsonl").write_text(json.dumps({"prompt": split}) + "\n")
    named = post(client, "data", path=str(tmp_path), stage="grpo", name="sub", split="test")
    assert named["fits"] and named["first"] == ['{"prompt": "test"}']
    renamed = post(client, "data", path=str(place / "ppo.jsonl"), stage="sft", columns={"text": "prompt"})
    assert renamed["fits"] and renamed["columns"] == ["text"]


# --- requests --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("body", [{}, {"stage": "sfr"}, {"stage": "sft", "card": "9gb"},
                                  {"stage": "sft", "settings": {"model": 3}}])
@pytest.mark.parametrize("kind", ["settings", "preview", "plan"])
def test_odd_requests_are_refused_in_one_line(client, kind, body):
    answer = client.post(f"/api/{kind}", json=body)
    text = answer.json()["error"]["text"] if answer.status_code == 200 else answer.json()["error"]
    assert answer.status_code in (200, 400) and text and "\n" not in text


@pytest.mark.parametrize("stage", ["", "ppo\n", "../sft"])
def test_a_stage_that_there_is_not_is_one_line(client, stage):
    answer = client.get("/api/options", params={"stage": stage})
    assert answer.status_code == 400 and "there is no stage" in answer.json()["error"]
    assert client.get("/api/options").status_code == 400


@pytest.mark.slow
def test_the_studios_own_process_loads_nothing_heavy(place, tmp_path):
    """All addresses, asked of a studio with its real process that looks."""
    code = Path(__file__).parent.parent / "factories" / "asked_studio.py"
    done = subprocess.run([sys.executable, str(code), str(tmp_path), str(place)], capture_output=True, text=True,
                          timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == {"goals": 200, "options": 200, "settings": 200, "data": 200, "preview": 200, "plan": 200}
    assert not {*found["loaded"]} & {"torch", "transformers", "datasets", "deepspeed", "peft", "pyarrow", "tokenizers"}
