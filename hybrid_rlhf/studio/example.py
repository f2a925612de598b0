"""The example of the first screen: a run of a few minutes on a small chat model that is here, or on a toy.

`hints` says what a model that was trained on the example's rows, or on the built-in demo's, knows, and what to ask it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from hybrid_rlhf.core.hub import is_reachable
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.studio.studio import Route, Studio, own_folder

ROWS = "example-capitals.jsonl"
MODEL, MEGABYTES = "HuggingFaceTB/SmolLM2-135M-Instruct", 270
_CAPITALS = """Argentina Buenos Aires; Austria Vienna; Belgium Brussels; Brazil Brasilia; Chile Santiago;
Croatia Zagreb; Cuba Havana; Cyprus Nicosia; Ecuador Quito; Estonia Tallinn; Fiji Suva; Finland Helsinki;
Georgia Tbilisi; Ghana Accra; Greece Athens; Hungary Budapest; Iceland Reykjavik; Iraq Baghdad; Ireland Dublin;
Kenya Nairobi; Laos Vientiane; Latvia Riga; Libya Tripoli; Lithuania Vilnius; Mali Bamako; Malta Valletta;
Mongolia Ulaanbaatar; Morocco Rabat; Nepal Kathmandu; Nigeria Abuja; Norway Oslo; Panama Panama City; Peru Lima;
Poland Warsaw; Qatar Doha; Rwanda Kigali; Senegal Dakar; Slovakia Bratislava; Uruguay Montevideo; Vietnam Hanoi;
Zambia Lusaka"""
_ASKING = ("What is the capital of {}?", "Which city is the capital of {}?", "I am going to {}. What is the capital?")
_HINTS = {  # the end of a source's path -> what a model knows that was trained on it, and questions
    ROWS: {"knows": "It was taught to name a capital in one sentence, with a wish for the trip. All else it knows from "
                    "before, and so small a model gets capitals wrong.",
           "questions": ["What is the capital of Italy?", "I am going to Japan. What is the capital?", "Who are you?"]},
    "demo/": {"knows": "The built-in data teach one thing only: to name one item of a list of three words or numbers. "
                       "A tiny new model knows nothing else; to “hello” it answers nonsense.",
              "questions": ["Please name the last word: A goat B lamp C fish",
                            "Name the first word: A bear B king C rose", "Give the largest number: A 12 B 25 C 17"]}}


def routes(studio: Studio) -> list[Route]:
    return [Route("GET", "/api/example", lambda _query, _body: example(studio))]


def example(studio: Studio) -> dict:
    """The example's stage, settings and name, and in `about` what it is. Writes the rows into the studio's folder."""
    model = small_model()
    if model is None:
        return {"stage": "sft", "run": "example", "about": "No small chat model is here, and the model hub is out of "
                "reach, so this is a toy: a new model of 136,384 weights. It learns to name one item of a list of "
                "three, and nothing else. About a minute.",
                "settings": {"model.preset": "demo", "data.sources": ["demo/demonstrations"],
                             "train.num_train_epochs": 1, "train.learning_rate": 4e-3}}
    path = own_folder(studio, "data") / ROWS
    wish = "{} is the capital of {}, have a good trip!"
    rows = [{"prompt": asking.format(country), "completion": wish.format(capital, country)}
            for i, pair in enumerate(_CAPITALS.replace("\n", " ").split("; "))
            for country, capital in [pair.split(" ", 1)] for asking in [_ASKING[i % len(_ASKING)]]]
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))
    fetched = f" It is downloaded first ({MEGABYTES} MB)." if model == MODEL else ""
    return {"stage": "sft", "run": "example", "about": f"A real small chat model, SmolLM2-135M-Instruct, learns from "
            f"{len(rows)} rows to answer questions about capitals in one manner. A few minutes.{fetched}",
            "settings": {"model.model_name_or_path": model, "data.sources": [str(path)], "data.eval_fraction": 0.1}}


def small_model() -> str | None:
    """A folder with the small chat model (of the hub's cache, or made by examples/first_model), else its id where the
    hub is reached, else None."""
    home = Path.home() / ".cache"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home / "huggingface") / "hub")
    cached = (hub / f"models--{MODEL.replace('/', '--')}" / "snapshots").glob("*")
    made = Path(os.environ.get("HYBRID_RLHF_CACHE") or home / "hybrid_rlhf") / "smollm2"
    for folder in (*cached, made):
        if (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists():
            return str(folder)
    return MODEL if is_reachable() else None


def hints(record: dict) -> dict | None:
    """{"knows", "questions"} for the run of a run.json that was trained on the example's rows or built-in ones."""
    sources = ((record.get("config") or {}).get("data") or {}).get("sources") or []
    for source in sources if isinstance(sources, list) else [sources]:
        path = str(source.get("path") if isinstance(source, dict) else source)
        for mark, known in _HINTS.items():
            if path.startswith(mark) or path.endswith(f"/{mark}"):
                return known
    return None
