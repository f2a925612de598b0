"""Files that the page sends: whole or not there, under a name that leads nowhere else."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid_rlhf.studio import uploads
from tests.factories.studio_jobs import queue_client, until, use_quick_launcher
from tests.factories.studio_server import TOKEN, running_studio

BINARY = {"content-type": "application/octet-stream"}


@pytest.fixture
def outputs(monkeypatch, tmp_path) -> Path:
    use_quick_launcher(monkeypatch, tmp_path)
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs"


@pytest.fixture
def client(outputs):
    with queue_client(outputs) as found:
        yield found


def send(client, name: str, content=b"{}\n", **headers):
    return client.post("/api/upload", params={"name": name}, content=content, headers={**BINARY, **headers})


def left(outputs: Path) -> list[str]:
    return sorted(path.name for path in (outputs / ".studio/data").iterdir())


def test_a_file_arrives_as_it_was_and_is_listed(client, outputs):
    content = bytes(range(256)) * 10_000
    answer = send(client, "my rows-1.JSONL", content)
    assert answer.json() == {"path": str(outputs / ".studio/data/my rows-1.jsonl"), "name": "my rows-1.jsonl",
                             "bytes": 2_560_000}
    assert Path(answer.json()["path"]).read_bytes() == content
    (outputs / ".studio/data/link.csv").symlink_to("/etc/passwd")
    (outputs / ".studio/data/notes.py").write_text("")
    listed = client.get("/api/uploads").json()
    assert listed == {"files": [answer.json()]}


@pytest.mark.parametrize("name, kept", [
    ("../../x.jsonl", None), ("..", None), (".jsonl", None), ("a/b.jsonl", None), ("/etc/x.jsonl", None),
    ("a\\b.jsonl", None), ("a\0.jsonl", None), ("a\n.jsonl", None), (".hidden.jsonl", None), ("-rf.jsonl", None),
    ("x" * 300 + ".jsonl", None), ("rewards.py", None), ("rows", None), ("", None),
    ("a\u202etxt.jsonl", None), ("a:b.jsonl", None),
    ("U\u0308bung.jsonl", "Übung.jsonl"), ("数据 1.csv", "数据 1.csv"),
    ("x" * 190 + ".jsonl", "x" * 190 + ".jsonl"), ("a.b_c.txt", "a.b_c.txt")])
def test_a_name_leads_nowhere_else(outputs, name, kept):
    if kept:
        assert uploads.checked_name(name) == kept
        return
    from hybrid_rlhf.studio.studio import Refused

    with pytest.raises(Refused) as refusal:
        uploads.checked_name(name)
    assert "\n" not in str(refusal.value)
    with queue_client(outputs) as client:
        assert send(client, name).status_code in (400, 415) and left(outputs) == []
    assert sorted(path.name for path in outputs.iterdir()) in ([], [".studio"])


def test_two_of_one_name_at_once_are_two_files(client, outputs):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda i: send(client, "a.csv", f"{i}" * 2**20).json(), range(4)))
    assert sorted(each["name"] for each in made) == ["a-2.csv", "a-3.csv", "a-4.csv", "a.csv"] == left(outputs)
    for i, each in enumerate(made):
        assert Path(each["path"]).read_text() == f"{i}" * 2**20


def test_a_body_is_counted_as_it_comes(client, outputs, monkeypatch):
    monkeypatch.setattr(uploads, "MAX_BYTES", 3 * 2**20)
    assert send(client, "a.csv", b"x" * 3 * 2**20).status_code == 200
    assert send(client, "b.csv", b"x" * (3 * 2**20 + 1)).status_code == 413  # by its length
    answer = send(client, "c.csv", (b"x" * 2**18 for _ in range(13)))  # of no length: 3.25 MiB
    assert answer.status_code == 413 and "larger than" in answer.json()["error"]
    assert left(outputs) == ["a.csv"]


def test_a_client_that_leaves_midway_leaves_nothing(outputs):
    with running_studio(outputs) as studio:
        for ending in (b"", b"0\r\nnonsense"):
            head = (f"POST /api/upload?name=a.csv HTTP/1.1\r\nHost: 127.0.0.1:{studio.port}\r\nCookie: "
                    f"studio_{studio.port}={TOKEN}\r\nContent-Type: application/octet-stream\r\nContent-Length: "
                    f"{2**30}\r\n\r\n")
            with socket.create_connection(("127.0.0.1", studio.port)) as connection:
                connection.sendall(head.encode() + b"x" * 2**21 + ending)
                part = until(lambda: left(outputs))
                assert len(part) == 1 and part[0].startswith(".hybrid_rlhf-")
                assert studio.client.get("/api/uploads").json() == {"files": []}
            until(lambda: not left(outputs))
