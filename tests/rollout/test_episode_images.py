"""Episodes whose first message has images: the tokens of each turn are the model's own behind all that came before."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.turns import IMAGE
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.contract import Environments, environment_of
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.models.images import load_reader
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.roles import Actor
from hybrid_rlhf.roles.policy_module import PolicyModule
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from tests.factories.tiny import chatml_tokenizer, tiny_causal_lm
from tests.factories.vision import folder, image_files, image_text_model

FILES = image_files()


class Talk:
    """Three turns; the user says what could be taken for an image."""

    def reset(self, prompt, images, **_row) -> str:
        self.given, self.num = (prompt, images), 0
        return " Go!"

    def step(self, messages):
        self.num += 1
        self.seen = messages[0]
        return f"more <|image_pad|> {self.num}", self.num == 3, 0.0


def actor_of(model, tokenizer, **settings) -> Actor:
    """Six of seven tokens end a turn, so that those of a random model end."""
    stops = [token for token in range(model.config.get_text_config().vocab_size) if token % 7]
    engine = HybridEngine(PolicyModule(model), model, pad_id=0, eos_ids=stops, **settings)
    own = Environments([environment_of("Talk", Talk, {}, "here")], False)
    player = EpisodePlayer(own, EnvironmentConfig(factory="f.py:Talk", max_new_tokens_per_turn=12), tokenizer)
    return Actor(engine, tokenizer, 4096, episodes=player)


def prompts_of(tokenizer, rows) -> Prompts:
    """rows: (text, images) of each prompt."""
    asked = [[{"role": "user", "content": IMAGE * len(images) + text} | ({"images": list(images)} if images else {})]
             for text, images in rows]
    ids = [chat.encode_prompt(tokenizer, messages) for messages in asked]
    images = [tuple(images) for _, images in rows]
    return Prompts(ids, ["?"] * len(rows), {"prompt": asked, "images": images}, images)


@pytest.mark.parametrize(("kind", "temperature"), [("qwen3_vl", 0.0), ("qwen3_vl", 1.0), ("gemma3", 1.0)])
def test_turns_behind_images_are_the_model_s_own(kind, temperature):
    path = folder(kind)
    model, tokenizer = image_text_model(kind), load_tokenizer(path)
    actor = actor_of(model, tokenizer, max_batch=2)
    sampling = SamplingConfig(max_new_tokens=150, temperature=temperature)
    rows = [("what", FILES[:1]), ("this and", FILES[1:]), ("text alone", ()), ("what", FILES[1:2])]
    with actor.inference():
        rollout = actor.generate(prompts_of(tokenizer, rows), sampling, seed=1)
    processor, never = load_reader(path)._processor, load_reader(path).never
    for i, (text, images) in enumerate(rows):
        parts = [*[{"type": "image"}] * len(images), {"type": "text", "text": f"{text} Go!"}]
        shown = processor.tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False,
                                                        add_generation_prompt=True)
        inputs = processor(text=[shown], images=[Image.open(image.path).convert("RGB") for image in images] or None,
                           return_tensors="pt", add_special_tokens=False)
        ids = rollout.prompts.ids[i]
        assert inputs["input_ids"][0].tolist() == ids
        said = rollout.response_ids[i][rollout.response_mask[i]]
        assert len(rollout.episodes[i].turn_ends) == 3
        inputs["input_ids"] = torch.cat([inputs["input_ids"], said[None]], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], torch.zeros_like(said[None])], 1)
        with torch.no_grad():
            logits = model(**inputs).logits[0, len(ids) - 1 : -1].float()
        sampled = rollout.action_mask[i][rollout.response_mask[i]]
        assert not images or not set(said[sampled].tolist()) & set(never)
        if temperature == 0:
            logits[:, sorted(never) if images else []] = -torch.inf
            assert logits[sampled].argmax(-1).tolist() == said[sampled].tolist()
        else:
            ours = rollout.sampled_logprobs[i][rollout.response_mask[i]][sampled]
            expected = logits.log_softmax(-1).gather(1, said[:, None])[:, 0][sampled]
            assert_close(ours, expected, atol=2e-4, rtol=2e-4)
    environment = rollout.episodes[1].environment
    given, images = environment.given
    assert [part["type"] for part in given[0]["content"]] == ["image", "image", "text"]
    assert [image.size for image in images] == [(image.width, image.height) for image in FILES[1:]]
    assert environment.seen["content"][-1] == {"type": "text", "text": "this and Go!"}


def test_the_training_forward_gives_the_log_probabilities_that_were_sampled():
    tokenizer = load_tokenizer(folder("qwen3_vl"))
    actor = actor_of(image_text_model("qwen3_vl"), tokenizer)
    with actor.inference():
        prompts = prompts_of(tokenizer, [("what", FILES[:1]), ("so", FILES[:2])])
        rollout = actor.generate(prompts, SamplingConfig(max_new_tokens=150), 0)
    mask = rollout.action_mask
    never = sorted(load_reader(folder("qwen3_vl")).never)
    assert not set(rollout.response_ids[mask].tolist()) & set(never)
    assert_close(actor.logprobs(rollout)[mask], rollout.sampled_logprobs[mask], atol=2e-4, rtol=2e-4)


def test_a_model_that_reads_no_images_is_one_line():
    tokenizer = chatml_tokenizer()
    actor = actor_of(tiny_causal_lm(), tokenizer)
    row = {"prompt": [[{"role": "user", "content": "hi"}]], "images": [FILES[:1]]}
    with actor.inference(), pytest.raises(UserError, match="reads no images"):
        actor.generate(Prompts([[1, 5]], ["hi"], row, [FILES[:1]]), SamplingConfig(max_new_tokens=8), 0)
