"""Two processes give what one gives: weights, tokens, metrics, exports, at every ZeRO stage. They are started once."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.cli import main
from tests.rank_checks import LAYOUTS
from tests.stage_options import used
from tests.tiny import save_tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]  # the first test waits for every run of both ranks
ROOT = Path(__file__).parents[1]
WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon", "tree", "old book", "wind"]
RUNS = {"sft": "sft", "reward": "reward", "ppo": "ppo", "lora_reward": "reward", "lora_ppo": "ppo", "grpo": "grpo",
        "dpo": "dpo", "online_dpo": "online_dpo", "rejection": "rejection"}  # run -> stage
# what cannot be the same: the clock's figures, a process's own cache, and the budget that is given
CLOCKED = ("time/", "memory/", "engine/tokens_per_second", "engine/kv_bytes", "micro_batch_tokens",
           "value/micro_batch_tokens")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(*command: str, folder: Path = ROOT) -> subprocess.Popen:
    """Two processes on this machine by torchrun."""
    return start([*TORCHRUN, "--nproc_per_node", "2", "--master_port", free_port(), *command], folder)


def start(words: list[str], folder: Path = ROOT, **env: str) -> subprocess.Popen:
    """One thread a process: more would outnumber the cores."""
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env})


def ended(started: subprocess.Popen) -> subprocess.CompletedProcess:
    try:
        out, err = started.communicate(timeout=420)
    except subprocess.TimeoutExpired:
        started.terminate()  # the launcher ends its processes; killed, it would leave them
        out, err = started.communicate(timeout=60)
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def argv_of(folder: Path, where: str, batch: int, *more: str) -> dict[str, list[str]]:
    """The command lines of the three stages, and of the last two with adapters on one base that all roles share."""
    shared = ["--model.dtype", "float32", "--data.split", "null", "--data.eval_fraction", "0.3",
              "--data.max_length", "48", "--data.max_prompt_length", "32", "--data.cache_dir", f"{folder}/cache",
              "--train.max_steps", "3", "--train.learning_rate", "0.05", "--train.optim", "sgd",
              "--train.per_device_train_batch_size", str(batch), "--train.per_device_eval_batch_size", str(batch),
              "--train.logging_steps", "1", *more]
    ppo = ["--ppo.sampling.max_new_tokens", "6", "--ppo.sampling.num_samples", "2", "--ppo.num_ppo_epochs", "2",
           "--ppo.num_minibatches", "2", "--ppo.kl_target", "0.1", "--ppo.kl_horizon", "100",
           "--roles.actor.learning_rate", "0.05"]
    grpo = [*ppo, "--ppo.max_refills", "2", f"--reward.functions=['{folder}/pay.py:odd']"]
    ppo = [*ppo, "--roles.critic.learning_rate", "0.05", "--ppo.ema", "true", "--ppo.ptx_coef", "0.5",
           "--ppo.ptx_scale", "relative"]
    lora = ["--model.model_name_or_path", f"{folder}/{where}/sft", "--model.lora.r", "4"]
    extra = {"sft": ["--model.model_name_or_path", f"{folder}/base"], "reward": [], "ppo": ppo,
             "lora_reward": [*lora, "--train.learning_rate", "0.5"],
             # one update of one micro-batch: ZeRO 3 gathers each of the adapters' modules by itself, 5 s a pass by gloo
             "lora_ppo": [*lora, *ppo, "--ppo.num_ppo_epochs", "1", "--ppo.num_minibatches", "1",
                          "--engine.micro_batch_tokens", "1000",
                          "--roles.reward.model_name_or_path", f"{folder}/{where}/lora_reward",
                          "--roles.share_base", "true"], "grpo": grpo, "dpo": [],
             "online_dpo": ["--online.sampling.max_new_tokens", "6", "--roles.actor.learning_rate", "0.05"],
             "rejection": ["--rejection.sampling.max_new_tokens", "6", "--rejection.sampling.num_samples", "3",
                           "--rejection.num_minibatches", "2", "--roles.actor.learning_rate", "0.05"]}
    texts = {"ppo": f", {{path: '{folder}/sft.jsonl', stages: [ptx]}}"}
    return {name: ["--stage", stage, "--output_dir", f"{folder}/{where}/{name}",
                   f"--data.sources=[{{path: '{folder}/{stage}.jsonl'}}{texts.get(stage, '')}]",
                   *used(stage, [*shared, *extra[name]])]
            for name, stage in RUNS.items()}


def prepare(folder: Path) -> None:
    rows = {"sft": [{"prompt": f"say {w} {i}", "completion": w} for i in range(3) for w in WORDS],
            "reward": [{"prompt": f"say {w} {i}", "chosen": w, "rejected": "no no"} for i in range(3) for w in WORDS],
            "ppo": [{"prompt": f"say {w} {i}"} for i in range(3) for w in WORDS]}
    rows |= {"dpo": rows["reward"]} | dict.fromkeys(("grpo", "online_dpo", "rejection"), rows["ppo"])
    (folder / "pay.py").write_text("def odd(completions, **_):\n    return [float(len(c) % 2) for c in completions]\n")
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    save_tiny(folder / "base")
    argv = argv_of(folder, "two", 4, "--engine.zero_stage", "3", "--engine.micro_batch_tokens", "60")
    argv["ppo"] += ["--roles.actor.tp", "2"]
    (folder / "argv.json").write_text(json.dumps(argv))
    running = launch("tests/rank_checks.py", f"{folder}/out.json", f"{folder}/argv.json")
    for argv in argv_of(folder, "one", 8).values():
        assert main(argv) == 0
    done = ended(running)
    (folder / "log.txt").write_text(f"{done.returncode}\n{done.stdout}\n{done.stderr}")


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """The folder with what one and two processes left; the first of pytest's own processes to come here makes it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    folder = shared / "dist"
    with open(shared / "dist.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            prepare(folder)
    return folder


@pytest.fixture(scope="session")
def found(place) -> dict:
    """check -> what each process measured."""
    assert (place / "out.json").exists(), (place / "log.txt").read_text()[-3000:]
    return json.loads((place / "out.json").read_text())


@pytest.mark.parametrize("layout", [*(f"zero {stage}" for stage in range(4)), *LAYOUTS,
                                    "zero 3, logits in chunks"])
def test_three_steps_of_two_processes_with_unlike_micro_batches_are_plain_torch_s_on_the_whole_batch(found, layout):
    for measured in found["layouts"]:
        assert measured[layout]["loss"] < 1e-5
        assert measured[layout]["norm"] < 1e-5
        assert measured[layout]["weights"] < 1e-5


@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_clipped_over_all_processes_at_every_stage(found, stage):
    measured = found["layouts"][0][f"zero {stage}"]
    assert min(measured["norms"]) > 0.5  # or clipping was not put to the test
    assert measured["norm"] < 1e-5 and measured["weights"] < 1e-5  # the norm is that before clipping


@pytest.mark.parametrize("stage", range(4))
def test_gradient_checkpointing_changes_no_number_at_any_stage(found, stage):
    measured = found["layouts"][0][f"zero {stage}, checkpointing"]
    assert measured["loss"] < 1e-5 and measured["weights"] < 1e-5


@pytest.mark.parametrize("stage", range(4))
def test_adam_goes_as_far_as_torch_s_at_every_stage(found, stage):
    """Only the length: Adam makes whole steps of the rounding of near-zero gradients."""
    measured = found["layouts"][0][f"zero {stage}, adamw"]
    assert measured["length"] < 1e-5 and measured["loss"] < 1e-5 and measured["norm"] < 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
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


@pytest.mark.parametrize("stage", ["0", "1"])
def test_a_process_short_of_memory_splits_its_own_micro_batches_and_the_common_gradient_stays(found, stage):
    first, second = (m[stage] for m in found["memory"])
    assert first["learnt"] is None and second["learnt"] <= 50
    assert all(m["weights"] < 1e-5 and m["norm"] < 1e-5 for m in (first, second))


def test_one_short_of_memory_in_a_pass_that_others_wait_in_ends_all_with_a_line_that_says_what_to_set(place, found):
    log = (place / "log.txt").read_text()
    assert "error: out of memory in the actor's update: a micro-batch of 68 tokens (4 x 17) does not fit, and other " \
           "processes are in the midst of the same pass; set engine.micro_batch_tokens to 34 or less" in log
    assert log.count("error: out of memory") == 1 and log.count("exitcode  : 2 ") == 2


@pytest.mark.parametrize("stage", ["None", "1", "2", "3"])
def test_adapters_of_a_bfloat16_base_are_bfloat16_and_move_by_fp32_masters(found, stage):
    """Half a per cent is the rounding of bf16 gradients, of which the whole batch and its parts have other ones."""
    for measured in (m[stage] for m in found["adapters"]):
        assert measured["stage"] == int(0 if stage == "None" else stage) and measured["dtypes"] == ["torch.bfloat16"]
        assert measured["masters"] and measured["moved"] > 0.1
        assert measured["weights"] < 0.02 and measured["norm"] < 0.02
    assert len({m[stage]["weights"] for m in found["adapters"]}) == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
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


def metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKED)}
            for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_a_stage_of_two_processes_under_zero_3_reports_what_one_process_reports(place, found, name):
    assert [m[name] for m in found["stages"]] == [0, 0]
    one, two = (metrics(place / where / name) for where in ("one", "two"))
    assert len(one) == len(two) == 4  # three steps and an evaluation, each written once
    for expected, row in zip(one, two, strict=True):
        if abs(expected.get("rewards/margins", 1)) < 1e-6:  # the policy is the reference: rounding says who is ahead
            assert 0 <= row.pop("rewards/accuracies") <= 1 and expected.pop("rewards/accuracies") <= 1
        assert row == pytest.approx(expected, rel=1e-4, abs=2e-6)


@pytest.mark.parametrize(("name", "folder"), [*((name, "model") for name in RUNS), ("ppo", "model_ema"),
                                              ("lora_ppo", "model_ema")])
def test_a_stage_of_two_processes_exports_the_weights_of_one_process(place, found, name, folder):
    one, two = (load_file(place / where / name / folder / "model.safetensors") for where in ("one", "two"))
    assert one.keys() == two.keys()
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=1e-4, atol=1e-6)


def test_the_samples_of_a_rollout_do_not_depend_on_how_many_processes_draw_it(place, found):
    one, two = (metrics(place / where / "ppo", "samples.jsonl") for where in ("one", "two"))
    assert [s["completion"] for s in two] == [s["completion"] for s in one] != []
