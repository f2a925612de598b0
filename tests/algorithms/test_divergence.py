"""Divergences from a teacher against whole distributions in float64 by torch's own log_softmax and autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.algorithms import divergence, likelihood
from hybrid_rlhf.algorithms.divergence import (
    KINDS,
    Divergence,
    TeacherTargets,
    token_divergence,
    top_k_divergence,
    top_k_logprobs,
)
from hybrid_rlhf.algorithms.likelihood import token_logprobs, token_logprobs_and

VOCABULARY = 11
kinds = pytest.mark.parametrize("kind", [Divergence("reverse_kl"), Divergence("forward_kl", temperature=0.7),
                                         Divergence("jsd", 0.5), Divergence("jsd", 0.1, 2.0)], ids=str)
any_kind = st.builds(Divergence, st.sampled_from(KINDS), st.floats(0.05, 0.95), st.sampled_from([1.0, 0.6, 3.0]))


def logits_of(size, width=VOCABULARY, seed=0, scale=2.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(size, width, generator=generator)).to(dtype)


def kl(first, second):
    return (first * (first.log() - second.log())).sum(-1)


def of_probabilities(student, teacher, kind):
    """The definitions, on distributions (n, V) without a zero."""
    if kind.kind == "forward_kl":
        return kl(teacher, student)
    if kind.kind == "reverse_kl":
        return kl(student, teacher)
    mixture = kind.beta * teacher + (1 - kind.beta) * student
    return kind.beta * kl(teacher, mixture) + (1 - kind.beta) * kl(student, mixture)


def whole(student, teacher, kind):
    return of_probabilities(*((x.double() / kind.temperature).softmax(-1) for x in (student, teacher)), kind)


def with_gradient(measure, student, *rest):
    leaf = student.clone().requires_grad_()
    found = measure(leaf, *rest)
    (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum().backward()
    return found.detach(), leaf.grad


@pytest.mark.parametrize(("kind", "by_hand"), [
    # s = (1/4, 3/4), t = (1/2, 1/2), m = (3/8, 5/8) of jsd at 1/2 and (7/16, 9/16) of jsd at 3/4
    (Divergence("reverse_kl"), 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
    (Divergence("forward_kl"), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
    (Divergence("jsd"), 0.25 * math.log(4 / 3) + 0.25 * math.log(4 / 5)
     + 0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5))),
    (Divergence("jsd", 0.75), 0.375 * math.log(8 / 7) + 0.375 * math.log(8 / 9)
     + 0.25 * (0.25 * math.log(4 / 7) + 0.75 * math.log(4 / 3)))], ids=str)
def test_two_words_by_hand(kind, by_hand):
    found = token_divergence(torch.tensor([[1.0, 3.0]]).log(), torch.zeros(1, 2), kind)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(by_hand, abs=1e-6)


@kinds
def test_values_and_gradients_are_those_of_whole_distributions(kind):
    student, teacher = logits_of(9), logits_of(9, seed=1)
    found, expected = (with_gradient(f, student, teacher, kind) for f in (token_divergence, whole))
    torch.testing.assert_close(found[0], expected[0].float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1].float(), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(any_kind, st.integers(1, 6), st.integers(1, 14), st.integers(1, 14), st.integers(0, 999),
       st.sampled_from([0.01, 1.0, 8.0]))
def test_any_logits_give_the_divergence_of_the_words_that_both_have(kind, size, width, other, seed, scale):
    student, teacher = logits_of(size, width, seed, scale), logits_of(size, other, seed + 1, scale)
    both = min(width, other)

    def cut(student, teacher, kind):
        return whole(student[:, :both], teacher[:, :both], kind)

    found, expected = (with_gradient(f, student, teacher, kind) for f in (token_divergence, cut))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5 * max(1, scale))  # logits of 50 in fp32
    assert (found[0] >= -1e-6).all() and not found[1][:, both:].any()


@kinds
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(kind):
    logits = logits_of(5, scale=5.0)
    found, gradient = with_gradient(token_divergence, logits, logits, kind)
    torch.testing.assert_close(found, torch.zeros(5), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_sixteen_bit_logits_is_that_of_fp32_rounded_once(kind, dtype):
    student, teacher = logits_of(6, dtype=dtype), logits_of(6, seed=1, dtype=dtype)
    found, gradient = with_gradient(token_divergence, student, teacher, kind)
    expected, exact = with_gradient(token_divergence, student.float(), teacher.float(), kind)
    assert found.dtype == torch.float32 and gradient.dtype == dtype
    assert torch.equal(found, expected) and torch.equal(gradient, exact.to(dtype))


@kinds
def test_a_word_that_both_rule_out_adds_nothing(kind):
    student, teacher = logits_of(4), logits_of(4, seed=1)
    ruled_out = [x.index_fill(1, torch.tensor([2, 7]), -math.inf) for x in (student, teacher)]
    left = torch.tensor([i for i in range(VOCABULARY) if i not in (2, 7)])
    found, gradient = with_gradient(token_divergence, *ruled_out, kind)
    expected, exact = with_gradient(whole, student[:, left], teacher[:, left], kind)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[:, left], exact.float(), rtol=1e-5, atol=1e-5)
    assert not gradient[:, [2, 7]].any()


def test_a_word_that_one_rules_out_makes_the_kl_infinite_that_asks_for_it_and_never_jsd():
    open_, closed = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    by_hand = {"reverse_kl": (math.log(2), math.inf), "forward_kl": (math.inf, math.log(2)),
               # m = (3/8, 3/8, 1/8, 1/8): of (1/2, 1/2, 0, 0) log 4/3, of (1/4, ..) half of log 2/3 and of log 2 each
               "jsd": (0.5 * math.log(4 / 3) + 0.25 * math.log(4 / 3),) * 2}
    for kind, expected in by_hand.items():
        for (student, teacher), value in zip(((closed, open_), (open_, closed)), expected, strict=True):
            found, gradient = with_gradient(token_divergence, student, teacher, Divergence(kind))
            assert found.item() == pytest.approx(value, abs=1e-6)
            assert torch.isfinite(gradient).all() or math.isinf(value)


def test_probabilities_at_the_end_of_fp32_leave_jsd_finite():
    logits = torch.stack([torch.zeros(200), torch.linspace(-105, -85, 200)], 1)  # 1e-45 is the least there is
    for beta in (0.1, 0.9):
        for found in (with_gradient(token_divergence, logits, logits.flip(0), Divergence("jsd", beta)),
                      with_gradient(token_divergence, logits, logits - 1, Divergence("jsd", beta))):
            assert all(torch.isfinite(x).all() for x in found)
    assert torch.isfinite(divergence._log_mixture(torch.tensor([1e-45]), torch.zeros(1), 0.9))  # where exp gives such


def test_logits_that_are_no_numbers_are_not_hidden():
    broken = logits_of(2).index_fill(1, torch.tensor([3]), math.nan)
    for kind in KINDS:
        assert token_divergence(broken, logits_of(2, seed=1), Divergence(kind)).isnan().all()
        assert token_divergence(logits_of(2, seed=1), broken, Divergence(kind)).isnan().all()


@kinds
@pytest.mark.parametrize("block", [1, 3 * VOCABULARY, 4 * 2 * VOCABULARY, 1 << 19])
def test_blocks_give_the_same(kind, block, monkeypatch):
    student, teacher = logits_of(13), logits_of(13, VOCABULARY + 2, seed=1)
    ids, logprobs = top_k_logprobs(teacher[:, :VOCABULARY], 3, kind.temperature)
    results = []
    for size in (1 << 25, block):
        monkeypatch.setitem(likelihood._BLOCK_NUMBERS, "cpu", size)
        results.append([*with_gradient(token_divergence, student, teacher, kind),
                        *with_gradient(top_k_divergence, student, ids, logprobs, kind),
                        *top_k_logprobs(teacher, 4, 0.7)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_no_tokens_at_all_give_an_empty_vector_and_zero_gradients():
    weight = torch.ones(VOCABULARY, 2, requires_grad=True)
    for kind in KINDS:
        student = torch.zeros(0, 2) @ weight.T
        found = token_divergence(student, torch.zeros(0, 13), Divergence(kind))
        named = top_k_divergence(student, torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3), Divergence(kind))
        assert found.shape == named.shape == (0,)
        (found.sum() + named.sum()).backward()
    assert not weight.grad.any()


def test_what_makes_no_sense_is_refused():
    for wrong in ({"kind": "kl"}, {"temperature": 0.0}, {"kind": "jsd", "beta": 0.0}, {"kind": "jsd", "beta": 1.0}):
        with pytest.raises(ValueError, match=r"kl|temperature|beta"):
            Divergence(**wrong)
    with pytest.raises(ValueError, match="3 rows of the student's logits for 2"):
        token_divergence(logits_of(3), logits_of(2), Divergence())
    with pytest.raises(ValueError, match="3 rows"):
        top_k_divergence(logits_of(3), *top_k_logprobs(logits_of(2), 2), Divergence())
    with pytest.raises(ValueError, match="without its head"):
        TeacherTargets(Divergence(), []).divergence(logits_of(3), logits_of(3))


# The teacher's k likeliest words

def merged(student, teacher, k, kind):
    """The definition over k + 1 categories, from whole distributions in float64."""
    named = (teacher.topk(k).indices[:, :, None] == torch.arange(teacher.shape[1])).any(1)
    parts = []
    for logits in (student, teacher):
        p = (logits.double() / kind.temperature).softmax(-1)
        parts.append(torch.cat([p[named].view(-1, k), p.masked_fill(named, 0).sum(-1, keepdim=True)], -1))
    return of_probabilities(*parts, kind)


@kinds
@pytest.mark.parametrize("k", [1, 4, VOCABULARY - 1])
def test_named_words_and_one_bucket_of_all_others(kind, k):
    student, teacher = logits_of(7), logits_of(7, seed=1)
    ids, logprobs = top_k_logprobs(teacher, k, kind.temperature)
    found, gradient = with_gradient(top_k_divergence, student, ids, logprobs, kind)
    expected, exact = with_gradient(lambda s: merged(s, teacher, k, kind), student)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, exact.float(), rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(any_kind, st.integers(1, 12), st.integers(0, 999), st.sampled_from([0.01, 1.0, 8.0]))
def test_merging_words_only_ever_lowers_a_divergence_and_naming_all_gives_it_whole(kind, k, seed, scale):
    student, teacher = logits_of(5, 12, seed, scale), logits_of(5, 12, seed + 1, scale)
    exact = whole(student, teacher, kind).float()
    found = top_k_divergence(student, *top_k_logprobs(teacher, k, kind.temperature), kind)
    assert (found <= 1.02 * exact + 1e-4).all() and (found >= -1e-5).all()  # 1 minus fp32 numbers is known to 1e-7
    if k == 12:
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@kinds
def test_a_teacher_that_is_sure_leaves_a_finite_divergence_and_gradient(kind):
    """Its other words' mass is 0 in fp32, where the student's is nearly all."""
    teacher = torch.tensor([[80.0] + [0.0] * 10])
    found, gradient = with_gradient(top_k_divergence, -teacher, *top_k_logprobs(teacher, 2, kind.temperature), kind)
    assert torch.isfinite(found).all() and found.item() > 0.05 and torch.isfinite(gradient).all()


@kinds
@pytest.mark.parametrize("k", [3, 9])
def test_words_that_the_student_does_not_have_are_left_out(kind, k):
    """Word 12 of the teacher is padding: what is left is as it is where whole vocabularies are cut."""
    student, teacher = logits_of(3, 8), logits_of(3, 13, seed=1)
    teacher[:, 8:] = -80.0
    teacher[:, 12], teacher[:, 0] = 5.5, 6.0  # the likeliest is one that both have
    ids, logprobs = top_k_logprobs(teacher, k, kind.temperature)
    assert (ids == 12).any(1).all()
    found, gradient = with_gradient(top_k_divergence, student, ids, logprobs, kind)
    expected, exact = with_gradient(lambda s: merged(s, teacher[:, :8], k - 1, kind) if k < 9 else
                                    whole(s, teacher[:, :8], kind), student)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, exact.float(), rtol=1e-4, atol=1e-4)


@kinds
def test_where_all_words_of_the_student_are_named_the_teacher_s_padding_counts_for_nothing(kind):
    student, teacher = logits_of(3, 8), logits_of(3, 13, seed=1)
    teacher[:, 8:] = -8.0
    ids, logprobs = top_k_logprobs(teacher, 8, kind.temperature)
    assert (ids < 8).all()
    found, gradient = with_gradient(top_k_divergence, student, ids, logprobs, kind)
    expected, exact = with_gradient(whole, student, teacher[:, :8], kind)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, exact.float(), rtol=1e-4, atol=1e-5)


@kinds
def test_words_ruled_out_leave_the_named_ones_finite(kind):
    student, teacher = (logits_of(4, seed=seed).index_fill(1, torch.tensor([2, 7]), -math.inf) for seed in (0, 1))
    for k in (3, 9, VOCABULARY):  # with k = 9 all others are ruled out by both
        found, gradient = with_gradient(top_k_divergence, student, *top_k_logprobs(teacher, k, kind.temperature), kind)
        assert torch.isfinite(gradient).all() and torch.isfinite(found).all()


def test_the_likeliest_words_by_hand():
    logits = torch.tensor([[1.0, 5.0, 2.0]]).log().bfloat16()
    ids, logprobs = top_k_logprobs(logits.float(), 2)
    assert ids.tolist() == [[1, 2]]
    ids, logprobs = top_k_logprobs(torch.tensor([[1.0, 5.0, 2.0]]).log(), 2, temperature=0.5)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(logprobs, torch.tensor([[25 / 30, 4 / 30]]).log())
    assert top_k_logprobs(logits, 8)[0].shape == (1, 3) and top_k_logprobs(logits, 2)[1].dtype == torch.float32


# In the chunks of the loss head

@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("chunk_size", [1, 4, 10, 64])
def test_chunks_give_the_values_and_gradients_of_the_whole(top_k, chunk_size):
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(VOCABULARY, (10,), generator=generator)
    kind, results = Divergence("jsd", 0.3), []
    taught, teacher_weight = torch.randn(10, 7, generator=generator), torch.randn(VOCABULARY, 7, generator=generator)
    for is_chunked in (True, False):
        hidden, weight = (logits_of(n, 5, seed=4).requires_grad_() for n in (10, VOCABULARY))
        if is_chunked:
            teacher = TeacherTargets(kind, [taught[:4], taught[4:4], taught[4:]], head=lambda h: h @ teacher_weight.T)
            if top_k:
                ids, logprobs = top_k_logprobs(taught @ teacher_weight.T, top_k)
                teacher = TeacherTargets(kind, list(logprobs.split([3, 7])), list(ids.split([3, 7])))
            (logprobs, _, _), (measured,) = token_logprobs_and(
                lambda *given, told=teacher: (told.divergence(*given),), teacher.flat(), hidden, targets,
                lambda h, w=weight: h @ w.T, chunk_size=chunk_size)
        else:
            logits = hidden @ weight.T
            logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            measured = (merged(logits, taught @ teacher_weight.T, top_k, kind) if top_k else
                        whole(logits, taught @ teacher_weight.T, kind)).float()
        (torch.arange(10) * measured - logprobs).sum().backward()
        results.append((logprobs, measured, hidden.grad, weight.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_teacher_s_logits_are_never_more_than_a_chunk_and_have_no_gradient():
    hidden, weight = logits_of(10, 5).requires_grad_(), logits_of(VOCABULARY, 5, seed=1).requires_grad_()
    taught, teacher_weight = logits_of(10, 7, seed=2), logits_of(VOCABULARY, 7, seed=3).requires_grad_()
    sizes, kept = [], []

    def head(rows):
        sizes.append(len(rows))
        assert not torch.is_grad_enabled()
        return rows @ teacher_weight.T

    teacher = TeacherTargets(Divergence(), [taught], head=head)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        _, (found,) = token_logprobs_and(lambda *given: (teacher.divergence(*given),), teacher.flat(), hidden,
                                              torch.zeros(10, dtype=torch.long), lambda h: h @ weight.T, chunk_size=4)
    assert sizes == [4, 4, 2]
    assert not any(shape[-1:] == (VOCABULARY,) for shape in kept)  # no row of logits outlives its chunk
    found.sum().backward()
    assert sorted(sizes[3:]) == [2, 4, 4] and teacher_weight.grad is None
    with torch.no_grad():
        token_logprobs_and(lambda *given: (teacher.divergence(*given),), teacher.flat(), hidden,
                           torch.zeros(10, dtype=torch.long), lambda h: h @ weight.T, chunk_size=4)
    assert sizes[6:] == [4, 4, 2]


def test_a_head_that_others_wait_for_is_called_as_often_with_a_teacher():
    """Two tokens in chunks of four, where another process has nine: three calls in each pass."""
    hidden, weight = logits_of(2, 5).requires_grad_(), logits_of(VOCABULARY, 5, seed=1).requires_grad_()
    calls = []

    def head(rows):
        calls.append(len(rows))
        return rows @ weight.T

    teacher = TeacherTargets(Divergence(), [logits_of(2, seed=3)], head=lambda rows: rows)
    targets = torch.zeros(2, dtype=torch.long)
    scores, (found,) = token_logprobs_and(lambda *given: (teacher.divergence(*given),), teacher.flat(), hidden,
                                               targets, head, chunk_size=4, num_chunks=3)
    assert found.shape == (2,) and calls == [2, 0, 0]
    (found.sum() - scores[0].sum()).backward()
    assert sorted(calls[3:]) == [0, 0, 2]


def test_scores_beside_a_teacher_are_those_without_one_bit_for_bit():
    hidden, weight = logits_of(10, 5), logits_of(VOCABULARY, 5, seed=1)
    targets = torch.arange(10)
    plain = token_logprobs(hidden, targets, lambda h: h @ weight.T, 0.7, chunk_size=4, with_entropy=True)
    teacher = TeacherTargets(Divergence(), [logits_of(10, seed=3)], head=lambda rows: rows)
    scores, _ = token_logprobs_and(lambda *given: (teacher.divergence(*given),), teacher.flat(), hidden, targets,
                                   lambda h: h @ weight.T, 0.7, chunk_size=4, with_entropy=True)
    for found, expected in zip(scores, plain, strict=True):
        assert torch.equal(found, expected)


def test_a_teacher_of_other_tokens_is_refused():
    with pytest.raises(ValueError, match="10 hidden states for 10, 9 targets"):
        token_logprobs_and(lambda *given: (), (torch.zeros(9, 2),), torch.zeros(10, 5),
                           torch.zeros(10, dtype=torch.long), lambda h: h)


def test_rows_of_a_micro_batch_are_those_asked_for_in_their_order():
    rows = [torch.full((n, 2), float(n)) for n in range(4)]
    ids = [torch.full((n, 2), n) for n in range(4)]
    found = TeacherTargets(Divergence(), rows, ids).select(torch.tensor([3, 0, 2])).to("cpu")
    assert [len(row) for row in found.rows] == [len(row) for row in found.ids] == [3, 0, 2]
    assert found.flat()[0][:, 0].tolist() == [3, 3, 3, 2, 2] == found.flat()[1][:, 0].tolist()


def test_the_first_word_that_the_student_lacks_is_left_out_and_its_others_are_not():
    # of three words the student has 1/2, 1/4, 1/4; the teacher names 0, 1 and 3. Left is 4/7, 2/7 and 1/7
    student = torch.tensor([[0.5, 0.25, 0.25]]).log()
    found = top_k_divergence(student, torch.tensor([[0, 1, 3]]), torch.tensor([[0.5, 0.25, 0.125]]).log(), Divergence())
    assert float(found) == pytest.approx(0.75 * math.log(7 / 8) + 0.25 * math.log(7 / 4), rel=1e-5)
