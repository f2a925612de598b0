"""Two processes that read a model in parts, put it under ZeRO 3 and write it: what they hold, and what that takes.

    torchrun --nproc_per_node 2 tests/distributed/rank_loading.py OUT.json FOLDER peak equal

OUT.json: for each of the two, one process's findings after the other's.
equal: models in FOLDER, one in each folder of it, against what transformers reads of the same files by itself.
peak: of one model of 137M weights, made in FOLDER, for docs/results/memory.md.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hybrid_rlhf.core.distributed import barrier, gather_over_ranks, init_process_group, is_main, rank, shutdown
from hybrid_rlhf.core.memory import give_back_freed_blocks
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import for_main, gathered
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.models import saving
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm, load_scalar_model, prepare
from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers
from hybrid_rlhf.models.merging import plain_weights
from hybrid_rlhf.models.weight_parts import part_of
from hybrid_rlhf.roles import PolicyModule
from hybrid_rlhf.training import builders
from tests.factories.tiny import save_tiny, tiny_tokenizer

CUT = ZeroConfig(zero_stage=3)


def held_share(model: nn.Module) -> float:
    """The share of its numbers that this process has memory for."""
    held = sum(p.untyped_storage().nbytes() + (0 if part_of(p) is None else part_of(p).nbytes)
               for p in model.parameters())
    return held / sum(p.numel() * p.element_size() for p in model.parameters())


def largest_gap(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """0 where all are equal bit for bit, names, shapes and dtypes included; infinite where those differ."""
    if found.keys() != wanted.keys() or any((v.dtype, v.shape) != (found[k].dtype, found[k].shape)
                                            for k, v in wanted.items()):
        return float("inf")
    return max(0.0 if torch.equal(found[k], v) else float((found[k] - v).abs().nan_to_num(9e9).max()) or 1e-45
               for k, v in wanted.items())


def gathered_state(model: nn.Module) -> dict[str, Tensor]:
    with gathered(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def written(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def plain(folder: Path, out: Path) -> dict:
    """Read, put under ZeRO 3, written: against transformers' own reading, and against the files."""
    settings = ModelConfig(str(folder), dtype="float32")
    model = load_causal_lm(settings, in_parts=True)
    share, shape_sum = held_share(model), sum(p.numel() for p in model.parameters())
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    builders.without_dropout(model)  # which computes with it
    HybridEngine(PolicyModule(model), model).prepare_frozen(CUT)
    export(model, tiny_tokenizer(), out / folder.name, [3])
    files = {k: v.float() for k, v in written(folder).items()}
    return {"share": share, "numel": shape_sum == sum(p.numel() for p in wanted.parameters()),
            "weights": largest_gap(gathered_state(model), wanted.state_dict()),
            "files": largest_gap({k: v.float() for k, v in written(out / folder.name).items()}, files)}


def prepared(folder: Path, in_parts: bool) -> nn.Module:
    """More words, adapters, and rows of their own for two of the new words."""
    model = load_causal_lm(ModelConfig(str(folder), dtype="float32"), in_parts=in_parts)
    torch.manual_seed(3)
    prepare(model, ModelConfig(str(folder)), 310)
    add_lora(model, LoraConfig(r=4), new_ids=[305, 306])
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    return model


def adapted(folder: Path, out: Path) -> dict:
    """With added words and adapters, trained parameters under ZeRO 3, merged into what is written."""
    model, twin = prepared(folder, True), prepared(folder, False)
    share, wanted = held_share(model), {k: w.make().detach() for k, w in plain_weights(twin).items()}
    engine = HybridEngine(PolicyModule(model), model)
    engine.prepare_training(OptimizerConfig(learning_rate=0.1), lambda _step: 1.0, CUT)
    export(model, tiny_tokenizer(), out / "adapted" / "model", [3])
    tied = {k: v for k, v in wanted.items() if k in written(out / "adapted" / "model") or k != "lm_head.weight"}
    return {"share": share, "weights": largest_gap(gathered_state(model), twin.state_dict()),
            "files": largest_gap(written(out / "adapted" / "model"), tied)}


def scalar(folder: Path, out: Path) -> dict:
    """With a new scalar head."""
    torch.manual_seed(4)
    model = load_scalar_model(ModelConfig(str(folder), dtype="float32"), in_parts=True)
    torch.manual_seed(4)
    twin = load_scalar_model(ModelConfig(str(folder), dtype="float32"))
    share = held_share(model)
    HybridEngine(ScalarModel(model, 0.0, 1.0)).prepare_frozen(CUT)
    export(model, tiny_tokenizer(), out / "scalar", [3])
    return {"share": share, "weights": largest_gap(gathered_state(model), twin.state_dict()),
            "files": largest_gap(written(out / "scalar"), twin.state_dict())}


def failing(folder: Path) -> dict:
    """The main process fails in the midst of its work; whether it says so, and whether all can work again."""
    model = load_causal_lm(ModelConfig(str(folder), dtype="float32"), in_parts=True)
    HybridEngine(PolicyModule(model), model).prepare_frozen(CUT)
    sizes: list[int] = []

    def work(gather) -> None:  # noqa: ANN001
        with gather([model.lm_head.weight]):
            sizes.append(model.lm_head.weight.numel())
            if len(sizes) == 1:
                raise OSError("the disk is full")

    try:
        for_main(model, work)
        has_failed = False
    except OSError:
        has_failed = True
    for_main(model, work)
    return {"has_failed": has_failed, "sizes": sizes, "left": model.lm_head.weight.numel()}


def equal(place: Path) -> dict:
    out, found = place / "out", {}
    for folder in sorted(p for p in place.iterdir() if (p / "config.json").exists()):
        found[folder.name] = plain(folder, out)
    found["adapted"] = adapted(place / "tied", out)
    found["failing"] = failing(place / "dense")
    found["scalar"] = scalar(place / "dense", out)
    return found


# -- what it takes -----------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are not pages of a file, which the system takes back when it needs them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))


class Peak:
    """The most that was resident within the block, over what was before it."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.most = resident()
        self._ends = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._ends.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_exc: object) -> None:
        self._ends.set()
        self._watch.join()
        self.growth = self.most - self.before


def once(folder: Path, out: Path, dtype: str, in_parts: bool) -> dict:
    with Peak() as loading:
        model = load_causal_lm(ModelConfig(str(folder), dtype=dtype), in_parts=in_parts)
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        engine = HybridEngine(PolicyModule(model), model).prepare_frozen(CUT)
    began = time.perf_counter()
    with Peak() as writing:
        export(model, tiny_tokenizer(), out, [3])
    assert engine.model is model
    return {"whole": whole, "loading": loading.growth, "writing": writing.growth,
            "seconds": time.perf_counter() - began}


def peak(place: Path) -> dict:
    """Of a process, in bytes, for files in the dtype of training and in another, read in parts and whole."""
    give_back_freed_blocks()
    if is_main():
        save_tiny(place / "small")
        shape = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=10, num_attention_heads=8,
                     num_key_value_heads=8, vocab_size=4096)
        save_tiny(place / "float32", **shape)
        AutoModelForCausalLM.from_pretrained(place / "float32", dtype=torch.bfloat16).save_pretrained(
            place / "bfloat16", max_shard_size="50MB")
    barrier()
    with patch.object(saving, "MAX_BYTES", 50 * 10**6):  # a file of the model's, whole while it is written
        once(place / "small", place / "out", "float32", True)  # what libraries load and hold
        return {f"{name}, {'in parts' if in_parts else 'whole'}": once(place / name, place / "out", "float32", in_parts)
                for name in ("float32", "bfloat16") for in_parts in (True, False)}


if __name__ == "__main__":
    init_process_group()
    checks = {"equal": equal, "peak": peak}
    results = {name: gather_over_ranks(checks[name](Path(sys.argv[2]) / name)) for name in sys.argv[3:]}
    if rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
    shutdown()
