"""What is taken away: its name, the words of its process, and what is said of what came out."""

from __future__ import annotations

import json
from io import BytesIO
from zipfile import ZipFile

import pytest

from hybrid_rlhf.studio import jobs
from tests.factories.studio_jobs import EXPORT, ended, queue_client, use_quick_launcher
from tests.factories.studio_runs import make_run


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    use_quick_launcher(monkeypatch, tmp_path)
    (tmp_path / "export.py").write_text(EXPORT)
    monkeypatch.setattr(jobs, "LAUNCHER", (*jobs.LAUNCHER[:1], str(tmp_path / "export.py")))
    (tmp_path / "my outputs").mkdir()
    return tmp_path / "my outputs"


@pytest.fixture
def client(outputs):
    make_run(outputs, "demo/ppo", "ppo")
    with queue_client(outputs) as found:
        yield found


def export(client, **body):
    return client.post("/api/jobs", json={"kind": "export", "run": "demo/ppo", "name": "mine", **body})


def test_an_export_is_a_job_whose_result_is_listed_with_its_checks_and_commands(client, outputs):
    job = export(client, gguf="q8_0", ollama=True).json()
    assert (job["kind"], job["title"], job["run"], job["name"]) == ("export", "export of demo/ppo", "demo/ppo", "mine")
    assert ended(client, job["id"])["state"] == "done"
    folder = str(outputs / "exports/mine")
    assert json.loads((outputs / "exports/mine.words").read_text()) == [
        "export", "--model", str(outputs / "demo/ppo"), "--output_dir", folder, "--gguf", "q8_0", "--ollama"]
    found, = client.get("/api/exports").json()["exports"]
    assert (found["name"], found["run"], found["folder"], found["card"]) == ("mine", "demo/ppo", folder, "# a model")
    assert found["files"] == [{"name": "Modelfile", "bytes": 8}, {"name": "README.md", "bytes": 9},
                              {"name": "config.json", "bytes": 39}, {"name": "mine-q8_0.gguf", "bytes": 4},
                              {"name": "model.safetensors", "bytes": 3000}]
    assert found["checks"] == ["reloaded in a fresh process: tokens equal, logits within 3e-07 (relative)"]
    commands = {each["title"]: each["text"] for each in found["commands"]}
    assert commands["Ollama"] == f"ollama create mine -f '{folder}'/Modelfile\nollama run mine"
    assert commands["llama.cpp"] == f"llama-cli -m '{folder}/mine-q8_0.gguf' -cnv"
    assert commands["chat in a terminal"] == f"hybrid-rlhf chat --model '{folder}'"
    assert compile(commands["transformers"], "it", "exec") and f"folder = '{folder}'" in commands["transformers"]


def test_a_file_of_an_export_is_downloaded_and_no_other(client, outputs):
    assert ended(client, export(client).json()["id"])["state"] == "done"
    answer = client.get("/api/export/file", params={"name": "mine", "file": "README.md"})
    assert answer.content == b"# a model" and "attachment" in answer.headers["content-disposition"]
    (outputs / "exports/mine/link").symlink_to(outputs / "demo/ppo/run.json")
    for name, file in (("mine", "none"), ("mine", "link"), ("mine", "../mine.words"), ("..", "README.md"), ("", ""),
                       ("..", ""), ("none", ""), ("mine.words", "")):
        assert client.get("/api/export/file", params={"name": name, "file": file}).status_code == 404, (name, file)


def test_all_files_of_an_export_are_downloaded_as_one_zip_and_links_are_left_out(client, outputs):
    assert ended(client, export(client).json()["id"])["state"] == "done"
    (outputs / "exports/mine/large").write_bytes(bytes(range(256)) * 10_000)
    (outputs / "exports/mine/link").symlink_to(outputs / "demo/ppo/run.json")
    answer = client.get("/api/export/file", params={"name": "mine"})
    assert answer.headers["content-disposition"] == 'attachment; filename="mine.zip"'
    archive = ZipFile(BytesIO(answer.content))
    assert archive.testzip() is None
    assert archive.namelist() == ["README.md", "config.json", "large", "model.safetensors"]
    for name in archive.namelist():
        assert archive.read(name) == (outputs / "exports/mine" / name).read_bytes()


def test_a_name_that_is_taken_or_leads_elsewhere_is_refused(client, outputs):
    for name in ("", "..", "a/b", "../x", ".a", "-a", "é", "a b", "x" * 101):
        answer = export(client, name=name)
        assert (answer.status_code, answer.json()["option"]) == (400, "name"), name
    assert export(client, run="../x").status_code == export(client, run="none").status_code == 404
    (outputs / "exports/mine").mkdir(parents=True)
    assert export(client).status_code == 409
    (outputs / "exports/mine").rmdir()
    assert client.get("/api/exports").json() == {"exports": []}
    assert client.get("/api/jobs").json() == {"jobs": []}


def test_two_exports_of_one_name_at_once_are_one(client):
    assert export(client).status_code == 200
    assert export(client).status_code == 409


def test_runs_and_exports_do_not_stand_in_each_others_place(client):
    body = {"kind": "train", "stage": "sft", "settings": {}}
    for run in ("exports", "exports/a", "Exports/a"):
        assert client.post("/api/jobs", json={**body, "run": run}).status_code == 400


def test_a_reward_model_has_its_own_commands(client, outputs):
    folder = outputs / "exports/judge"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    (outputs / "exports/.hybrid_rlhf-0123456789abcdef").mkdir()  # one that is being written
    found, = client.get("/api/exports").json()["exports"]
    assert [each["title"] for each in found["commands"]] == ["transformers"]
    assert "AutoModelForSequenceClassification" in found["commands"][0]["text"]
