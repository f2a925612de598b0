"""Made-up answers of the studio's addresses for a new run, in their real shapes; what was asked is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_rlhf.studio.studio import Refused, Route, Studio
from tests.factories import studio_server
from tests.factories.browser import find, retype, until
from tests.factories.studio_server import Running, running_studio

ROW = '{"prompt": "What is 2 + 2?", "chosen": "<script>document.title = \'broken\'</script>4", "rejected": "5"}'
GOALS = [
    ("imitate", "Imitate examples", "The model learns to answer as your examples do.", ["sft", "conditional_sft"],
     ["model", "data"], "conversations, or prompts with answers"),
    ("prefer", "Learn from preferences", "Of two answers it learns to give the one that was liked better.",
     ["dpo", "ipo", "kto"], ["model", "data"], "a prompt with a better and a worse answer"),
    ("function", "Please a function", "A program checks each answer, such as the result of a calculation.",
     ["grpo", "rloo"], ["model", "data", "reward_functions", "tools"], "prompts, with what the function needs"),
    ("model", "Please a reward model", "A model that was trained on preferences scores each answer.",
     ["ppo", "grpo"], ["model", "data", "reward_model", "tools"], "prompts"),
    ("judge", "Please a judge", "A language model reads each answer and says how good it is.",
     ["grpo"], ["model", "data", "judge", "tools"], "prompts"),
    ("distil", "Learn from a teacher", "A small model learns from a large one, word by word.",
     ["distill"], ["model", "data", "teacher"], "prompts"),
    ("three_stages", "All three stages", "Imitate, learn what is preferred, then PPO: the classic way.",
     ["all"], ["model", "data"], "preference pairs, or a file for each stage")]
COLUMN = ("column", "Column with the right answer", "answer")
REWARDS = [("exact_match", "1 where the answer is the column's text.", [COLUMN], []),
           ("numeric_match", "1 where the answer's last number is that of the column, else 0.",
            [COLUMN, ("tolerance", "Largest difference", 0.0), ("strict", "To the letter", False)], []),
           ("length_penalty", "Subtracts where an answer gets too long.",
            [("max_tokens", "Full penalty from", 256), ("buffer", "Begins before", 64)], ["max_tokens", "buffer"]),
           ("demo_correct", "1 where the answer to a prompt of demo/prompts is right.", [], [])]


def option(name: str, section: str, kind: str, default: object, text: str, **more: object) -> dict:
    return {"name": name, "section": section, "kind": kind, "choices": [], "default": default, "null": default is None,
            "help": text, "is_common": False, **more}


MODEL, DATA, TRAIN, ENGINE = "The model", "The data", "The schedule", "How training is laid out"
OPTIONS = [
    option("model.model_name_or_path", MODEL, "text", None, "Hub id or local folder of a causal language model.",
           is_common=True),
    option("model.preset", MODEL, "choice", None, "Instead of that: a random model from scratch.",
           choices=["tiny", "demo", "small"]),
    option("model.lora.r", MODEL, "int", 0, "Rank of the update; 0 turns LoRA off.", is_common=True),
    option("model.load_in_4bit", MODEL, "bool", False, "Hold the frozen weights in 4 bits.", is_common=True),
    option("model.freeze", MODEL, "list", [], "Regular expressions; such parameters are not trained."),
    option("model.dtype", MODEL, "choice", "auto", "Type of the weights.", choices=["auto", "float32", "bfloat16"]),
    option("data.sources", DATA, "json", [], "Where the rows come from: a path, or a list of paths and mappings."),
    option("data.split", DATA, "list", None, "Shares of the prompts for stages sft, reward and ppo."),
    option("data.max_length", DATA, "int", 1024, "Longest sequence in tokens.", is_common=True),
    option("train.learning_rate", TRAIN, "float", None, "Peak learning rate; null goes by the method.", is_common=True),
    option("train.max_steps", TRAIN, "int", -1, "Number of steps; -1 goes by the epochs.", is_common=True),
    option("train.warmup_ratio", TRAIN, "float", 0.03, "Share of the steps during which the rate rises."),
    option("train.adam_epsilon", TRAIN, "float", 1e-8, "Added to the root of the square."),
    option("engine.offload", ENGINE, "list", [], "What is kept in the CPU's memory."),
    option("engine.micro_batch_tokens", ENGINE, "int", 8192, "Most tokens that one forward and backward may hold."),
    option("reward.functions", "Rewards", "list", [], "Python functions, path.py:name or builtin:name."),
    option("reward.options", "Rewards", "json", {}, "Further keywords of the functions, by name."),
    option("roles.teacher.model_name_or_path", "Roles", "text", None, "Model of this role."),
    option("environment.tools", "Tools", "list", [], "Functions that the model may call.")]
DPO = [option("dpo.beta", "DPO", "float", None, "How strongly the model is held to its start.", is_common=True,
              by_table="0.1")]
CARD = {"24gb": {"model.lora.r": 16, "model.load_in_4bit": True}}


@dataclass
class Stub:
    """asked: name -> bodies ("get NAME": queries). refusal: the error of /api/settings; refusals: name -> what is
    raised; once: the same, each one time; slow: name -> seconds; output: of every job."""

    asked: dict[str, list[dict]] = field(default_factory=dict)
    runs: list[dict] = field(default_factory=list)
    jobs: list[dict] = field(default_factory=list)
    uploads: list[dict] = field(default_factory=list)
    left_empty: dict[str, str] = field(default_factory=dict)
    refusal: dict | None = None
    refusals: dict[str, Refused] = field(default_factory=dict)
    output: str = ""
    studio: Studio | None = None
    slow: dict[str, float] = field(default_factory=dict)

    def open_parts(self, studio: Studio) -> tuple[list[Route], list]:
        self.studio = studio
        gets = {"goals": self.goals, "options": self.options, "runs": self.list_runs, "jobs": self.list_jobs,
                "job": self.job, "uploads": lambda _q, _b: {"files": self.uploads}}
        posts = {"settings": self.settings, "data": self.data, "preview": self.preview, "plan": self.plan,
                 "jobs": self.add_job, "job/stop": self.stop_job, "reward/try": self.try_reward,
                 "reward/keep": lambda _q, body: {"function": f"/kept/{len(body['code'])}.py:reward"}}
        routes = [Route("GET", f"/api/{name}", self.kept(f"get {name}", handle)) for name, handle in gets.items()]
        routes += [Route("POST", f"/api/{name}", self.kept(name, handle)) for name, handle in posts.items()]
        return [*routes, Route("POST", "/api/upload", self.upload, is_raw=True)], []

    def kept(self, name, handle):  # noqa: ANN001, ANN201
        def answer(query: dict, body: dict) -> dict:
            self.asked.setdefault(name, []).append(body or query)
            time.sleep(self.slow.get(name, 0))
            if name in self.refusals:
                raise self.refusals[name]
            return handle(query, body)

        return answer

    def last(self, name: str) -> dict:
        return self.asked.get(name, [{"settings": {}, "stage": None, "card": None}])[-1]

    def goals(self, _query: dict, _body: dict) -> dict:
        names = ("id", "title", "help", "stages", "asks", "rows")
        return {"goals": [dict(zip(names, row, strict=True)) for row in GOALS], "cards": ["cpu", "8gb", "24gb", "80gb"],
                "card": "24gb", "builtin_rewards": [
                    dict(zip(("name", "help", "fields", "needed"), row, strict=True)) for row in REWARDS]}

    def options(self, query: dict, _body: dict) -> dict:
        more = DPO if query["stage"] in ("dpo", "ipo") else []
        return {"options": OPTIONS + more, "help": f"what {query['stage']} does"}

    def list_runs(self, _query: dict, _body: dict) -> dict:
        return {"folder": str(self.studio.outputs), "runs": self.runs, "bytes": 0, "free": 10**9}

    def list_jobs(self, _query: dict, _body: dict) -> dict:
        return {"jobs": self.jobs}

    def job(self, query: dict, _body: dict) -> dict:
        after = int(query.get("after", 0))
        found = next(job for job in self.jobs if job["id"] == query["id"])
        return {"job": found, "output": self.output[after:], "next": len(self.output)}

    def settings(self, _query: dict, body: dict) -> dict:
        complete = {**CARD.get(body["card"], {}), **body["settings"]}
        lines = "".join(f"{name}: {value}\n" for name, value in complete.items())
        defaults = {option["name"]: option["default"] for option in OPTIONS}
        file = f"{body['run'] or 'settings'}.yaml"
        return {"yaml": f"# {body['stage']}\n{lines}", "file": file, "given": complete, "error": self.refusal,
                "left_empty": self.left_empty,
                "command": f"hybrid-rlhf --stage {body['stage']} --config {file}", "settings": defaults | complete}

    def data(self, _query: dict, body: dict) -> dict:
        if body["path"].startswith("none"):
            return {"rows": None, "format": None, "columns": [], "fits": False, "first": [],
                    "why": f"data.sources: {body['path']} does not exist; give a file, a folder or a hub id"}
        if "odd" in body["path"]:
            fits = len(body.get("columns") or {}) == 2
            return {"rows": 3, "format": "prompt-completion" if fits else None, "fits": fits, "first": [],
                    "columns": ["prompt", "completion"] if fits else ["riddle", "solution"],
                    "first_row": {"riddle": "2 + 2?", "solution": "<b>4</b>"}, "why": "read" if fits else "no format"}
        fits = "pairs" in body["path"] or "demo" in body["path"]
        return {"rows": 1234, "format": "preference", "columns": ["prompt", "chosen", "rejected"], "fits": fits,
                "why": "preference rows make pairs" if fits else "prompt rows make no pair", "first": [ROW] * 3}

    def try_reward(self, _query: dict, body: dict) -> dict:
        return {"rows": [{"prompt": "2 + 2?", "answer": body["answer"] or "<i>4</i>", "score": 0.5}]}

    def preview(self, _query: dict, _body: dict) -> dict:
        parts = [{"text": "<b>user</b>: What is 2 + 2?\n", "is_trained": False},
                 {"text": "4<|end|>", "is_trained": True}]
        return {"counts": [{"name": "rows read", "rows": 1234}, {"name": "trained on", "rows": 1172}],
                "dropped": [{"why": "longer than data.max_length", "rows": 62}, {"why": "no prompt", "rows": 0}],
                "examples": [{"title": "chosen, 12 tokens", "parts": parts}]}

    def plan(self, _query: dict, _body: dict) -> dict:
        phases = [{"name": "sample", "bytes": 9 * 2**30}, {"name": "update", "bytes": 31 * 2**30}]
        return {"fits": False, "available": 24 * 2**30, "phases": phases,
                "lines": [{"name": "actor: weights", "bytes": 6 * 2**30}],
                "times": [{"name": "sample", "seconds": 2.5}],
                "verdict": "short by 7 GiB: needs 31 GiB at most (update) of 24 GiB",
                "plan_notes": [], "time_note": "predicted and not measured",
                "changes": [{"option": "model.load_in_4bit", "value": True, "why": "less memory"}]}

    def add_job(self, _query: dict, body: dict) -> dict:
        is_busy = any(job["state"] == "running" for job in self.jobs)
        job = {"id": f"job{len(self.jobs) + 1}", "kind": body["kind"], "title": body["stage"], "stage": body["stage"],
               "run": body.get("run"), "state": "queued" if is_busy else "running", "place": 1 if is_busy else None,
               "error": None, "rc": None, "created": "2026-11-23T14:00:00Z", "started": None, "finished": None}
        self.jobs.append(job)
        self.studio.news.publish("jobs", {})
        return job

    def stop_job(self, _query: dict, body: dict) -> dict:
        return self.change(body["id"], state="stopped")

    def change(self, number: str, **values: object) -> dict:
        """A job's state, told to the page."""
        job = next(job for job in self.jobs if job["id"] == number)
        job.update(values)
        self.studio.news.publish("jobs", {})
        return job

    async def upload(self, request):  # noqa: ANN001, ANN201
        from starlette.responses import JSONResponse

        if "large" in request.query_params["name"]:
            raise Refused(507, "the disk is full")
        folder = self.studio.home / "data"
        folder.mkdir(parents=True, exist_ok=True)
        path: Path = folder / request.query_params["name"]
        path.write_bytes(await request.body())
        self.uploads.append({"name": path.name, "path": str(path), "bytes": path.stat().st_size})
        return JSONResponse({"path": str(path), "name": path.name, "bytes": path.stat().st_size})


def run_row(name: str, stage: str, status: str = "finished", has_model: bool = True) -> dict:
    return {"id": name, "stage": stage, "status": status, "step": 10, "max_steps": 10,
            "started": "2026-11-23T14:00:00Z", "finished": None, "seconds": 60.0, "parents": [],
            "headline": [], "alarms": 0, "bytes": 10**6,
            "has_model": has_model, "error": None}


class NewRunPage:
    """browser: on the page, once `visit` has been called. stub: what answers it."""

    def __init__(self, browser, stub: Stub, studio: Running) -> None:  # noqa: ANN001
        self.browser, self.stub, self.studio = browser, stub, studio

    def visit(self, query: str = "") -> None:
        """Load it afresh."""
        self.browser.get("about:blank")
        self.browser.get(f"{self.studio.base}/#/new{query}")
        self.until(lambda: self.find("fieldset.goal-cards"))

    def ready(self, query: str = "?goal=prefer&model=demo/sft&data=pairs.jsonl") -> None:
        """The same, until nothing is missing."""
        self.visit(query)
        self.says("Everything is there")

    def until(self, condition):  # noqa: ANN001, ANN201
        return until(self.browser, condition)

    def says(self, text: str) -> None:
        """Until the line on what comes next has this text."""
        self.until(lambda: text in self.find(".next-line").text)

    def find(self, selector: str):  # noqa: ANN201
        return find(self.browser, selector)

    def all(self, selector: str) -> list:
        return self.browser.find_elements("css selector", selector)

    def run(self, script: str, *given: object):  # noqa: ANN201
        return self.browser.execute_script(script, *given)

    def click(self, selector: str) -> None:
        self.until(lambda: self.find(selector)).click()

    def press(self, title: str) -> None:
        """The button that reads so."""
        self.until(lambda: next((b for b in self.all("button") if b.text == title), None)).click()

    def goal(self, name: str) -> None:
        self.click(f"input[value={name}]")
        self.until(lambda: self.find("#step-4"))

    def fill(self, selector: str, text: str) -> None:
        retype(self.until(lambda: self.find(selector)), text)

    def set(self, option: str, text: str, tag: str = "input") -> None:
        self.fill(entry(option, tag), text)

    def fault(self, option: str) -> str:
        """What is said against an option; nothing where nothing is shown."""
        return self.find(entry(option, ".fault")).text

    def sent(self, option: str):  # noqa: ANN201
        """Until the studio was asked about settings that have `option`; its value."""
        self.until(lambda: option in self.settings)
        return self.settings[option]

    def sends(self, option: str, value: object) -> None:
        """Until the studio was asked about this value."""
        self.until(lambda: self.settings.get(option) == value)

    @property
    def settings(self) -> dict:
        """Those that the studio was asked about last."""
        return self.stub.last("settings")["settings"]

    def is_focused(self, selector: str) -> bool:
        return self.run("return document.activeElement.matches(arguments[0])", selector)

    def focuses(self, selector: str) -> None:
        """Until the focus is there: the page may have asked the studio first."""
        self.until(lambda: self.is_focused(selector))

    def keys(self, *keys: str) -> None:
        """Pressed wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.browser, duration=0).send_keys(key).perform()

    def tab_to(self, selector: str) -> None:
        from selenium.webdriver.common.keys import Keys

        for _ in range(120):
            if self.is_focused(selector):
                return
            self.keys(Keys.TAB)
        raise AssertionError(f"no key leads to {selector}")

    def open_everything(self) -> None:
        """All folds open, all that can be asked for asked."""
        self.until(lambda: self.find("#ask-plan"))
        for selector in ("input[value=url]", "input[value=own]", "input[value=three]", "#reward-numeric_match",
                         "#has-tools"):
            for found in self.all(selector):
                found.click()
        self.run("for (const d of document.querySelectorAll('details')) d.open = true")
        if "Everything is there" in self.find(".next-line").text:
            self.click("#ask-plan")
            self.until(lambda: self.find(".checks .bars"))
            self.click("#ask-preview")
            self.until(lambda: self.find(".example"))


def entry(option: str, tag: str = "input") -> str:
    """A selector of what is in an option's field."""
    return f"[data-option='{option}'] {tag}"


@contextmanager
def new_run_page(browser, stub: Stub, outputs: Path, monkeypatch) -> Iterator[NewRunPage]:  # noqa: ANN001
    """Nothing was entered yet. At the end no script of the page may have failed."""
    monkeypatch.setattr(studio_server, "open_parts", stub.open_parts)
    with running_studio(outputs) as studio:
        browser.get(studio.url)
        browser.execute_script("sessionStorage.clear()")
        yield NewRunPage(browser, stub, studio)
        browser.get("about:blank")  # its connection for news ends, and the studio need not wait
        faults = [e for e in browser.get_log("browser") if "api/" not in e["message"] and e["level"] == "SEVERE"]
        assert not faults
