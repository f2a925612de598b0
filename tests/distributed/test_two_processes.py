"""Two processes give what one gives: weights, tokens, metrics, exports, at every ZeRO stage. They are started once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.rank_checks import KINDS, LAYOUTS
from tests.distributed.two_processes import RUNS, metrics

# The first test waits for every run of both processes.
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("layout", [*(f"zero {stage}" for stage in range(4)), *LAYOUTS,
                                    "zero 3, logits in chunks"])
def test_three_steps_with_unlike_micro_batches_are_plain_torch_s_on_the_whole_batch(found, layout):
    for measured in found["layouts"]:
        assert measured[layout]["loss"] < 1e-5
        assert measured[layout]["norm"] < 1e-5
        assert measured[layout]["weights"] < 1e-5


@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_clipped_over_all_processes_at_every_stage(found, stage):
    assert min(found["layouts"][0][f"zero {stage}"]["norms"]) > 0.5  # before clipping: it was put to the test


@pytest.mark.parametrize("stage", KINDS)
def test_gradient_checkpointing_changes_no_number_and_adam_goes_as_far_as_torch_s(found, stage):
    """Adam's length only: it makes whole steps of the rounding of near-zero gradients."""
    for kind, names in (("checkpointing", ("loss", "weights")), ("adamw", ("length", "loss", "norm"))):
        measured = found["layouts"][0][f"zero {stage}, {kind}"]
        assert max(measured[name] for name in names) < 1e-5


@pytest.mark.parametrize("stage", KINDS[1:])
def test_bfloat16_weights_move_by_their_fp32_masters(found, stage):
    """A few per cent of rounding; bf16 sums would lose small steps whole, and a step too many would double the way."""
    for measured in found["layouts"]:
        measured = measured[f"zero {stage}, bfloat16"]
        assert measured["loss"] < 0.01 and measured["weights"] < 0.1 and measured["dtypes"] == ["torch.float32"]


def test_under_zero_3_a_process_generates_alone_gathers_once_and_gives_the_same_weights_back(found):
    first, second = found["inference"]
    assert first["tokens"] == [row[: len(t)] for row, t in zip(first["oracle"], first["tokens"], strict=True)]
    assert len(first["tokens"]) == 4 and second["tokens"] == []
    assert first["path"] == "native" and first["is_same"] and second["is_same"]
    before, inside, after = first["held"]
    assert before == after < 0.1 * inside  # whole only within the mode


def test_under_zero_3_with_tp_a_process_keeps_its_shard_and_draws_what_generate_draws(found):
    first, second = found["shards"]
    for tokens in first["tokens"]:
        assert tokens == [row[: len(t)] for row, t in zip(first["oracle"], tokens, strict=True)]
    assert second["tokens"] == [[], []]
    for seen in (first, second):
        assert seen["said"]["path"] == "native" and seen["said"]["tp"] == 2
        assert seen["inside"] == [seen["expected"]] * 2  # half of each planned layer, the rest whole
        assert seen["held"] < 0.1 * seen["expected"]
        assert seen["is_restored"] and seen["off"] < 1e-5


def test_under_zero_3_the_state_is_that_of_whole_weights(found):
    assert all(m == {"missing": [], "shapes": True, "moments": True} for m in found["state"])


def test_unlike_numbers_of_pairs_give_the_gradient_of_their_common_mean(found):
    assert max(m["weights"] for m in found["rewards"]) < 1e-5


def test_one_that_has_no_room_for_a_single_row_ends_all_with_a_line_that_says_what_to_change(place, found):
    log = (place / "log.txt").read_text()
    assert "error: out of memory in the actor's update: a micro-batch of 17 tokens (1 x 17) is a single row" in log
    assert log.count("error: out of memory") == 1 and log.count("exitcode  : 2 ") == 2


@pytest.mark.parametrize("stage", ["None", "1", "3"])
def test_adapters_of_a_bfloat16_base_are_bfloat16_and_move_by_fp32_masters(found, stage):
    """Half a per cent is the rounding of bf16 gradients, of which the whole batch and its parts have other ones."""
    for measured in (m[stage] for m in found["adapters"]):
        assert measured["stage"] == int(0 if stage == "None" else stage) and measured["dtypes"] == ["torch.bfloat16"]
        assert measured["masters"] and measured["moved"] > 0.1
        assert measured["weights"] < 0.02 and measured["norm"] < 0.02
    assert len({m[stage]["weights"] for m in found["adapters"]}) == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_8_bit_adam_goes_about_as_far_as_adam(found, stage):
    for measured in (m["8 bits"][f"zero {stage}"] for m in found["adapters"]):
        assert measured["apart"] < 0.15 and measured["num_bytes"] > 0


def test_processes_start_from_the_same_weights_and_draw_dropout_masks_of_their_own(found):
    first, second = (m["masks"] for m in found["adapters"])
    assert first["weight"] == second["weight"] and first["mask"] != second["mask"]


def test_refilled_groups_are_those_of_one_process(place, found):
    one, two = (metrics(place / where / "grpo") for where in ("one", "two"))
    assert any(0 < row.get("frac_reward_zero_std", 0) < 1 for row in one)
    assert any(row.get("refill/rounds", 0) > 0 for row in one)
    for name in ("refill/rounds", "refill/filled", "frac_reward_zero_std"):
        assert [row.get(name) for row in two] == pytest.approx([row.get(name) for row in one])


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "mixtral+lora", "qwen3_moe+lora", "one expert each"])
def test_experts_idle_on_one_process_under_zero_3_hang_nobody_and_the_gradient_is_plain_torch_s(found, case):
    for measured in found["experts"]:
        assert measured[case]["weights"] < 1e-5 and measured[case]["moved"] > 1e-3


@pytest.mark.parametrize("case", ["student zero 0, teacher zero 0", "student zero 2, teacher zero 0",
                                  "student zero 3, teacher zero 0", "student zero 3, teacher zero 3"])
def test_a_student_of_two_processes_takes_plain_torch_s_steps_towards_its_teacher(found, case):
    for measured in found["teachers"]:
        assert measured[case]["weights"] < 1e-5 and measured[case]["moved"] > 1e-3


@pytest.fixture
def left(place, found, name) -> Path:
    """The folder with run `name`, which ended well on both processes."""
    assert [m[name] for m in found["stages"]] == [0, 0]
    return place


@pytest.mark.parametrize("name", RUNS)
def test_a_stage_of_two_processes_under_zero_3_reports_what_one_process_reports(left, name):
    one, two = (metrics(left / where / name) for where in ("one", "two"))
    assert len(one) == len(two) == 4  # three steps and an evaluation, each written once
    for expected, row in zip(one, two, strict=True):
        if abs(expected.get("rewards/margins", 1)) < 1e-6:  # the policy is the reference: rounding says who is ahead
            assert 0 <= row.pop("rewards/accuracies") <= 1 and expected.pop("rewards/accuracies") <= 1
        assert row == pytest.approx(expected, rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("folder", ["model", "model_ema"])
@pytest.mark.parametrize("name", RUNS)
def test_a_stage_of_two_processes_exports_the_weights_of_one_process(left, name, folder):
    if folder == "model_ema" and name not in ("ppo", "lora_ppo"):
        assert not (left / "two" / name / folder).exists()
        return
    one, two = (load_file(left / where / name / folder / "model.safetensors") for where in ("one", "two"))
    assert one.keys() == two.keys()
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=1e-4, atol=1e-6)


def test_the_samples_of_a_rollout_do_not_depend_on_how_many_processes_draw_it(place, found):
    one, two = (metrics(place / where / "ppo", "samples.jsonl") for where in ("one", "two"))
    assert [s["completion"] for s in two] == [s["completion"] for s in one] != []
