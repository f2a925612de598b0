"""lm-evaluation-harness against the server: the numbers of its own transformers backend, and of transformers itself.

Where it is not installed these are skipped (pip install "lm_eval[api]").
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.factories.tiny import save_tiny
from tests.inference.server.tiny_server import running

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval")]

ROWS = [{"question": f"What is the last word of: red sun {word}?", "target": word, "answer": i,
         "choices": [" cat", " red fox", " wood is", "the end"]} for i, word in enumerate(["cat", "fox", "sun", "who"])]
KINDS = {
    "mc": 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
          "metric_list:\n  - metric: acc\n",
    "gen": "output_type: generate_until\ndoc_to_target: target\ngeneration_kwargs:\n  until: [\"\\n\\n\", \"Q:\"]\n"
           "  max_gen_toks: 12\nmetric_list:\n  - metric: exact_match\n",
    "ppl": "output_type: loglikelihood_rolling\ndoc_to_target: question\nmetric_list:\n  - metric: word_perplexity\n",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model, and tasks whose rows are a file."""
    place = tmp_path_factory.mktemp("lm_eval")
    save_tiny(place / "model")
    (place / "rows.json").write_text(json.dumps(ROWS))
    (place / "tasks").mkdir()
    for name, kind in KINDS.items():
        question = "" if name == "ppl" else "Question: {{question}}\\nAnswer:"
        (place / "tasks" / f"{name}.yaml").write_text(
            f"task: ours_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {place}/rows.json\n"
            f"test_split: test\ndoc_to_text: \"{question}\"\n{kind}")
    return place


def _results(place: Path, model: str, given: str, *flags: str) -> dict[str, list]:
    """What the suite's command noted of each task's questions: their filtered responses, in order."""
    out = place / f"{model}{len(list(place.iterdir()))}"
    done = subprocess.run([sys.executable, "-m", "lm_eval", "--model", model, "--model_args", given, "--tasks",
                           ",".join(f"ours_{name}" for name in KINDS), "--include_path", f"{place}/tasks",
                           "--output_path", str(out), "--log_samples", *flags], capture_output=True, text=True,
                          env=os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1",
                                            "HF_HOME": str(place / "home")}, cwd=place)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in KINDS:
        [file] = out.glob(f"*/samples_ours_{name}_*.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        found[name] = [row["filtered_resps"] for row in rows]
    return found


@pytest.fixture(scope="module")
def want(place) -> dict[str, list]:
    return _results(place, "hf", f"pretrained={place}/model,max_length=256,dtype=float32", "--device", "cpu")


def test_its_tasks_have_the_numbers_of_its_own_backend(place, want):
    with running({"ours": str(place / "model")}) as served:
        found = _results(place, "local-completions", f"model=ours,tokenizer={place}/model,max_length=256,"
                         f"base_url={served.url}/v1/completions")
    assert found["gen"] == want["gen"] and len(want["gen"]) == len(ROWS)
    for ours, theirs in zip(found["mc"], want["mc"], strict=True):
        assert [float(each[0]) for each in ours] == pytest.approx([float(each[0]) for each in theirs], abs=1e-4)
        assert [str(each[1]) for each in ours] == [str(each[1]) for each in theirs]  # whether greedy
    ours, theirs = ([float(each[0]) for each in numbers["ppl"]] for numbers in (found, want))
    assert ours == pytest.approx(theirs, abs=1e-4)
    _check_by_transformers(place, found["mc"])


def _check_by_transformers(place: Path, found: list) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(place / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for row, scored in zip(ROWS, found, strict=True):
        context = f"Question: {row['question']}\nAnswer:"
        for choice, (number, _) in zip(row["choices"], scored, strict=True):
            before = len(tokenizer(context)["input_ids"])
            ids = tokenizer(f"{context} {choice}")["input_ids"]  # a space between the two is the suite's default
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
            want = sum(float(logprobs[i - 1, ids[i]]) for i in range(before, len(ids)))
            assert float(number) == pytest.approx(want, abs=1e-3)
