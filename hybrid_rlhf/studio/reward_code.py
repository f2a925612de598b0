"""Reward functions that are written in the page: tried on the first rows, and kept in .studio/rewards.

Both run or store code, so the middleware asks for the studio's token again (studio_app.Access).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hybrid_rlhf.core.errors import UserError, check
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.studio.studio import Refused, Route, Studio, own_folder

FILE, NAME, SECONDS = "my_reward", "reward", 10.0  # NAME: of the function; SECONDS: for one call of it
_ANSWERS = ("completion", "answer", "chosen", "output", "response")  # columns whose text is tried as an answer


def routes(studio: Studio) -> list[Route]:
    return [Route("POST", "/api/reward/keep", lambda _query, body: keep(studio, body["code"]))]


def keep(studio: Studio, code: str) -> dict:
    """Save the code as FILE.py, or where that holds another one as FILE-2.py; {"function"} is what reward.functions
    takes."""
    try:
        compile(code, FILE, "exec")
    except (SyntaxError, ValueError) as error:
        raise Refused(400, f"this is not Python: {error}") from error
    folder, number = own_folder(studio, "rewards"), 1
    while (path := folder / (f"{FILE}.py" if number == 1 else f"{FILE}-{number}.py")).exists() and (
            path.read_text("utf-8") != code):
        number += 1
    write_file(path, code)
    return {"function": f"{path}:{NAME}"}


def tried(asked: dict) -> dict:
    """{"code", "source": a data source, "answer"} -> {"rows": [{"prompt", "answer", "score"}]}: the function's scores
    of `answer`, or where it is empty of each row's own answer. In a process of preflight.py, the code in another."""
    from hybrid_rlhf.data.question import question_of
    from hybrid_rlhf.data.sources import Source, first_rows
    from hybrid_rlhf.rewards.functions import open_functions, parameters

    rows, _ = first_rows(Source(**asked["source"]))
    column = next((name for name in _ANSWERS if name in rows[0]), None)
    answers = [asked.get("answer") or (str(row.get(column) or "") if column else "") for row in rows]
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "your_function.py")
        path.write_text(asked["code"], encoding="utf-8")
        try:
            function = open_functions([f"{path}:{NAME}"], {}, SECONDS, isolate=True)[0].function
            prompts = [question_of(row, ("prompt",)).text for row in rows]
            completions = [[{"role": "assistant", "content": answer}] if isinstance(prompt, list) else answer
                           for prompt, answer in zip(prompts, answers, strict=True)]
            inputs = columns | {"prompts": prompts, "completions": completions}
            named, takes_all = parameters(function)
            scores = function("your function", {k: v for k, v in inputs.items() if takes_all or k in named}, SECONDS)
            check(isinstance(scores, list) and len(scores) == len(rows),
                  f"the function returned {scores!r:.100}; it must return a list with a number for each answer")
        except Exception as error:  # of the user's code, as its process reports them
            raise UserError(str(error).replace(f"{folder}/", "")) from error
    return {"rows": [{"prompt": str(prompt)[:300], "answer": answer[:300], "score": score}
                     for prompt, answer, score in zip(prompts, answers, scores, strict=True)]}
