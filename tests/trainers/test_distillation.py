"""On-policy distillation: a step by hand in plain torch, and that the student comes near its teacher in every way."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.data.collate import collate_sft
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rewards.functions import FunctionSource
from hybrid_rlhf.rewards.mixture import Mixture, Part
from hybrid_rlhf.roles import Actor, Roles, Teacher
from hybrid_rlhf.roles.spans import OwnTokens
from hybrid_rlhf.roles.teacher import TeacherPrompt
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.run.loop import last_rollout
from hybrid_rlhf.trainers.distillation import DistillConfig, DistillTrainer
from hybrid_rlhf.trainers.ppo import PPOTrainer
from hybrid_rlhf.trainers.ppo_config import DistillTerm
from tests.factories.tiny import chatml_tokenizer, other_tokenizer, tiny_tokenizer
from tests.factories.trainers import (
    CLOCKED,
    GROUPED,
    PROMPTS,
    SFT_ROWS,
    Source,
    count_of,
    policy,
    settings,
    trained,
    weights,
)
from tests.factories.warpers import warped_by_model

TEN = SamplingConfig(max_new_tokens=10)
WIDE = {"initializer_range": 0.3}  # of the teacher's weights: its distributions are far from flat
WAYS = ["reverse_kl", "forward_kl", "jsd", "policy_gradient"]


def distiller(rate=1e-2, max_tokens=8192, teacher=None, vocab_size=300, **changes):
    config = DistillConfig(**({"sampling": TEN} | changes))
    roles = Roles(Actor(trained(policy(vocab_size=vocab_size), rate), tiny_tokenizer(), max_tokens),
                  teacher=Teacher(teacher or policy(7, **WIDE), max_tokens))
    rows = None if config.lmbda == 1 else Loader(SFT_ROWS * 4, 6, lambda found: collate_sft(found, 0), seed=0)
    return DistillTrainer(roles, Mixture([]), config, seed=0, demonstrations=rows)


def plain_logits(model, rollout, row):
    """Logits (n, V) that predict the tokens of a response, by the model's own forward on this row alone."""
    prompt, answer = rollout.prompts.ids[row], rollout.response_ids[row][rollout.action_mask[row]]
    return model(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1: -1].double(), answer


def plain_divergence(way, student, teacher, answer, beta=0.3, temperature=1.0):
    """(n,) nats of logits (n, V) each, from the definitions; policy_gradient: at the sampled tokens."""
    s, t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    if way == "policy_gradient":
        return (s - t).gather(1, answer[:, None])[:, 0]
    if way == "forward_kl":
        return (t.exp() * (t - s)).sum(-1)
    if way == "reverse_kl":
        return (s.exp() * (s - t)).sum(-1)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)


def test_no_source_is_paid_for_so_none_is_compared_with_what_is():
    def lengths(completions, **_):
        return [len(text) for text in completions]

    trainer = distiller()
    trainer.source = trainer.sampler.source = Mixture([Part(FunctionSource("lengths", lengths)),
                                                       Part(FunctionSource("again", lengths), 0.0)])
    for found in (trainer.step(PROMPTS).compute(), trainer.evaluate([PROMPTS]).compute()):
        assert "rewards/again/mean" in found and not [name for name in found if name.endswith("/correlation")]


def assert_trained_on(metrics, twin, losses, found, rel=1e-4):
    """The step's gradient is that of the mean loss of all tokens, its divergence the mean of what was found."""
    torch.cat(losses).mean().backward()
    norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=rel)
    assert metrics["distill/divergence"] == pytest.approx(torch.cat(found).mean().item(), rel=rel)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_on_samples_is_the_mean_over_their_tokens_by_hand(way):
    more = {} if way == "policy_gradient" else {"temperature": 1.5}
    trainer = distiller(divergence=way, beta=0.3, max_tokens=40, **more)
    twin, teacher = (copy.deepcopy(role.engine.model) for role in (trainer.roles.actor, trainer.roles.teacher))
    metrics = trainer.step(PROMPTS).compute()
    rollout, losses, found = trainer.sampler.last_rollout, [], []
    for row in range(len(rollout)):
        student, answer = plain_logits(twin, rollout, row)
        with torch.no_grad():
            taught, _ = plain_logits(teacher, rollout, row)
        found.append(plain_divergence(way, student, taught, answer, **more))
        own = student.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        # the reverse KL's gradient from samples: what they cost, held fixed, times that of their log-probability
        losses.append(found[-1].detach() * own if way == "policy_gradient" else found[-1])
    assert_trained_on(metrics, twin, losses, found)
    if way == "policy_gradient":  # at a ratio of 1 the loss is what the tokens cost: its sign is that of the gradient
        assert metrics["policy/loss"] == pytest.approx(metrics["distill/divergence"], rel=1e-3)


def test_tokens_cost_what_their_spans_do_and_the_mean_is_over_those_compared_by_hand(monkeypatch):
    """The ratios are given here (tests/roles/test_spans.py has real ones); none of the second samples is compared."""
    own, num_asked = other_tokenizer(), 0
    trainer = distiller(divergence="policy_gradient", teacher=policy(7, vocab_size=len(own), **WIDE))
    trainer.teacher.prompt, trainer.teacher.own_tokens = TeacherPrompt(None, own), OwnTokens(own, tiny_tokenizer())
    twin = copy.deepcopy(trainer.roles.actor.engine.model)

    def ratios(rollout):
        nonlocal num_asked
        num_asked += 1
        mask = rollout.action_mask
        if num_asked == 2:
            return torch.zeros(mask.shape), torch.zeros(mask.shape), int(mask.sum())
        at_each = torch.linspace(-2, 1, mask.numel()).view(mask.shape).masked_fill(~mask, 0)
        return at_each, torch.zeros(mask.shape).index_fill_(1, torch.tensor([0]), -0.5), 3

    monkeypatch.setattr(trainer.teacher, "log_ratios", ratios)
    metrics, rollout, losses = trainer.step(PROMPTS).compute(), trainer.sampler.last_rollout, []
    at_each = torch.linspace(-2, 1, rollout.action_mask.numel()).view(rollout.action_mask.shape)
    for row in range(len(rollout)):
        student, answer = plain_logits(twin, rollout, row)
        logprobs = student.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        losses.append(-at_each[row][rollout.action_mask[row]] * logprobs)
    count = int(rollout.action_mask.sum())
    assert_trained_on(metrics, twin, losses, [torch.full((len(rollout),), 0.5) * len(rollout) / (count - 3)])
    assert metrics["distill/uncompared"] == pytest.approx(3 / count)
    num_asked = 0
    found = trainer.evaluate([PROMPTS, PROMPTS]).compute()
    assert found["distill/teacher_kl"] == pytest.approx(found["distill/divergence"]) and found["distill/divergence"] > 0


def test_a_policy_gradient_of_truncated_samples_is_that_of_the_policy_that_drew_them_by_hand():
    """Both among the words that top_p left the student. By transformers' warpers over plain logits."""
    cut = SamplingConfig(max_new_tokens=10, top_p=0.8, temperature=0.9)
    trainer = distiller(divergence="policy_gradient", sampling=cut)
    twin, teacher = (copy.deepcopy(role.engine.model) for role in (trainer.roles.actor, trainer.roles.teacher))
    metrics = trainer.step(PROMPTS).compute()
    rollout, losses, found = trainer.sampler.last_rollout, [], []
    for row in range(len(rollout)):
        logits, answer = plain_logits(twin, rollout, row)
        taught, _ = plain_logits(teacher, rollout, row)
        is_cut = warped_by_model(twin, rollout.prompts.ids[row], answer.tolist(), top_p=0.8, temperature=0.9).isinf()
        s, t = ((x / 0.9).masked_fill(is_cut, -torch.inf).log_softmax(-1).gather(1, answer[:, None])[:, 0]
                for x in (logits, taught))
        found.append((s - t).detach())
        losses.append(found[-1] * s)
    assert_trained_on(metrics, twin, losses, found, rel=1e-3)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("trainer", [lambda: distiller(), lambda: beside_rewards()])
def test_what_the_teacher_said_is_not_held_until_the_next_step(trainer):
    """Hidden states of all tokens are gigabytes of the CPU's memory."""
    trainer = trainer()
    trainer.step(PROMPTS)
    last = trainer.last_rollout if isinstance(trainer, PPOTrainer) else trainer.sampler.last_rollout
    assert last.teacher is None


def test_the_samples_distance_is_at_the_sampled_tokens_and_no_reward_is_reported():
    trainer = distiller()
    twin, teacher = copy.deepcopy(trainer.roles.actor.engine.model), trainer.roles.teacher.engine.model
    metrics = trainer.step(PROMPTS).compute()
    rollout = trainer.sampler.last_rollout
    with torch.no_grad():
        found = torch.cat([plain_divergence("policy_gradient", *(plain_logits(m, rollout, row)[0] for m in (
            twin, teacher)), plain_logits(twin, rollout, row)[1]) for row in range(len(rollout))])
    assert metrics["distill/teacher_kl"] == pytest.approx(float(found.mean()), rel=1e-4)
    assert not any(name.startswith(("reward", "objective/")) for name in metrics)
    assert {"entropy", "completions/mean_length", "time/teacher"} <= metrics.keys()
    assert trainer.samples()[0]["score"] is None


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}])
def test_the_samples_distance_is_at_the_temperature_that_they_were_drawn_by(changes):
    """Whatever that of the divergence: a student that is its teacher is at distance 0 from it."""
    trainer = distiller(teacher=policy(**WIDE), sampling=SamplingConfig(max_new_tokens=10, temperature=0.5),
                        temperature=2.0, **changes)
    own, taught = (role.engine.model for role in (trainer.roles.actor, trainer.roles.teacher))
    own.load_state_dict(taught.state_dict())
    for found in (trainer.evaluate([PROMPTS]), trainer.step(PROMPTS)):
        assert found.compute()["distill/teacher_kl"] == pytest.approx(0, abs=1e-4)


def far(trainer) -> float:
    return trainer.evaluate([PROMPTS]).compute()["distill/divergence"]


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"divergence": "policy_gradient"}])
def test_a_process_left_without_rows_changes_no_evaluation(changes):
    trainer = distiller(**changes)
    one, both = (trainer.evaluate(given).compute() for given in ([PROMPTS], [PROMPTS, PROMPTS.rows([])]))
    assert one == both and one["distill/divergence"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["jsd", "policy_gradient"])
def test_the_student_comes_near_its_teacher_by_each_divergence(way):
    """On fresh samples to the same prompts, texts of 20 words that it has not seen, but of a kind that it has."""
    sampling = SamplingConfig(max_new_tokens=4, num_samples=16 if way == "policy_gradient" else 4)
    trainer = distiller(teacher=policy(7, vocab_size=20, initializer_range=0.15), vocab_size=20, divergence=way,
                        sampling=sampling)
    before = far(trainer)
    for _ in range(200):
        trainer.step(PROMPTS)
    assert far(trainer) < 0.15 * before


@pytest.mark.parametrize("lmbda", [0.0, 0.5, 0.25])
def test_lmbda_is_the_share_of_steps_on_samples_and_the_others_are_on_demonstrations(lmbda):
    trainer, found = distiller(lmbda=lmbda, num_minibatches=2), []
    for _ in range(8):
        metrics = trainer.step(PROMPTS).compute()
        found.append("distill/data_divergence" in metrics)
        assert found[-1] != ("distill/teacher_kl" in metrics) and "grad_norm" in metrics
        assert any(name in metrics for name in trainer.progress_keys)  # the terminal's line is never an empty one
        assert (last_rollout(trainer) is None) == (trainer.samples() == []) == found[-1]  # not that of a step before
    assert found.count(False) == 8 * lmbda
    assert trainer.roles.actor.engine.training.num_steps == 16  # two minibatches each


@pytest.mark.slow
def test_the_student_comes_near_its_teacher_on_demonstrations():
    trainer = distiller(lmbda=0.5, divergence="forward_kl", rate=5e-3)
    found = [trainer.step(PROMPTS).compute() for _ in range(80)]
    found = [m["distill/data_divergence"] for m in found if "distill/data_divergence" in m]
    assert found[-1] < 0.1 * found[0]


def test_a_step_on_demonstrations_is_the_mean_over_their_tokens_by_hand():
    trainer = distiller(lmbda=0.0)
    twin, teacher = (copy.deepcopy(role.engine.model) for role in (trainer.roles.actor, trainer.roles.teacher))
    batch = copy.deepcopy(trainer.demonstrations).next()
    metrics, losses = trainer.step(PROMPTS).compute(), []
    with torch.no_grad():
        for ids, mask, marks in zip(batch.input_ids, batch.attention_mask, batch.loss_mask, strict=True):
            whole = ids[mask][None]
            s, t = (m(whole).logits[0, :-1].double() for m in (twin, teacher))
            losses.append(plain_divergence("reverse_kl", s, t, None)[marks[mask][1:]])
    assert metrics["distill/data_divergence"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"lmbda": 0.5, "num_minibatches": 2, "num_epochs": 2},
                                     {"divergence": "policy_gradient"}, {"top_k": 20}])
def test_a_trainer_that_goes_on_from_a_state_does_what_the_first_one_does(changes):
    straight, other = distiller(**changes), distiller(**changes)
    for _ in range(3):
        straight.step(PROMPTS)
    state = copy.deepcopy(straight.state())
    for _ in range(2):  # elsewhere by then
        other.step(PROMPTS)
    other.load_state(state)
    for _ in range(3):
        one, two = (t.step(PROMPTS).compute() for t in (straight, other))
        assert all(two[n] == v for n, v in one.items() if not n.startswith(CLOCKED))
    assert all(torch.equal(a, b) for a, b in zip(*(weights(t.roles.actor.engine) for t in (straight, other)),
                                                 strict=True))


def test_the_likeliest_words_are_a_lower_bound_and_what_they_leave_out_is_reported():
    whole, few = distiller().step(PROMPTS).compute(), distiller(top_k=10).step(PROMPTS).compute()
    assert 0 < few["distill/divergence"] < whole["distill/divergence"]
    assert 0 < few["distill/teacher_mass_outside"] < 1 and "distill/teacher_mass_outside" not in whole
    assert few["distill/teacher_kl"] == pytest.approx(whole["distill/teacher_kl"], rel=1e-5)


def test_a_teacher_of_more_words_is_compared_on_those_of_both():
    """Padded vocabularies of one tokenizer."""
    assert 0 < distiller(teacher=policy(7, vocab_size=320, **WIDE)).step(PROMPTS).compute()["distill/divergence"] < 20


@pytest.mark.parametrize(("changes", "message"), [
    ({"lmbda": 1.5}, "distill.lmbda is 1.5"), ({"divergence": "kl"}, "choose reverse_kl, forward_kl, jsd"),
    ({"beta": 1.0}, "distill.beta is 1.0"), ({"temperature": 0.0}, "distill.temperature is 0.0"),
    ({"top_k": -1}, "distill.top_k is -1"), ({"num_epochs": 0}, "distill.num_epochs is 0"),
    ({"divergence": "policy_gradient", "lmbda": 0.5}, "learns from the student's own samples alone"),
    ({"divergence": "policy_gradient", "sampling": SamplingConfig(temperature=0.0)},
     "a policy gradient needs samples")])
def test_settings_that_cannot_be_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        DistillConfig(**changes)


def beside_rewards(coef=0.5, source=None, **changes):
    roles = Roles(Actor(trained(policy(), 1e-2), tiny_tokenizer()), teacher=Teacher(policy(7, **WIDE)))
    return PPOTrainer(roles, source or count_of(9), settings(estimator="grpo", sampling=GROUPED, kl_coef=0.0),
                      seed=0, distill=DistillTerm(coef, **changes))


def test_distill_coef_adds_the_mean_divergence_to_grpo_s_loss_by_hand():
    """Where all responses score alike the policy loss is 0, and the step is the divergence's times its factor."""
    trainer = beside_rewards(0.5, Source(lambda rollout: torch.zeros(len(rollout))))
    twin, teacher = (copy.deepcopy(role.engine.model) for role in (trainer.roles.actor, trainer.roles.teacher))
    metrics, losses = trainer.step(PROMPTS).compute(), []
    for row in range(len(trainer.last_rollout)):
        student, answer = plain_logits(twin, trainer.last_rollout, row)
        with torch.no_grad():
            taught, _ = plain_logits(teacher, trainer.last_rollout, row)
        losses.append(plain_divergence("reverse_kl", student, taught, answer))
    mean = torch.cat(losses).mean()
    (0.5 * mean).backward()
    norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
    assert metrics["distill/divergence"] == pytest.approx(mean.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_without_distill_coef_no_teacher_is_asked():
    trainer = beside_rewards(0.0)
    trainer.roles.teacher.targets = None  # not callable
    assert not any(name.startswith("distill/") for name in trainer.step(PROMPTS).compute())


TOLD = ("{{ prompt }} it is {{ word }}, not {{ response }}: {{ score }} {{ feedback }}"
        "{% if best %} but {{ best }}{% endif %}")


def told(trainer, **changes) -> DistillTrainer:
    """The trainer with a teacher that reads TOLD in the place of a prompt of plain text."""
    trainer.teacher.prompt = TeacherPrompt(changes.pop("template", TOLD), tiny_tokenizer())
    trainer.source = trainer.sampler.source = Mixture([Part(FunctionSource(
        "lengths", lambda completions, **_: [len(text) for text in completions]))])
    return trainer


def asked() -> Prompts:
    """Two prompts of text, with a column that the student does not read."""
    tokenizer, texts = tiny_tokenizer(), ["say cat", "the moon is"]
    return Prompts([tokenizer(text).input_ids for text in texts], texts, {"prompt": texts, "word": ["red fox", "a"]})


@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_with_a_prompt_of_its_own_is_compared_on_the_responses_tokens_by_hand(way):
    """The teacher's logits are the model's own behind its prompt, which is longer, and another for each response."""
    trainer = told(distiller(divergence=way, beta=0.3, max_tokens=60,
                             sampling=SamplingConfig(max_new_tokens=6, num_samples=2)))
    twin, teacher = (copy.deepcopy(role.engine.model) for role in (trainer.roles.actor, trainer.teacher))
    metrics = trainer.step(asked()).compute()
    rollout, losses, found = trainer.sampler.last_rollout, [], []
    scores = [float(len(text)) for text in rollout.completions]
    for row, (prompt, word) in enumerate([("say cat", "red fox")] * 2 + [("the moon is", "a")] * 2):
        other = rollout.completions[row ^ 1]
        text = f"{prompt} it is {word}, not {rollout.completions[row]}: {scores[row]} "
        text += f" but {other}" * bool(other)
        behind = SimpleNamespace(prompts=Prompts([tiny_tokenizer()(text).input_ids], [text]), **{
            name: getattr(rollout, name)[row: row + 1] for name in ("response_ids", "action_mask")})
        student, answer = plain_logits(twin, rollout, row)
        with torch.no_grad():
            taught, _ = plain_logits(teacher, behind, 0)
        found.append(plain_divergence(way, student, taught, answer))
        own = student.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        losses.append(found[-1].detach() * own if way == "policy_gradient" else found[-1])
    assert_trained_on(metrics, twin, losses, found)


def test_the_place_of_the_last_user_message_is_the_template_s():
    tokenizer = chatml_tokenizer()
    turns = [{"role": "user", "content": "say cat"}, {"role": "assistant", "content": "cat"},
             {"role": "user", "content": "again"}]
    prompts = Prompts([[5]], ["x"], {"prompt": [turns], "word": ["red"]})
    rollout = Rollout.from_responses(prompts, [[6, 7]], [True], 0, ["a"])
    prompt = TeacherPrompt("{{ prompt }}: {{ word }}", tokenizer)
    text = ("<|im_start|>user\nsay cat<|im_end|>\n<|im_start|>assistant\ncat<|im_end|>\n"
            "<|im_start|>user\nagain: red<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.of(rollout).prompts.ids == [tokenizer(text).input_ids]
    assert prompt.columns() == {"word"} and turns[2]["content"] == "again"


def test_an_average_of_the_student_teaches_in_its_place_by_hand():
    """Two steps: the teacher of the second is decay start + (1 - decay) student, and the student goes on unchanged."""
    actor = Actor(trained(policy(**WIDE), 1e-2), tiny_tokenizer(), 8192)
    config = DistillConfig(sampling=TEN, teacher_prompt=TOLD, teacher_ema=0.75)
    trainer = told(DistillTrainer(Roles(actor), Mixture([]), config, seed=0, averaged=Teacher(actor.engine)),
                   template="{{ prompt }} it is {{ word }}")
    start = weights(actor.engine)
    trainer.step(asked())
    after = weights(actor.engine)
    mean = [0.75 * a + 0.25 * b for a, b in zip(start, after, strict=True)]
    with trainer.teacher_average.in_model():
        torch.testing.assert_close(weights(actor.engine), mean)
    torch.testing.assert_close(weights(actor.engine), after, rtol=0, atol=0)
    teacher = copy.deepcopy(actor.engine.model)
    with torch.no_grad():
        for weight, value in zip(teacher.parameters(), mean, strict=True):
            weight.copy_(value)
    twin = copy.deepcopy(actor.engine.model)
    metrics, rollout, found = trainer.step(asked()).compute(), trainer.sampler.last_rollout, []
    for row, text in enumerate(("say cat it is red fox", "the moon is it is a")):
        behind = SimpleNamespace(prompts=Prompts([tiny_tokenizer()(text).input_ids], [text]), **{
            name: getattr(rollout, name)[row: row + 1] for name in ("response_ids", "action_mask")})
        student, answer = plain_logits(twin, rollout, row)
        found.append(plain_divergence("policy_gradient", student, plain_logits(teacher, behind, 0)[0], answer))
    assert metrics["distill/teacher_kl"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-3)
