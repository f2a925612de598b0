"""A new run from the page: goals, refusals in one line, data, examples, memory, and no code that settings name."""

from __future__ import annotations

import json
import time

import pytest
import yaml

from hybrid_rlhf import cli
from hybrid_rlhf.core.hub import stay_offline_if_unreachable
from hybrid_rlhf.core.options import value_of
from hybrid_rlhf.rewards.builtin import BUILTINS
from hybrid_rlhf.studio.goals import STUDIO_GOALS
from hybrid_rlhf.studio.preflight_answers import plain
from hybrid_rlhf.training.registry import STAGES
from tests.factories import vision
from tests.factories.asked_new_run import ASKS, answers, post, rows_of
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
    ({"a\nb": 1}, None, "unknown option"), ({"model": {"class_path": "os.system"}}, "model", "both given"),
    ({"train": {"class_path": "subprocess.Popen"}}, None, "unknown option train.class_path"),
    ({"reward.judge.model": "a", "reward.judge.url": "http://b"}, "reward.judge.model", "choose one"),
    ({"data.eval_fraction": 2}, "data.eval_fraction", "must lie in"),
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
    "empty.jsonl": (b"", False, "is empty"), "list.json": (b"[1, 2]", False, "a JSON object is needed"),
    "no.jsonl": (b"{", False, "line 1: not valid JSON"),
    "odd.jsonl": (b'{"riddle": "q", "solution": "s"}', False, "columns riddle, solution fit no known format"),
    "wrong.jsonl": (b'{"prompt": 3, "completion": "c"}', False, "row 1: prompt must be a string"),
    "dropped.jsonl": (b'{"prompt": null, "completion": "c"}', True, "row 1 would be dropped (no prompt)"),
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

@pytest.mark.parametrize("stage", ["", "ppo\n", "../sft"])
def test_a_stage_that_there_is_not_is_one_line(client, stage):
    answer = client.get("/api/options", params={"stage": stage})
    assert answer.status_code == 400 and "there is no stage" in answer.json()["error"]
    assert client.get("/api/options").status_code == 400


PAIRS = [(name, stage) for name, goal in STUDIO_GOALS.items()
         for stage in dict.fromkeys((*goal.stages[:1], *goal.stages[-1:]))]


def test_the_goals_name_what_there_is(client):
    found = client.get("/api/goals").json()
    assert [goal["id"] for goal in found["goals"]] == list(STUDIO_GOALS)
    assert {row["name"] for row in found["builtin_rewards"]} == {*BUILTINS}
    offered = {stage for goal in found["goals"] for stage in goal["stages"]}
    assert {*STAGES} - offered == {"evaluate", "conditional_sft", "process_grpo"}
    assert found["cards"][:2] == ["cpu", "8gb"] and found["card"] == "cpu"
    assert all({*goal["asks"]} <= {*ASKS} and goal["rows"] and goal["help"] for goal in found["goals"])


@pytest.mark.parametrize(("goal", "stage"), PAIRS)
def test_a_goals_answers_are_settings_that_the_launcher_takes(client, place, tmp_path, goal, stage):
    chosen = answers(place, goal) | {"seed": 3}
    found = post(client, "settings", stage=stage, settings=chosen, card="cpu", run=f"{goal}/{stage}")
    assert found["error"] is None
    folder = str(place / "outputs" / goal / stage)
    assert found["given"] == chosen | {"output_dir": folder, "model.lora.r": 16, "engine.micro_batch_tokens": 1024}
    assert found["command"] == f"hybrid-rlhf --stage {stage} --config {stage}.yaml" and found["file"] == f"{stage}.yaml"
    (tmp_path / "a.yaml").write_text(found["yaml"])
    config, _ = cli.read_settings(stage, ["--config", str(tmp_path / "a.yaml")])
    for name, value in found["settings"].items():
        assert plain(value_of(config, name)) == value, name
    for name, value in found["given"].items():
        assert found["settings"][name] == value, name
    read = yaml.safe_load(found["yaml"])
    assert read["model"]["model_name_or_path"] == str(place / "base") and read["data"]["sources"] == chosen[
        "data.sources"]


@pytest.mark.parametrize("goal", STUDIO_GOALS)
def test_a_goals_data_its_examples_and_its_memory_can_be_looked_at(client, place, goal):
    stage, chosen = STUDIO_GOALS[goal].stages[0], answers(place, goal)
    data = post(client, "data", path=chosen["data.sources"][0], stage=stage)
    assert (data["fits"], data["rows"], len(data["first"])) == (True, 30, 3) and json.loads(data["first"][0])
    found = post(client, "preview", stage=stage, settings=chosen)
    assert sum(row["rows"] for row in found["counts"] if row["name"].endswith("read")) == 30 * (
        3 if goal == "three_stages" else 1)
    text = "".join(part["text"] for part in found["examples"][0]["parts"])
    assert ("+ 1" if goal == "function" else "say ") in text and "<|im_start|>" in text
    trained = [part["is_trained"] for example in found["examples"] for part in example["parts"]]
    assert any(trained) == (rows_of(goal) in ("sft", "reward"))
    plan = post(client, "plan", stage=stage, settings=chosen, memory=2**30)
    assert plan["fits"] and plan["available"] == 2**30 and plan["verdict"].find("fits: needs") >= 0
    peak = max(phase["bytes"] for phase in plan["phases"])
    assert peak < 2**30 and sum(line["bytes"] for line in plan["lines"]) >= peak
    assert all(time["seconds"] >= 0 for time in plan["times"]) and plan["time_note"]


def test_a_preview_marks_what_is_trained_and_says_why_rows_are_dropped(client, place, tmp_path):
    rows = [{"prompt": "say red", "chosen": "red", "rejected": "no"},
            {"prompt": "say x", "chosen": "same", "rejected": "same"}, *(
                {"prompt": f"say {word}", "chosen": f"{word}\x1b[31m", "rejected": "no"} for word in "abc")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = post(client, "preview", stage="dpo", settings={
        "data.sources": str(path), "model.model_name_or_path": str(place / "base"), "data.eval_fraction": 0.0})
    assert {row["name"]: row["rows"] for row in found["counts"]} == {
        "rows read": 5, "to train on": 4, "held out": 0}
    assert found["dropped"] == [{"why": "the two answers are the same (rows.jsonl row 2)", "rows": 1}]
    assert len(found["examples"]) == 6  # both sides of three pairs
    first = [part for example in found["examples"] for part in example["parts"] if part["is_trained"]]
    assert "red<|im_end|>" in [part["text"] for part in first]
    assert not any("\x1b" in part["text"] for part in first)


def test_a_preview_shows_the_pictures_of_rows_and_rows_without_their_files_are_told(client, tmp_path):
    from PIL import Image

    Image.new("RGB", (32, 24), "red").save(tmp_path / "red.png")
    row = {"prompt": [{"role": "user", "content": "hello what"}], "completion": [
        {"role": "assistant", "content": "this"}], "images": ["red.png"]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 3)
    found = post(client, "preview", stage="sft", settings={
        "data.sources": str(tmp_path / "rows.jsonl"), "model.model_name_or_path": vision.folder("qwen3_vl"),
        "data.eval_fraction": 0.0})
    (image,) = found["examples"][0]["images"]
    assert image["name"] == "red.png" and image["url"].startswith("data:image/jpeg;base64,")
    assert "[image " in "".join(part["text"] for part in found["examples"][0]["parts"])
    assert "dropped" not in post(client, "data", path=str(tmp_path / "rows.jsonl"), stage="sft")["why"]
    (tmp_path / "uploads").mkdir()  # an upload is a copy without what lies beside it
    (tmp_path / "rows.jsonl").rename(tmp_path / "uploads" / "rows.jsonl")
    why = post(client, "data", path=str(tmp_path / "uploads" / "rows.jsonl"), stage="sft")["why"]
    assert "row 1 would be dropped (an image whose file is missing; give the path of the rows on this machine" in why


def test_a_column_that_a_built_in_reward_needs_is_missed_before_the_run(client, place):
    chosen = answers(place, "function") | {"data.sources": [str(place / "ppo.jsonl")]}
    found = post(client, "preview", 400, stage="grpo", settings=chosen)
    assert found["option"] == "reward.functions" and "numeric_match needs a column answer" in found["error"]
    assert post(client, "preview", stage="grpo", settings=chosen | {"reward.functions": ["builtin:repetition_penalty"]})


def test_an_option_left_empty_has_the_value_that_the_run_takes(client, place):
    tiny = {"model.preset": "demo", "data.sources": ["demo/demonstrations"]}
    empty = post(client, "settings", stage="sft", settings=tiny, run="rates")["left_empty"]
    # registry: 2e-5 for all weights, times 10 for a model below 20 million (136,384 here)
    assert empty["train.learning_rate"] == "0.0002" and "train.max_steps" not in empty
    given = post(client, "settings", stage="sft", settings=tiny | {"model.lora.r": 4}, run="rates")["left_empty"]
    assert given["train.learning_rate"] == "0.002" and "model.lora.r" not in given
    whole = post(client, "settings", stage="all", settings=tiny | {"data.sources": ["demo/preferences"]}, run="rates")
    assert whole["left_empty"]["stages.sft.learning_rate"] == "0.0002"


def test_a_plan_counts_the_time_of_the_rows_that_there_are(client, place):
    short = {"model.preset": "demo", "data.sources": ["demo/demonstrations"], "train.max_steps": 10}
    times = []
    for most in (128, 256):  # both hold every row of the data, of 40 tokens at most
        plan = post(client, "plan", stage="sft", settings=short | {"data.max_length": most})
        assert "as long as the data's" in plan["time_note"]
        times.append(next(row["seconds"] for row in plan["times"] if row["name"] == "a step"))
    assert max(times) < 1.7 * min(times)  # by max_length it would be twice as long


def test_a_plan_that_does_not_fit_says_what_would(client, place):
    chosen = answers(place, "imitate") | {"train.per_device_train_batch_size": 64, "data.max_length": 200}
    found = post(client, "plan", stage="sft", settings=chosen, memory=100 * 2**20)
    assert not found["fits"] and found["verdict"].startswith("short by ") and "try --engine" in found["verdict"]
    assert found["changes"][0]["option"] == "engine.micro_batch_tokens"
    better = chosen | {change["option"]: change["value"] for change in found["changes"]}
    assert post(client, "plan", stage="sft", settings=better, memory=100 * 2**20)["fits"]
    elsewhere = post(client, "plan", stage="sft", settings=chosen, card="24gb")
    assert elsewhere["fits"] and elsewhere["available"] == 24 * 2**30 * 97 // 100
    assert elsewhere["times"] and "published figures" in elsewhere["time_note"]  # of another card than this machine's


ONE_STEP = {"train.max_steps": 1, "train.per_device_train_batch_size": 2, "data.max_prompt_length": 64}
SHORT = {
    "distil": ONE_STEP | {"distill.sampling.max_new_tokens": 4},
    # a model that has learned nothing writes no verdict
    "judge": ONE_STEP | {"ppo.sampling.max_new_tokens": 4, "reward.judge.score": "probability"},
    "three_stages": {"ppo.sampling.max_new_tokens": 4, "data.max_prompt_length": 64, **{
        f"stages.{stage}.max_steps": 1 for stage in ("sft", "reward", "ppo")}}}


@pytest.mark.slow
@pytest.mark.parametrize("goal", SHORT)
def test_a_goals_file_trains(client, place, tmp_path, goal):
    stage = STUDIO_GOALS[goal].stages[0]
    chosen = answers(place, goal) | SHORT[goal]
    found = post(client, "settings", stage=stage, settings=chosen, run=f"{goal}/trained")
    assert found["error"] is None
    (tmp_path / found["file"]).write_text(found["yaml"])
    assert cli.main(["--stage", stage, "--config", str(tmp_path / found["file"])]) == 0
    last = "ppo" if stage == "all" else ""
    assert json.loads((place / "outputs" / goal / "trained" / last / "run.json").read_text())["status"] == "finished"
