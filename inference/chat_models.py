"""Load several trained models to chat with; adapters of one base share one load of it.

A LoRA run saves its adapter beside the merged model, and the adapter names its base model; that may be another run's,
with an adapter itself. Base, SFT and PPO are then the base without adapters, with one, and with both.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.engine.decode.admission import stop_ids
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.inference.conversation import Conversation, check_can_chat, load_to_chat, open_conversation
from hybrid_rlhf.inference.named_models import model_folder
from hybrid_rlhf.models.load import max_positions, read_generation
from hybrid_rlhf.models.lora import Adapters, base_of, is_adapter, load_adapter
from hybrid_rlhf.models.merging import adapted_weight
from hybrid_rlhf.models.template import special_ids
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.models.weights import read_tensor

_log = logging.getLogger(__name__)
MAX_DEPTH = 8  # adapters on adapters
ROUNDING = 0.02  # relative to a merged weight's largest number, in 16 bits


@dataclass(frozen=True)
class Chain:
    """A model as a base and the adapters on it, oldest first."""

    root: str
    adapters: tuple[Path, ...] = ()


def chain_of(path: str) -> Chain:
    """The base and adapters of the model at `path` (a run's folder, a model folder or a hub id), by its files."""
    folder = model_folder(path)
    adapters: list[Path] = []
    for _ in range(MAX_DEPTH):
        adapter = folder.parent / "adapter"
        if folder.name != "model" or not is_adapter(adapter):
            break
        try:
            base = base_of(adapter)
        except UserError:
            break
        if not base or not Path(base).is_dir() or Path(base).resolve() == folder.resolve():
            break
        adapters.insert(0, adapter)
        folder = Path(base)
    return Chain(str(folder), tuple(adapters))


def open_chat_models(places: dict[str, str], sampling: SamplingConfig, seed: int = 0,
                     system: str | None = None) -> dict[str, Conversation]:
    """A conversation with each of the models at `places` (name -> path), in their order.

    Raises UserError for models that cannot chat. Models that share a base are loaded once. One without a chat template
    takes that of the first that has one, which is said on stderr.
    """
    places = {name: str(model_folder(path)) for name, path in places.items()}
    for path in places.values():
        check_can_chat(path)
    template = _shared_template(places) if len(places) > 1 else None
    chains = {name: chain_of(path) for name, path in places.items()}
    opened: dict[str, Conversation] = {}
    for root in dict.fromkeys(chain.root for chain in chains.values()):
        members = {name: chain for name, chain in chains.items() if chain.root == root}
        if len(members) > 1 and any(chain.adapters for chain in members.values()):
            shared = _on_one_base(root, members, places, sampling, seed, system, template)
            opened |= shared
            for name in members.keys() - shared.keys():
                _log.warning("%s is not %s with its adapters as they are now: it is loaded by itself", name, root)
    for name, path in places.items():
        if name not in opened:
            opened[name] = open_conversation(path, sampling, seed, system, template=template)
    return {name: opened[name] for name in places}


def _shared_template(places: dict[str, str]) -> str | None:
    """The chat template of the first model that has one; a line on stderr for each that has none."""
    tokenizers = {name: load_tokenizer(path) for name, path in places.items()}
    owner = next((name for name, tokenizer in tokenizers.items() if tokenizer.chat_template), None)
    if owner is None:
        return None
    template = tokenizers[owner].chat_template
    for name, tokenizer in tokenizers.items():
        if not tokenizer.chat_template:
            known = tokenizer.get_vocab()
            lacks = [token for token in special_ids(tokenizers[owner]) if token in template and token not in known]
            plain = f"; {', '.join(lacks)} {'are' if len(lacks) > 1 else 'is'} plain text to {name}" if lacks else ""
            print(f"note: {name} has no chat template: {owner}'s is used{plain}", file=sys.stderr)
    return template


def _on_one_base(root: str, members: dict[str, Chain], places: dict[str, str], sampling: SamplingConfig, seed: int,
                 system: str | None, template: str | None) -> dict[str, Conversation]:
    """Conversations over one load of `root`. A model that differs from base plus adapters is left out."""
    tokenizers = {name: load_tokenizer(places[name]) for name in members}
    model = load_to_chat(root)
    size = model.get_input_embeddings().num_embeddings
    members = {name: chain for name, chain in members.items() if len(tokenizers[name]) <= size}
    folders = list(dict.fromkeys(folder for chain in members.values() for folder in chain.adapters))
    names = {folder: f"adapter{i}" for i, folder in enumerate(folders)}
    for folder in folders:
        try:
            load_adapter(model, folder, names[folder])
        except UserError:  # made for another shape of this base, such as with new tokens
            members = {name: chain for name, chain in members.items() if folder not in chain.adapters}
    adapters, conversations = Adapters(model) if folders else None, {}
    for name, chain in members.items():
        active = [names[folder] for folder in chain.adapters]
        if not _is_merge(model, active, places[name]):
            continue
        tokenizers[name].chat_template = tokenizers[name].chat_template or template  # an untrained base has none
        check(bool(tokenizers[name].chat_template), f"{places[name]} has no chat template; "
                                                    "a model trained here (--stage sft) saves one")
        engine = HybridEngine(model, model, eos_ids=stop_ids(model, tokenizers[name]), name=name,
                              pad_id=tokenizers[name].pad_token_id,
                              **({"adapter": partial(adapters.use, active)} if adapters else {}))
        conversations[name] = Conversation(engine, tokenizers[name], sampling, seed=seed, system=system,
                                           max_positions=max_positions(model))
    return conversations


@torch.no_grad()
def _is_merge(model: torch.nn.Module, active: Sequence[str], folder: str) -> bool:
    """Whether the folder's weights are the base's with these adapters: an SFT model may have been trained again after
    PPO. Compares one layer."""
    if not active:
        return True
    name, ours = adapted_weight(model, active)
    try:
        theirs = read_tensor(folder, name).to(ours)
    except UserError:
        return False
    return theirs.shape == ours.shape and float((ours - theirs).abs().max()) <= ROUNDING * float(ours.abs().max())


# -- the sampling settings published with a model -------------------------------------------------------------------

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def published_sampling(path: str, but: Collection[str] = ()) -> dict[str, float]:
    """The values of NAMES, except `but`, in the generation_config of the model at `path`; values that SamplingConfig
    refuses are left out."""
    settings = read_generation(path)
    values = {} if settings is None else settings.to_diff_dict()
    taken = {name: _as_taken(name, values.get(name)) for name in NAMES if name not in but}
    return {name: value for name, value in taken.items() if value is not None}


def _as_taken(name: str, value: object) -> float | None:
    default = SamplingConfig()
    if type(value) not in (int, float):
        return None
    try:
        return getattr(replace(default, **{name: type(getattr(default, name))(value)}), name)
    except UserError:
        return None


def announced(name: str, values: dict[str, float], unless: str) -> str:
    """A line that announces the published settings `values`."""
    return (f"{name} samples by its generation_config.json unless {unless}: "
            f"{', '.join(f'{setting} {value:g}' for setting, value in values.items())}")
