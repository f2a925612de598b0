"""Draw small pictures of coloured shapes, and write the rows of the example: captions and questions for SFT, questions
with their answers for GRPO. Every picture is drawn here; no two splits share one.

    python examples/vision/make_pictures.py outputs/vision
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 205, 40)}
SHAPES = ("circle", "square", "triangle")
QUESTION = "What colour is it?"
SIZE = 32  # pixels


def draw(colour: str, shape: str, rng: random.Random) -> Image.Image:
    """One shape of any size and place, on a background of any grey."""
    grey = rng.randrange(0, 256)
    image = Image.new("RGB", (SIZE, SIZE), (grey, grey, grey))
    pen, size = ImageDraw.Draw(image), rng.randrange(12, 22)
    x, y = rng.randrange(0, SIZE - size), rng.randrange(0, SIZE - size)
    fill = tuple(min(255, max(0, part + rng.randrange(-25, 26))) for part in COLOURS[colour])
    if shape == "circle":
        pen.ellipse((x, y, x + size, y + size), fill=fill)
    elif shape == "square":
        pen.rectangle((x, y, x + size, y + size), fill=fill)
    else:
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=fill)
    return image


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path, num_captions: int, num_questions: int, num_unseen: int, seed: int) -> None:
    rng, rows = random.Random(seed), {"captions": [], "guesses": [], "questions": [], "unseen": []}
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for split, count in (("captions", num_captions), ("questions", num_questions), ("unseen", num_unseen)):
        for number in range(count):
            colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
            path = f"pictures/{split}_{number:05}.png"
            draw(colour, shape, rng).save(folder / path)
            if split == "captions":
                said = {"role": "assistant", "content": f"a {colour} {shape}"}
                rows[split].append({"messages": [*user("Describe it."), said], "images": [path]})
                guess = {"role": "assistant", "content": rng.choice(list(COLOURS))}  # at chance: GRPO has to teach it
                rows["guesses"].append({"messages": [*user(QUESTION), guess], "images": [path]})
            else:
                rows[split].append({"prompt": user(QUESTION), "images": [path], "answer": colour})
    images = [row["images"] for row in rows["questions"]]
    rng.shuffle(images)  # the same questions and answers about other pictures: nothing can be learned from them
    rows["shuffled"] = [row | {"images": other} for row, other in zip(rows["questions"], images, strict=True)]
    for name, part in rows.items():
        write(folder, name, part)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--captions", type=int, default=3000)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--unseen", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    make(asked.folder, asked.captions, asked.questions, asked.unseen, asked.seed)
