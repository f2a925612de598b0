"""The example notebooks, in a real kernel: one learns what it says, the others begin with an install; a cell can be
interrupted and run again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.factories.tiny import own_cache, save_tiny

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "notebook.ipynb"
HOSTED = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MOST_LINES = 60  # of a cell's output


class Executed:
    """A notebook that is executed in a kernel of its own, in `folder`.

    outputs: by cell id, as they stand at the end. written: by display id, when each version of an output was sent.
    on_cell: called with the client and every cell that begins; on_write: with the client, at each such version.
    """

    def __init__(self, notebook, folder: Path, allow_errors: bool = False, on_write=None) -> None:  # noqa: ANN001
        from nbclient import NotebookClient

        self.written: dict[str, list[float]] = {}
        found = self

        class Client(NotebookClient):
            def process_message(self, message, cell, index):  # noqa: ANN001, ANN202
                name = message["content"].get("transient", {}).get("display_id")
                if name:
                    found.written.setdefault(name, []).append(message["header"]["date"].timestamp())
                    if on_write:
                        on_write(self)
                return super().process_message(message, cell, index)

        Client(notebook, timeout=1200, kernel_name="python3", allow_errors=allow_errors,
               resources={"metadata": {"path": str(folder)}}).execute()
        self.cells = notebook.cells
        self.outputs = {cell["id"]: cell.get("outputs", []) for cell in notebook.cells}

    def text(self, name: str) -> str:
        """All that stands below a cell, as text."""
        return "\n".join(text_of(output) for output in self.outputs[name])


def text_of(output: dict) -> str:
    return output.get("text") or output.get("data", {}).get("text/plain") or "\n".join(output.get("traceback", []))


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch) -> None:
    """The kernel finds the library, and has a cache of its own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p))
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


@pytest.mark.parametrize("path", [EXAMPLE, *HOSTED], ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", HOSTED, ids=lambda path: path.stem)
def test_a_hosted_notebook_runs_on_a_cpu_with_little_output(path, tmp_path) -> None:
    """With a tiny model and three steps in place of its own."""
    import nbformat

    save_tiny(tmp_path / "base", max_position_embeddings=512)
    notebook = nbformat.read(path, as_version=4)
    cell = next(cell for cell in notebook.cells if cell["id"] == "settings")
    names = [line.split(" = ")[0] for line in cell.source.splitlines()]
    assert names == ["MODEL", "STEPS"]
    cell.source = 'MODEL, STEPS = "base", 3'
    done = Executed(notebook, tmp_path)
    assert done.text("install") == ("no card: a small model on the CPU\n--preset cpu: "
                                    "{'model.lora.r': 16, 'engine.micro_batch_tokens': 1024}\n")
    lines = (tmp_path / "outputs" / path.stem / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3 and (tmp_path / "outputs" / "my-model" / "model.safetensors").exists()
    for name, outputs in done.outputs.items():
        assert len(done.text(name).splitlines()) <= MOST_LINES, name
        said = "".join(output["text"] for output in outputs if output.get("name") == "stderr")  # export's line is there
        assert "Warning" not in said and "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_learns_what_it_says_and_floods_no_cell(tmp_path) -> None:
    import nbformat

    done = Executed(nbformat.read(EXAMPLE, as_version=4), tmp_path)
    runs = {name: json.loads((tmp_path / f"outputs/notebook/{name}/run.json").read_text())["metrics"]
            for name in ("sft", "reward", "ppo", "grpo")}
    assert runs["sft"]["eval/loss"] < 0.5 and runs["reward"]["eval/accuracy"] > 0.7
    first = {name: json.loads((tmp_path / f"outputs/notebook/{name}/metrics.jsonl").read_text().splitlines()[0])
             for name in ("ppo", "grpo")}
    before, after = first["ppo"]["reward"], runs["ppo"]["eval/reward"]
    assert after > before + 1
    assert f"mean score: {before:.2f} at the first step, {after:.2f} at the end" in done.text("ppo-gain")
    before, after = first["grpo"]["reward"], runs["grpo"]["eval/reward"]
    assert after > before + 0.15
    assert f"right answers: {before:.0%} at the first step, {after:.0%} at the end" in done.text("grpo-gain")
    assert "this grpo run is finished; nothing to do" in done.text("again")
    for name, outputs in done.outputs.items():
        assert len(done.text(name).splitlines()) <= MOST_LINES, name
        assert not any(output.get("name") == "stderr" for output in outputs), done.text(name)
        if name in runs:
            table, curves = (each["data"] for each in outputs if each["output_type"] == "display_data")
            assert "held out" in table["text/plain"] and "data:image/png" in curves["text/html"]
    assert len(done.written) == 8 and any(len(times) > 10 for times in done.written.values()), "it moved"
    for times in done.written.values():
        assert len(times) <= 2 * (times[-1] - times[0]) + 4  # as they were sent: a busy machine reads them together


TRAIN = """
import asyncio
from hybrid_rlhf import GRPOTrainer

asyncio.get_running_loop()  # a kernel's
rows = [{"prompt": f"say {i}"} for i in range(32)]

async def short(completions, **columns):
    await asyncio.sleep(0.001)
    return [-float(len(completion)) for completion in completions]

trainer = GRPOTrainer("base", rows, short, output_dir="run", max_steps=STEPS, max_new_tokens=4, num_generations=2,
                      max_prompt_length=32, per_device_train_batch_size=4, learning_rate=1e-3,
                      lr_scheduler_type="constant", warmup_ratio=0, num_fixed_prompts=0, dtype="float32",
                      logging_steps=1)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_cell_ends_in_good_order_and_goes_on_when_it_is_run_again(tmp_path) -> None:
    import nbformat

    save_tiny(tmp_path / "base")
    code = {"long": TRAIN.replace("STEPS", "100000"), "stopped": "trainer.train()", "after": "len(trainer.history)",
            "shorter": TRAIN.replace("STEPS", "len(trainer.history) + 3"), "goes-on": "trainer.train()",
            "finished": "trainer.train()", "wrong": "GRPOTrainer('base', rows, short, max_stepz=1)"}
    cells = [nbformat.v4.new_code_cell(text, id=name) for name, text in code.items()]
    seen = []

    def interrupt(client) -> None:  # noqa: ANN001
        seen.append(0)
        if len(seen) == 4:
            os.killpg(client.km.provisioner.pgid, signal.SIGINT)  # as Jupyter's button does

    done = Executed(nbformat.v4.new_notebook(cells=cells), tmp_path, allow_errors=True, on_write=interrupt)
    error = done.outputs["stopped"][-1]
    assert (error["output_type"], error["ename"], len(error["traceback"])) == ("error", "Stopped", 1), error
    steps = int(done.text("after"))
    assert error["traceback"][0].startswith(f"stopped after step {steps} of 100000\nmodel: ")
    assert "finishing this step, then saving a checkpoint" in done.text("stopped")
    went_on = done.text("goes-on")
    assert f"goes on after step {steps}" in went_on and f"grpo: 3 steps after {steps} in" in went_on
    assert "nothing to do" in done.text("finished")
    assert done.text("wrong").startswith("error: unknown option max_stepz (did you mean max_steps?)")
