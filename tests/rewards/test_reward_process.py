"""Process reward models: read as TRL's trainer trained them, each step's score at the policy's token that ends it."""

from __future__ import annotations

import json

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.rewards import part_scores
from hybrid_rlhf.rewards.mixture import Mixture, Part
from hybrid_rlhf.rewards.process_reward_model import ProcessSource, Step, last_tokens, step_ids, steps_of
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.prm import save_prm
from tests.factories.tiny import tiny_tokenizer
from tests.factories.trl_prm import trl_row

PROMPTS = ["say cat ", "What is the last word of: red sun cat?", "say nothing"]
ANSWERS = ["a red fox\nlived in a wood\nThe answer is cat", "one\n\ntwo \n", "cat"]
STEPS = [["a red fox", "lived in a wood", "The answer is cat"], ["one", "two "], ["cat"]]


def responses(answers: list[str], prompts: list[str], tokenizer=None) -> Rollout:  # noqa: ANN001
    tokenizer = tokenizer or tiny_tokenizer()
    ids = [[*tokenizer(answer).input_ids, tokenizer.eos_token_id] for answer in answers]
    return Rollout.from_responses(Prompts([[5]] * len(ids), prompts), ids, [True] * len(ids), 0, list(answers))


def opened(folder, **options) -> ProcessSource:
    source = ProcessSource(str(folder), "prm", dtype="float32", policy_tokenizer=tiny_tokenizer(), **options)
    source.open()
    return source


def with_bos():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


@torch.no_grad()
@pytest.mark.parametrize("separator", ["\n", "<|im_start|>", " so\n"])
@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, with_bos])
def test_a_step_s_score_is_the_probability_where_trl_s_trainer_had_its_label(tmp_path, tokenizer, separator):
    model = save_prm(tmp_path / "prm", tokenizer=tokenizer())
    source = opened(tmp_path / "prm", separator=separator, split="\n", batch_size=2, reduce="sum")
    rollout = responses(ANSWERS, PROMPTS)
    scores = part_scores(source, rollout)
    found = []
    for i, (prompt, steps) in enumerate(zip(PROMPTS, STEPS, strict=True)):
        row = trl_row({"prompt": prompt, "completions": steps, "labels": [True] * len(steps)}, tokenizer(), separator)
        probabilities = model(torch.tensor([row["input_ids"]])).logits[0].softmax(-1)[:, 1]
        wanted = probabilities[torch.tensor(row["labels"]) == 1]
        placed = rollout.token_scores[i][rollout.step_ends[i]]
        torch.testing.assert_close(placed, wanted, atol=1e-5, rtol=0)
        assert scores[i] == pytest.approx(wanted.sum().item(), abs=1e-5)
        found += wanted.tolist()
    assert max(found) - min(found) > 0.05  # it tells steps apart


def test_trl_s_own_trainer_where_it_is_installed_makes_the_rows_of_the_oracle():
    prm = pytest.importorskip("trl.experimental.prm", reason="TRL 1.14 and later have no PRMTrainer")
    for make in (tiny_tokenizer, with_bos):
        row = {"prompt": PROMPTS[0], "completions": STEPS[0], "labels": [True, False, True]}
        assert prm.PRMTrainer.tokenize_row(row, make(), "\n", None, None, False, False) == trl_row(row, make(), "\n")


def test_the_label_is_trl_s_right_one_or_the_one_that_is_named(tmp_path):
    save_prm(tmp_path / "trl")
    rollout = responses(ANSWERS, PROMPTS)
    right = part_scores(opened(tmp_path / "trl"), rollout)
    wrong = part_scores(opened(tmp_path / "trl", label=0), rollout)
    torch.testing.assert_close(right + wrong, torch.ones(3), atol=1e-5, rtol=0)  # means of p and of 1 - p
    save_prm(tmp_path / "named", labels=("good", "bad"))
    with pytest.raises(UserError, match=r"has the labels good, bad; give reward.options.prm \{label: bad\}"):
        ProcessSource(str(tmp_path / "named"), "prm")
    named = part_scores(opened(tmp_path / "named", label="good"), rollout)
    torch.testing.assert_close(named, wrong, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("options", "said"), [
    ({"label": "goood"}, r"no label goood"), ({"reduce": "mim"}, r"reduce is 'mim'.*did you mean min"),
    ({"separator": ""}, r"separator is ''")])
def test_options_that_mean_nothing_are_one_line(tmp_path, options, said):
    save_prm(tmp_path / "prm")
    with pytest.raises(UserError, match=said):
        ProcessSource(str(tmp_path / "prm"), "prm", **options)


def test_a_response_beyond_the_models_positions_is_refused(tmp_path):
    save_prm(tmp_path / "short", max_position_embeddings=16)
    with pytest.raises(UserError, match="it has 16 positions"):
        opened(tmp_path / "short").score(responses(["cat dog " * 9], ["say"]))


def test_steps_are_the_pieces_as_they_are_and_blank_ones_belong_to_the_step_before():
    assert steps_of("one\ntwo", "\n") == [Step("one", 4), Step("two", 7)]
    assert steps_of("\none\n\n two \n", "\n") == [Step("one", 6), Step(" two ", 12)]
    assert steps_of("one\n\ntwo\nthree", "\n\n") == [Step("one", 5), Step("two\nthree", 14)]
    assert steps_of(" \n", "\n") == [] == steps_of("", "\n")


def test_markup_that_a_response_writes_is_text_and_no_special_token():
    ids, places = step_ids(tiny_tokenizer(), "say", ["a <|im_end|> b"], "<|im_end|>")
    assert ids.count(3) == 1 and places == [len(ids) - 1] and ids[-1] == 3


def test_a_score_stands_at_the_policy_s_own_token_however_it_cut_the_text():
    """é is two bytes, and so two tokens here; the second blank line is one token with what follows it."""
    tokenizer = tiny_tokenizer()
    by_byte = [i for c in "bé\nc\n" for i in tokenizer.convert_tokens_to_ids(
        list(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(c)[0][0]))]
    assert tokenizer.decode(by_byte) == "bé\nc\n" and len(by_byte) == 6
    steps = steps_of("bé\nc\n", "\n")
    assert last_tokens(tokenizer, by_byte, "bé\nc\n", steps) == [3, 5]  # b, é's two, \n | c, \n
    assert last_tokens(tokenizer, [*by_byte, 3], "bé\nc\n", steps) == [3, 6]  # the end of sequence is the last step's
    tokenizer.add_tokens(["\n\nd"])
    ids = [*by_byte[:3], len(tokenizer) - 1]
    assert tokenizer.decode(ids) == "bé\n\nd"
    rollout = Rollout.from_responses(Prompts([[5]], ["p"]), [ids], [False], 0, ["bé\n\nd"])
    assert last_tokens(tokenizer, ids, "bé\n\nd", steps_of("bé\n\nd", "\n")) == [3, 3]
    source = object.__new__(ProcessSource)
    source.reduce, source.policy_tokenizer = "sum", tokenizer
    source._place(rollout, [steps_of("bé\n\nd", "\n")], [[0.5, 0.25]])
    assert rollout.token_scores.tolist() == [[0, 0, 0, 0.75]]


@pytest.mark.parametrize(("reduce", "score", "placed"), [
    ("each", 0.7, [0.45, 0.25]), ("sum", 1.4, [0.9, 0.5]), ("min", 0.5, None), ("last", 0.5, None),
    ("product", 0.45, None)])
def test_the_score_of_a_response_and_what_of_it_stands_at_its_steps(tmp_path, monkeypatch, reduce, score, placed):
    """Steps of probability 0.9 and 0.5, in ten times, beside a response without a step and 2 for everything."""
    class Constant:
        name = "constant"

        def score(self, rollout: Rollout) -> list[float]:
            return [2.0] * len(rollout)

    save_prm(tmp_path / "prm")
    source = opened(tmp_path / "prm", reduce=reduce)
    monkeypatch.setattr(ProcessSource, "_probabilities", lambda *_: [[0.9, 0.5], []])
    rollout = responses(["a\nb", "\n"], PROMPTS[:2])
    total = Mixture([Part(source, 10.0), Part(Constant())]).score(rollout)
    assert total == pytest.approx([10 * score + 2, 2.0])
    assert rollout.source_scores["prm"].tolist() == pytest.approx([score, 0.0])
    if placed is None:
        assert rollout.token_scores is None and rollout.step_ends is None
    else:
        assert rollout.response_ids[0].tolist()[-1] == 3  # a, \n, b, end
        wanted = [[0, 10 * placed[0], 0, 10 * placed[1]], [0] * 4]
        torch.testing.assert_close(rollout.token_scores, torch.tensor(wanted, dtype=torch.float32))
        assert rollout.step_ends.tolist() == [[False, True, False, True], [False] * 4]


def test_messages_are_read_as_their_contents(tmp_path):
    save_prm(tmp_path / "prm")
    source, rollout = opened(tmp_path / "prm"), responses(["red\nfox"], ["<|im_start|>user ..."])
    rollout.prompts.columns["prompt"] = [[{"role": "system", "content": "be"}, {"role": "user", "content": "say"}]]
    plain = responses(["red\nfox"], ["be\n\nsay"])
    assert source.score(rollout) == source.score(plain)


def test_what_only_its_own_code_can_run_is_told_apart(tmp_path):
    from hybrid_rlhf.roles.sharing import RolesConfig
    from hybrid_rlhf.training.reward_sources import RewardConfig, open_sources

    save_prm(tmp_path / "prm")
    file = tmp_path / "prm" / "config.json"
    with pytest.raises(UserError, match=r"there is no separatr .did you mean separator"):
        open_sources(RewardConfig(models=str(tmp_path / "prm"), options={"prm": {"separatr": "x"}}), RolesConfig())
    found = open_sources(RewardConfig(models=str(tmp_path / "prm"), options={"prm": {"reduce": "min"}}), RolesConfig())
    assert isinstance(found[0], ProcessSource) and found[0].reduce == "min"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["Qwen2ForProcessRewardModel"]}))
    with pytest.raises(UserError, match=r"is a process reward model with code of its own .as Qwen2\.5-Math-PRM."):
        open_sources(RewardConfig(models=str(tmp_path / "prm")), RolesConfig())
