"""Two processes that hold the same weights and generate together say what one process says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import consecutive_ranks
from hybrid_rlhf.engine.decode.tensor_parallel import check_configured
from tests.engine.decode.tp_ranks import (
    GREEDY,
    KINDS,
    PROMPTS,
    SAMPLED,
    adapted,
    changes_of,
    engine_of,
    step,
    with_adapters,
)
from tests.factories.architectures import build

pytestmark = pytest.mark.dist
HALVED = [k for k in KINDS if k != "phi3"]  # its plan keeps attention whole: query, key and value are one layer


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    script = str(Path(__file__).with_name("tp_ranks.py"))
    roots = [str(Path(script).parent), str(Path(script).parents[3]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(roots)}
    running = [subprocess.Popen([sys.executable, script, str(i), str(folder / "store"), str(folder / f"{i}.json")],
                                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for i in range(2)]
    try:
        outputs = [process.communicate(timeout=280)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


def _oracle(model, settings=GREEDY):
    tokens = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=settings.max_new_tokens,
                             eos_token_id=2, pad_token_id=0)
        tokens.append(out[0, len(prompt):].tolist())
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_over_two_ranks_equal_generate_and_logits_are_the_same_bits_on_both(kind, ranks):
    model = build(kind, **changes_of(kind))
    expected = _oracle(model)
    assert [seen[kind]["greedy"] for seen in ranks] == [expected, expected]
    assert ranks[0][kind]["said"]["tp"] == 2
    truth, ours = model(torch.tensor([PROMPTS[0]])).logits[0, -1], torch.tensor(ranks[0][kind]["logits"])
    assert (ours - truth).abs().max() / truth.abs().max() < 1e-4
    assert ranks[0][kind]["logits"] == ranks[1][kind]["logits"]


def test_both_ranks_draw_from_the_same_bits_in_bfloat16_too(ranks):
    truth = build("qwen3", **changes_of("qwen3")).bfloat16()(torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    ours = torch.tensor(ranks[0]["bfloat16"]["logits"])
    assert (ours - truth).abs().max() / truth.abs().max() < 0.05
    assert ranks[0]["bfloat16"] == ranks[1]["bfloat16"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_draws_for_its_own_prompts_what_one_process_draws(kind, ranks):
    engine = engine_of(build(kind, **changes_of(kind)))
    with engine.inference():
        whole = engine.generate(PROMPTS, SAMPLED, seed=5)
    for seen in (each[kind] for each in ranks):
        assert seen["sampled"] == [whole.tokens[i] for i in seen["own"]]
        for logprobs, i in zip(seen["logprobs"], seen["own"], strict=True):
            assert torch.allclose(torch.tensor(logprobs), torch.tensor(whole.logprobs[i]), atol=1e-4)
    if kind in HALVED:  # three slots as long as the longest request, there as here
        assert {seen[kind]["kv_bytes"] for seen in ranks} == {engine.kv_bytes // 2}


@pytest.mark.parametrize("kind", KINDS)
def test_shards_lie_in_the_training_parameters_and_leave_them_as_they_were(kind, ranks):
    model = build(kind, **changes_of(kind))
    assert all(seen[kind]["strangers"] == 0 for seen in ranks)
    assert all(seen[kind]["is_restored"] for seen in ranks)
    table = model.get_input_embeddings().weight.numel()
    cut = sum(p.numel() for n, p in model.named_parameters() if p.ndim > 1) - table
    assert sum(seen[kind]["numel"] for seen in ranks) < 2.2 * table + 1.1 * cut + 2000


@pytest.fixture
def one_thread():
    """Sums are those of the ranks, which have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["llama", "phi3", "mixtral"])
def test_adapters_are_cut_with_their_layers_before_and_after_an_optimizer_step(kind, ranks, one_thread):
    model = with_adapters(build(kind))
    before = _oracle(model)
    step(model)
    after = _oracle(model)
    assert before != after
    assert [seen[f"{kind}+lora"]["tokens"] for seen in ranks] == [[before, after]] * 2
    assert ranks[0][f"{kind}+lora"]["weights"] == pytest.approx(adapted(kind, None)["weights"], abs=1e-9)


def test_what_cannot_be_spread_is_refused_in_one_line_on_every_rank(ranks):
    for rank, said in enumerate(seen["refusals"] for seen in ranks):
        assert said["no plan"] == "GPT2LMHeadModel has no tensor-parallel plan in transformers; it runs with tp 1 only"
        assert "k_proj has 3 heads of 8, which tp 2 does not divide" in said["heads"]
        assert "uses sequence_parallel, which this engine does not know" in said["style"]
        assert "exceed the model's 128 positions" in said["too long on one rank"]
        assert said["too long on one rank"].startswith("rank 1 of the tensor-parallel group") == (rank == 0)
        assert "different sampling settings" in said["settings differ"]
        assert said["afterwards"] == _oracle(build("llama"))
        assert said["nothing to ask for"] == (0 if rank else len(PROMPTS))


def test_a_rank_that_fails_leaves_no_other_waiting(ranks):
    first, second = (seen["failure"] for seen in ranks)
    assert second["first"] == "MemoryError: no room on this rank"
    assert "another rank of the group has failed or left" in first["first"]
    assert all("ended with an earlier error" in seen["second"] for seen in (first, second))
    assert max(first["seconds"], second["seconds"]) < 30


def test_a_configuration_is_refused_before_any_weight_is_read():
    from transformers import AutoConfig

    llama = AutoConfig.for_model("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    check_configured(llama, 3, "roles.actor.tp")
    with pytest.raises(UserError, match=r"^roles.actor.tp is 2, but llama has num_key_value_heads 3, which 2 does not"):
        check_configured(llama, 2, "roles.actor.tp")
    with pytest.raises(UserError, match="gpt2 has no tensor-parallel plan"):
        check_configured(AutoConfig.for_model("gpt2"), 2, "roles.actor.tp")
    with pytest.raises(ValueError, match="groups of 2 ranks in a world of 1"):
        consecutive_ranks(2)
