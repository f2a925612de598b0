"""A checkpoint of some processes that another number of them takes up: what is common to them, and what forbids it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from hybrid_rlhf.core import random_state
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.run import checkpoint, process_count, resume, runfile
from tests.factories.counting import Killed, killed, runner

PART = {"partition": {"stage": 1, "groups": [["w"]]}, "optimizer": {}, "num_steps": 3}


@pytest.fixture
def go(tmp_path):
    return runner(tmp_path)


@pytest.fixture
def be(monkeypatch):
    """be(rank, world): from now on this process is that one."""
    def now(rank: int, world: int) -> None:
        for module in (checkpoint, process_count, resume):
            for name, value in (("rank", rank), ("world_size", world)):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda value=value: value)

    return now


def by_two(folder, trainers: list[dict], **made):
    """A checkpoint of two processes: each with what its trainer saved, and with random generators of its own."""
    path, files = folder / "step-00000002", {}
    path.mkdir(parents=True)
    for rank, trainer in enumerate(trainers):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(rank)
        state = {"step": 2, "trainer": trainer, "random": random_state.state(), "values": {"time/step": float(rank)},
                 "run": {"world_size": 2, "settings": {"train": {"per_device_train_batch_size": 4}}, **made}}
        one = checkpoint.save(folder / f"of{rank}", 2, state)
        for name in (checkpoint.TENSORS, checkpoint.REST):
            (path / checkpoint.of_rank(name, rank)).write_bytes((one / name).read_bytes())
            entry = json.loads((one / checkpoint.MANIFEST).read_text())["files"][name]
            files[checkpoint.of_rank(name, rank)] = entry
    manifest = {"format": checkpoint.FORMAT, "world_size": 2, "files": files}
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"sha256": checkpoint._sum_of(manifest)}))
    assert checkpoint.damage(path) is None
    return path


def test_what_processes_have_in_common_parts_and_limits_are_joined(tmp_path, be):
    rng = torch.arange(5)
    one, other = ({"actor": PART | {"weights": {"group 0": torch.full((2,), float(r))}}, "rng": rng,
                   "kl": {"value": 0.5}, "nothing": float("nan"), "list": [1, [2]], "oom_limits": limits}
                  for r, limits in enumerate(({"actor": {"update": 64}, "critic": {}},
                                              {"actor": {"update": 32, "score": 7}, "critic": {}})))
    path = by_two(tmp_path, [one, other])
    be(0, 3)
    found = process_count.read_joined(path)["trainer"]
    assert torch.equal(found["rng"], rng) and found["kl"] == {"value": 0.5} and found["list"] == [1, [2]]
    assert found["oom_limits"] == {"actor": {"update": 32, "score": 7}, "critic": {}}
    assert [each["weights"]["group 0"].tolist() for each in found["actor"]["processes"]] == [[0, 0], [1, 1]]
    be(1, 2)  # as many as before: each has its own, as ever
    assert process_count.read_joined(path)["trainer"]["actor"]["weights"]["group 0"].tolist() == [1, 1]


@pytest.mark.parametrize(("rank", "drawn_by"), [(0, 0), (1, 1), (2, None)])
def test_a_process_goes_on_with_its_generators_and_a_new_one_has_torch_s_as_seeded(tmp_path, be, rank, drawn_by):
    path = by_two(tmp_path, [{}, {}])
    expected = {}
    for seed in (0, 1, 77):
        torch.manual_seed(seed)
        expected[seed] = torch.rand(3)
    torch.manual_seed(77)
    be(rank, 3)
    random_state.load_state(process_count.read_joined(path)["random"])
    assert torch.equal(torch.rand(3), expected[77 if drawn_by is None else drawn_by])
    assert random.random() == random.Random(drawn_by or 0).random()


@pytest.mark.parametrize(("one", "other", "name"), [
    ({"source": {"seen": 1}}, {"source": {"seen": 2}}, r"trainer\.source\.seen"), ({"a": 1}, {"b": 1}, "trainer"),
    ({"rng": torch.zeros(2)}, {"rng": torch.ones(2)}, r"trainer\.rng"), ({"a": [1]}, {"a": [1, 2]}, r"trainer\.a")])
def test_what_is_each_process_s_own_is_refused(tmp_path, be, one, other, name):
    path = by_two(tmp_path, [one, other])
    be(0, 1)
    with pytest.raises(process_count.Unlike, match=f"its 2 processes have each a {name} of their own"):
        process_count.read_joined(path)
    with pytest.raises(UserError, match=f"made by 2 processes and this run has 1: its 2 processes have .*{name}.*; "
                                        "start 2, or give --resume never"):
        resume.check_fits(path, {"train": {"per_device_train_batch_size": 8}})


def test_8_bit_moments_in_parts_are_refused(tmp_path, be):
    train = {"per_device_train_batch_size": 4}
    be(0, 1)
    eight = {"settings": {"train": train | {"optim": "adamw_8bit"}, "engine": {"zero_stage": None}}}
    now = {"train": eight["settings"]["train"] | {"per_device_train_batch_size": 8}, "engine": {"zero_stage": None}}
    with pytest.raises(UserError, match=r"adamw_8bit scales blocks of what each process holds; start 2"):
        resume.check_fits(by_two(tmp_path / "b", [{"actor": PART}] * 2, **eight), now)
    whole = PART | {"partition": {"stage": 0, "groups": []}}
    path = by_two(tmp_path / "c", [{"actor": whole}] * 2, **eight)
    assert resume.check_fits(path, now)["world_size"] == 2
    with pytest.raises(UserError, match="adamw_8bit"):
        resume.check_fits(path, now | {"engine": {"zero_stage": 1}})


@pytest.mark.parametrize(("rows", "steps", "now", "world", "fits"), [
    (4, 1, {}, 1, "a step took 8 rows from all .* would take 4; give --train.per_device_train_batch_size 8$"),
    (4, 1, {}, 4, "would take 16; give --train.per_device_train_batch_size 2$"),
    (2, 3, {}, 4, "took 12 rows .* 24; give --train.per_device_train_batch_size 1$"),
    (1, 2, {}, 4, "would take 8; give --train.per_device_train_batch_size 1 --train.gradient_accumulation_steps 1$"),
    (4, 1, {}, 3, "would take 12; start 2, or another number that divides 8$"),
    (4, 1, {"per_device_train_batch_size": 8}, 1, None), (4, 1, {"gradient_accumulation_steps": 2}, 1, None)])
def test_a_step_has_as_many_rows_as_before_or_a_line_says_what_to_give(tmp_path, be, rows, steps, now, world, fits):
    train = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
    path = by_two(tmp_path, [{}, {}], settings={"train": train})
    be(0, world)
    if fits is None:
        assert resume.check_fits(path, {"train": train | now})["world_size"] == 2
        return
    with pytest.raises(UserError, match=f"was made by 2 processes and this run has {world}: .*{fits}"):
        resume.check_fits(path, {"train": train | now})


def test_streams_beside_the_rows_keep_their_size_too(tmp_path, be):
    def settings(rows: int, **more: dict) -> dict:
        return {"train": {"per_device_train_batch_size": rows}, **more}

    be(0, 1)
    path = by_two(tmp_path / "a", [{}, {}], settings=settings(4, ppo={"ptx_batch_size": 3}))
    with pytest.raises(UserError, match=r"took 6 texts .* would take 3; give --ppo\.ptx_batch_size 6$"):
        resume.check_fits(path, settings(8, ppo={"ptx_batch_size": 3}))
    resume.check_fits(path, settings(8, ppo={"ptx_batch_size": 6}))
    distill = {"lmbda": 0.5, "num_minibatches": 4, "sampling": {"num_samples": 1}}  # 5 / 4 and 10 / 4, rounded up
    path = by_two(tmp_path / "b", [{}, {}], settings=settings(5, distill=distill))
    with pytest.raises(UserError, match=r"by distill\.num_minibatches .* took 4 texts .* would take 3; start 2"):
        resume.check_fits(path, settings(10, distill=distill))
    path = by_two(tmp_path / "c", [{}, {}], settings=settings(4, distill=distill))
    resume.check_fits(path, settings(8, distill=distill))


def test_only_settings_of_the_layout_may_change_and_only_with_the_number(go, tmp_path, be, capsys):
    layout = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1)
    with pytest.raises(Killed):
        go("run", {5: killed}, **layout)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"\(train\.per_device_train_batch_size\)"):
        go("run", **layout | {"per_device_train_batch_size": 4})
    be(0, 2)
    with pytest.raises(UserError, match=r"other settings \(train\.weight_decay\)"):
        go("run", **layout | {"per_device_train_batch_size": 4, "weight_decay": 0.5})
    with pytest.raises(UserError, match=r"made by 1 process and .* give --train\.per_device_train_batch_size 4$"):
        go("run", **layout)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    be(0, 1)
    for name in ("engine.zero_stage", "engine.offload", "engine.micro_batch_tokens", "roles.actor.tp",
                 "roles.critic.zero_stage", "train.per_device_eval_batch_size", "model.gradient_checkpointing"):
        assert process_count.may_change(name)
    for name in ("roles.actor.learning_rate", "train.optim", "seed", "ppo.minibatch_size", "engine", "tp"):
        assert not process_count.may_change(name)


def test_a_finished_run_is_left_alone_by_another_number_of_processes(go, tmp_path, be):
    go("run", per_device_train_batch_size=8)
    be(0, 2)
    assert go("run", per_device_train_batch_size=4).is_finished
    with pytest.raises(UserError, match=r"finished run with other settings"):
        go("run", per_device_train_batch_size=4, weight_decay=0.5)
    be(0, 1)
    with pytest.raises(UserError, match=r"finished run with other settings"):
        go("run", per_device_train_batch_size=4)
    assert runfile.read_run(tmp_path / "run").is_finished
