"""Today's checkpoints exactly as published, tiny and random: each trained, asked and exported as a user would.

    python benchmarks/checkpoints.py [--cases gemma3 ...] [--quick] [--json FILE] [--page FILE]

For each folder (tests/factories/checkpoints.py): SFT and GRPO of two steps with LoRA, one reply of the chat, and the
adapter merged by `export`, each command in a process forked from this one. What SFT saved and what was exported is then
loaded by plain transformers, by the class that the folder's config.json names, and compared with the base: the logits
with the base's plus the adapter by peft, the tensors that nobody trained bit for bit, names, files, configuration and
tokenizer. Exit code 1 if a folder neither ends in such a model nor is refused in one line before its first step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest.mock import patch

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from fault_tries.product import Ended, command
from faults import import_everything
from harness import first_lines, parse, parser_of, run_forked, table_of, write_rows, write_tables
from tiny_configs import versions

from tests.factories import checkpoints
from tests.factories.checkpoints import CHECKPOINTS

CASES = CHECKPOINTS
STAGES = ("sft", "grpo", "chat", "export")
WORDS = ["red", "blue", "green", "wild", "old", "new", "kind", "sly"]
SECONDS = 240.0  # for one command
COMMON = ("--model.lora.r", "4", "--train.max_steps", "2", "--train.per_device_train_batch_size", "2",
          "--train.num_fixed_prompts", "0")
SFT = ("--data.max_length", "2048", "--train.learning_rate", "0.003", "--data.sources", "sft.jsonl")
GRPO = ("--data.max_prompt_length", "1500", "--roles.actor.learning_rate", "0.01", "--data.sources", "prompts.jsonl",
        "--ppo.sampling.max_new_tokens", "6", "--ppo.sampling.num_samples", "2", "--reward.functions",
        "builtin:length_penalty", "--reward.options", "{length_penalty: {max_tokens: 4, buffer: 2}}")


@dataclass
class Row:
    """One folder. path: of the decode engine. sft, grpo, chat, export: ok, not tried, `refused: ` and the line that
    said so before the first step, or `failed: ` and how. frames: the traceback's last place in the product, by stage.
    """

    case: str
    source: str
    architecture: str
    path: str = ""
    sft: str = "not tried"
    grpo: str = "not tried"
    chat: str = "not tried"
    export: str = "not tried"
    frames: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_refused(self) -> bool:
        return self.sft.startswith("refused: ") and self.grpo.startswith("refused: ")

    @property
    def is_right(self) -> bool:
        """Whether every stage went through, or both trainings were refused in a line."""
        return self.is_refused or all(getattr(self, stage) in ("ok", "not tried") for stage in STAGES)


# -- one folder --------------------------------------------------------------------------------------------------------


def row_of(name: str, stages: Sequence[str] = STAGES) -> Row:
    """What becomes of a published checkpoint in some of the stages, in a new folder below the current one."""
    checkpoint = CHECKPOINTS[name]
    row, began = Row(name, checkpoint.source, checkpoint.architecture), time.monotonic()
    place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=os.getcwd()))
    before = os.getcwd()
    os.chdir(place)
    try:
        if (lacking := checkpoints.missing(name)) is not None:
            row.sft = row.grpo = f"refused: {lacking}"
            return row
        apart(checkpoints.write, name, "base")  # not here: what is forked from must have no threads
        write_data()
        _try(row, stages)
    finally:
        os.chdir(before)
        shutil.rmtree(place, ignore_errors=True)
        row.seconds = round(time.monotonic() - began, 1)
    return row


def write_data() -> None:
    for file, rows in (("sft.jsonl", [{"messages": [{"role": "user", "content": f"What is {w}?"},
                                                    {"role": "assistant", "content": f"A {w} fox."}]} for w in WORDS]),
                       ("prompts.jsonl", [{"messages": [{"role": "user", "content": f"Who is {w}?"}]} for w in WORDS])):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _try(row: Row, stages: Sequence[str]) -> None:
    packed = CHECKPOINTS[row.case].loads_in_4bit
    train = ("--model.model_name_or_path", "base", *COMMON, "--model.load_in_4bit", str(packed).lower())
    row.sft = outcome(row, "sft", "--stage", "sft", *train, *SFT, "--output_dir", "sft")
    row.grpo = outcome(row, "grpo", "--stage", "grpo", *train, *GRPO, "--output_dir", "grpo")
    is_trained = row.sft == "ok"
    if is_trained:
        row.sft = judged(row.architecture, "sft/model")
    if "chat" in stages:
        trained = "sft" if is_trained else "base"
        row.chat = outcome(row, "chat", "chat", "--model", trained, "--max_new_tokens", "4", "--prompt", "Who?")
        row.path = apart(path_of, trained) if row.chat == "ok" else ""
    if "export" in stages and is_trained:
        adapter = ("sft/adapter", "--base", "base")
        # into packed weights no adapter is merged by this command; the run has done so
        row.export = outcome(row, "export", "export", "--model", *(("sft",) if packed else adapter), "--output_dir",
                             "exported")
        if row.export == "ok":
            row.export = judged(row.architecture, "exported")


def judged(architecture: str, folder: str) -> str:
    wrong = apart(differences, architecture, folder)
    return f"failed: {wrong}" if wrong else "ok"


def outcome(row: Row, stage: str, *words: str) -> str:
    """What the row says of a command."""
    ended = command(*words, seconds=SECONDS)
    if "Traceback (most recent call last)" in ended.err or ended.code not in (0, 2):
        row.frames[stage] = _place(ended)
        last = ended.err.strip().splitlines() or [f"exit code {ended.code}"]
        return f"failed: {last[-1][:300]}"
    if ended.code == 0:
        return "ok"
    line = ended.errors[-1].removeprefix("error: ") if ended.errors else f"exit code 2: {ended.err.strip()[-200:]}"
    is_late = re.search(rf"^{stage} \d+/\d+ ", ended.err, re.MULTILINE)
    return f"failed: refused after the first step: {line}" if is_late else f"refused: {line}"


def _place(ended: Ended) -> str:
    """The last line of the product's own in a traceback."""
    frames = re.findall(r'File "[^"]*?((?:hybrid_rlhf|training|inference)/[^"]+)", line (\d+)', ended.err)
    frames = [(file, line) for file, line in frames if "site-packages" not in file]
    return ":".join(frames[-1]) if frames else ""


def apart(function: Callable[..., str], *arguments: str) -> str:
    """What the function answers in a process forked from this one, or how it failed."""
    answer, fault = run_forked(function, *arguments, limit=SECONDS)
    return fault or answer


def path_of(folder: str) -> str:
    """The decode engine's path for the model in a folder or of a run."""
    from hybrid_rlhf.engine import HybridEngine, SamplingConfig
    from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
    from hybrid_rlhf.models.tokenizer import load_tokenizer
    from hybrid_rlhf.training.builders import model_folder

    folder = model_folder(folder)
    model = load_causal_lm(ModelConfig(folder)).eval()
    engine = HybridEngine.for_inference(model, load_tokenizer(folder))
    with engine.inference():
        engine.generate([[5, 6, 7], [8, 9]], SamplingConfig(2, temperature=0))
    return engine.describe()["path"]


# -- what was saved ----------------------------------------------------------------------------------------------------

_TOWERS = re.compile(r"visual|vision|audio|mtp|projector|embed_vision|embed_audio|layers\.(61|92)\.")
_UNREAD = re.compile(r"mtp|layers\.(61|92)\.")
_PACKED = re.compile(r"\.weight\.(absmax|nested_|quant_)|_scale_inv$|\.activation_scale$|_scales$")
_WRITTEN = re.compile(r".*\.safetensors(\.index\.json)?|(generation_)?config\.json|tokenizer(_config)?\.json|"
                      r"(added_tokens|special_tokens_map)\.json|chat_template\.jinja")
# a run says the first four itself, and pads with another token where a checkpoint pads with one that ends an answer
_SETTINGS_APART = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "_from_model_config",
                   "pad_token_id", "quantization_config", "auto_map"}


def differences(architecture: str, folder: str) -> str:
    """What is wrong with the model in `folder` beside base and sft/adapter, by plain transformers and peft; else ""."""
    import transformers

    transformers.logging.set_verbosity_error()
    found = [*of_files(folder), *of_tensors(folder), *of_tokenizers(folder), *of_settings(folder)]
    try:
        found += of_logits(architecture, folder)
    except Exception as error:
        found.append(f"{architecture} does not load it: {first_lines(error)}")
    return "; ".join(found)


def of_files(folder: str) -> list[str]:
    """Files beside the weights that are not there, or not as they were. The publisher's code may go where config.json
    does not name it any more: transformers has the class."""
    has_code = "auto_map" in (Path(folder) / "config.json").read_text(encoding="utf-8")
    lost = [p.name for p in sorted(Path("base").iterdir()) if not _WRITTEN.fullmatch(p.name)
            and (has_code or p.suffix != ".py")
            and not ((Path(folder) / p.name).exists() and (Path(folder) / p.name).read_bytes() == p.read_bytes())]
    return [f"without {', '.join(lost)}"] if lost else []


def of_tensors(folder: str) -> list[str]:
    """Names that are lost or new; tensors that no adapter was for and that changed."""
    before, after = tensors("base"), tensors(folder)
    is_packed = any(_PACKED.search(name) for name in before) or any(name.endswith("_blocks") for name in before)
    names = {name.removesuffix("_blocks") for name in before if not _PACKED.search(name)}
    if is_packed:  # layers that the class does not read are packed too, and are left out, with a line
        names -= {name for name in names if _UNREAD.search(name)}
    adapted = {name.split(".")[-3] for name in tensors("sft/adapter")}
    changed = [name for name in before.keys() & after.keys() if not same(before[name], after[name])]
    stray = sorted(name for name in changed if _TOWERS.search(name) or not (
        is_packed or any(f".{part}" in name for part in adapted)))
    return [f"{what} {shortened(which)}" for what, which in (
        ("loses", sorted(names - after.keys())), ("adds", sorted(after.keys() - names - before.keys())),
        ("changes", stray)) if which]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """transformers keeps some weights (routers) in fp32 whatever the file has: the same numbers in a wider dtype."""
    is_as_wide = other.dtype == one.dtype or (other.dtype == torch.float32 and one.is_floating_point())
    return is_as_wide and torch.equal(one.to(other.dtype), other)


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def tensors(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: weight for file in sorted(Path(folder).glob("*.safetensors")) for name,
            weight in load_file(file).items()}


def of_tokenizers(folder: str) -> list[str]:
    from transformers import AutoTokenizer

    old, new = (AutoTokenizer.from_pretrained(f) for f in ("base", folder))
    text = "".join(old.all_special_tokens) + " What is  red?\n<think>\n"
    both = {"class": (type(old).__name__, type(new).__name__),
            "vocabulary": (old.get_vocab(), {t: i for t, i in new.get_vocab().items() if t in old.get_vocab()}),
            "eos": (old.eos_token, new.eos_token), "bos": (old.bos_token, new.bos_token),
            "ids": (old(text).input_ids, new(text).input_ids)}
    if old.chat_template:  # else a run gives it one
        both["chat template"] = old.chat_template, new.chat_template
    return [f"another {what} of the tokenizer" for what, (one, other) in both.items() if one != other]


def of_settings(folder: str) -> list[str]:
    """Settings of config.json, as transformers reads them, and of generation_config.json, as they stand, that were lost
    or changed."""
    from transformers import AutoConfig

    old, new = (flat(AutoConfig.from_pretrained(f).to_dict()) for f in ("base", folder))
    wrong = [f"config.json: {key} {value} -> {new.get(key)}" for key, value in old.items()
             if not _SETTINGS_APART & set(key.split(".")) and not is_kept(key, value, new.get(key))
             and not (key.endswith("eos_token_id") and isinstance(value, int))]  # the one that a run's answers end with
    old, new = (json.loads((Path(f) / "generation_config.json").read_text()) for f in ("base", folder))
    wrong += [f"generation_config.json: {key} {value} -> {new.get(key)}" for key, value in old.items()
              if key not in _SETTINGS_APART and not is_kept(key, value, new.get(key))]
    return wrong


def is_kept(key: str, value: object, now: object) -> bool:
    """The same, or of the tokens that end an answer all and perhaps the template's beside them."""
    if not key.endswith("eos_token_id"):
        return now == value
    ends, kept = (set(e if isinstance(e, list) else [e]) for e in (value, now))
    return ends <= kept


def flat(settings: dict, before: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in settings.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def reading_text(model):  # noqa: ANN001, ANN201 - of transformers
    """The model, or the causal one in it: Llama 4's own forward fails in transformers 5.24, with images or without."""
    return model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model


@torch.no_grad()
def of_logits(architecture: str, folder: str) -> list[str]:
    """Against the base with the adapter, both by others' code."""
    import peft
    import transformers

    made = getattr(transformers, architecture)
    ids = torch.arange(5, 45)[None]
    base = made.from_pretrained("base", dtype=torch.float32)
    if getattr(base, "is_loaded_in_4bit", False):  # whose products transformers computes in bfloat16
        base = base.dequantize()
    base = base.float().eval()
    untrained = reading_text(base)(input_ids=ids).logits.float()
    with patch("peft.utils.transformers_weight_conversion._convert_peft_config_moe"):  # peft 0.21.2 takes the names of
        adapted = peft.PeftModel.from_pretrained(base, "sft/adapter").eval()  # shared experts for those of old adapters
    model, loading = made.from_pretrained(folder, dtype="auto", output_loading_info=True)
    adapted = adapted.merge_and_unload()
    for weight in adapted.parameters():  # a rounding may choose other experts: the oracle is rounded as the files are
        weight.data = weight.to(model.dtype).float()
    trained, saved = (reading_text(each)(input_ids=ids).logits.float() for each in (adapted, model.float().eval()))
    learnt = float((trained - untrained).abs().max())
    off = float((saved[..., : untrained.shape[-1]] - trained).abs().max())
    wrong = [f"{kind}: {shortened(sorted(map(str, keys)))}" for kind, keys in loading.items() if keys]
    if not learnt > 0:
        wrong.append("peft's base with the adapter is the base")
    if not off < 0.05 * learnt:
        wrong.append(f"logits off by {off:.2g} where training changed them by {learnt:.2g}")
    return wrong


# -- all of them -------------------------------------------------------------------------------------------------------


def counts(rows: list[Row]) -> dict[str, int]:
    refused = sum(row.is_refused for row in rows)
    right = sum(row.is_right for row in rows)
    return {"folders": len(rows), "end in a model": right - refused, "refused in one line": refused,
            "failed": len(rows) - right}


def tables_of(rows: list[Row]) -> list[str]:
    columns = "folder", "shaped after", "class", "engine", *STAGES
    return [table_of(("of all folders", ""), (versions() | counts(rows)).items()),
            table_of(columns, [(row.case, row.source, row.architecture, row.path, *(getattr(row, s) for s in STAGES))
                               for row in rows])]


def rows_of(names: Sequence[str], stages: Sequence[str]) -> Iterator[Row]:
    for name in names:
        row = row_of(name, stages)
        print(f"{name:18} {row.seconds:5.1f} s  {row.path or '-'}  " + "  ".join(
            f"{stage}: {getattr(row, stage)} {row.frames.get(stage, '')}" for stage in STAGES), file=sys.stderr,
            flush=True)
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="sft and grpo, and these (all)")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    options = parse(parser, argv)
    torch.set_num_threads(1)  # a fork inherits no thread pool
    import_everything()
    names = options.cases[:1] if options.quick else options.cases
    before, file = os.getcwd(), options.json and str(Path(options.json).resolve())
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as scratch:
        os.chdir(scratch)
        try:
            found = [Row(**row) for row in write_rows(map(asdict, rows_of(names, options.stages)), file)]
        finally:
            os.chdir(before)
    print(*(f"{what} {count}" for what, count in counts(found).items()), sep=", ")
    if options.page:
        write_tables(options.page, *tables_of(found))
    return int(any(not row.is_right for row in found))


if __name__ == "__main__":
    sys.exit(main())
