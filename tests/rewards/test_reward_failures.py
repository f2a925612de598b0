"""Whatever a reward source does wrong, through the launcher: the step stops before anything is trained on it, and one
line names the source and the response."""

from __future__ import annotations

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli import main
from tests.factories.tiny import save_tiny, tiny_scalar_model, tiny_tokenizer

FILE = """
import asyncio, pathlib, time

def bad(completions, how, calls):
    file = pathlib.Path(calls)
    if how != "hangs" or len(completions) == 4:  # a hanging call is made again for each response, to find the culprit
        file.write_text(file.read_text() + "x" if file.exists() else "x")
    if len(file.read_text()) == 1:  # the first step is paid well
        return [0.1 * i for i in range(len(completions))]
    if how == "raises":
        raise KeyError("no such answer")
    good = [1.0] * len(completions)
    return {"nan": [*good[:-1], float("nan")], "few": good[:-1]}.get(how, good)

def stumbles(completions, how, calls, **_):
    answer = bad(completions, how, calls)
    if how == "hangs" and len(pathlib.Path(calls).read_text()) > 1:
        time.sleep(60)
    return answer

async def stumbles_async(completions, how, calls, **_):
    answer = bad(completions, how, calls)
    await asyncio.sleep(60 if how == "hangs" and len(pathlib.Path(calls).read_text()) > 1 else 0)
    return answer
"""
SAYS = {"raises": "raised KeyError: 'no such answer' .*for response 0 of 4: .*; it was given ",
        "hangs": "no answer within 0.3 s .*response 0", "nan": "score nan for response 3",
        "few": r"3 scores for 4 responses \(response 3 is the first without"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    rows = [{"prompt": f"say {w}"} for w in ("red", "blue", "sea", "cat", "dog", "fox", "sun", "moon")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "pay.py").write_text(FILE)
    save_tiny(folder / "base", template=False)
    return folder


def stopped(place: Path, out: str, capfd, *more: str, steps: int = 1) -> str:
    """The one line of error of a run that its source ended after `steps` good steps, which alone were saved, with the
    model of the last.
    """
    argv = ["--stage", "grpo", "--model.dtype", "float32", "--data.split", "null", "--data.eval_fraction", "0",
            "--data.max_prompt_length", "32", "--train.max_steps", "3", "--train.per_device_train_batch_size", "2",
            "--train.save_steps", "1", "--ppo.sampling.max_new_tokens", "6", "--ppo.sampling.num_samples", "2",
            "--output_dir", f"{place}/{out}", f"--data.cache_dir={place}/cache",
            f"--data.sources=[{{path: {place}/rows.jsonl}}]", "--model.model_name_or_path", f"{place}/base", *more]
    began = time.monotonic()
    assert main(argv) == 2 and time.monotonic() - began < 20
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    run = place / out
    assert len((run / "metrics.jsonl").read_text().splitlines()) == steps
    assert len(list((run / "checkpoints").glob("*"))) == steps
    record = json.loads((run / "run.json").read_text())
    assert (run / "model" / "model.safetensors").exists() == bool(steps)
    assert record["facts"].get("model_step", 0) == steps
    assert record["status"] == "failed" and lines[0].removeprefix("error: ") in record["error"]
    return lines[0]


@pytest.mark.parametrize("name, how", [
    ("stumbles", "raises"), ("stumbles", "hangs"), ("stumbles", "nan"), ("stumbles", "few"),
    ("stumbles_async", "raises"), ("stumbles_async", "hangs")])
def test_a_function_sync_or_async(place, capfd, name, how):
    out = f"{name}_{how}"
    line = stopped(place, out, capfd, f"--reward.functions={place}/pay.py:{name}", "--reward.timeout=0.3",
                   f"--reward.options={{{name}: {{how: {how}, calls: {place}/{out}.calls}}}}")
    assert re.search(f"reward source {name}: .*{SAYS[how]}|reward source {name}: {SAYS[how]}", line), line


@pytest.mark.parametrize("answer, message", [
    ((500, ""), "answered status 500 .*for 4 responses from response 0 on"),
    ((200, {"scores": [1, 2]}), "answered 2 scores, for 4 responses from response 0 on"),
    ((200, '{"scores": [1, 2, NaN, 4]}'), "score nan for response 2"),
    (None, "no answer within 1 s.*for 4 responses from response 0 on|timed out.*for 4 responses"),
])
def test_a_service(place, capfd, answer, message):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            if len(asked) > 1 and answer is None:
                time.sleep(5)
                return
            status, body = (200, {"scores": [1, 2, 3, 4]}) if len(asked) == 1 else answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/score"
        line = stopped(place, f"service_{message[:12]}".replace(" ", "_"), capfd, f"--reward.url={url}",
                       f"--reward.timeout={1 if answer is None else 20}", "--reward.retries=0")
        server.shutdown()
    assert re.search(f"reward source service.*({message})", line), line


def test_a_classifier_with_broken_weights(place, capfd):
    model = tiny_scalar_model()
    model.config.pad_token_id = 0
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(place / "judge")
    tiny_tokenizer().save_pretrained(place / "judge")
    line = stopped(place, "classified", capfd, f"--reward.models={place}/judge", steps=0)
    assert "reward source judge: score nan for response 0" in line
