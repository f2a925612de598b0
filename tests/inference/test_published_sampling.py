"""Chat and server sample by the settings that a model is published with, unless others are asked for."""

import argparse
import json

import pytest

from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.inference.chat_models import published_sampling
from tests.factories import checkpoints
from tests.factories.tiny import save_tiny

ROW = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "repetition_penalty": 1.05}


def folder(path, **values) -> str:
    save_tiny(path)
    (path / "generation_config.json").write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize(("values", "expected"), [
    (ROW, ROW), ({"do_sample": False}, {}),
    ({"temperature": 1, "top_k": 0, "num_beams": 4}, {"temperature": 1.0, "top_k": 0}),
    ({"temperature": "hot", "top_p": 0.0, "top_k": -1, "min_p": 0.05}, {"min_p": 0.05})])
def test_what_sampling_knows_is_taken_and_what_it_cannot_take_is_not(values, expected, tmp_path):
    found = published_sampling(folder(tmp_path / "model", **values))
    assert found == expected
    assert {type(found[name]) for name in found} <= {int, float}
    assert all(type(found[name]) is type(getattr(SamplingConfig(), name)) for name in found)


@pytest.mark.parametrize(("flags", "expected"), [
    ((), ROW), (("--temperature", "0", "--max_new_tokens", "5"), ROW | {"temperature": 0.0, "max_new_tokens": 5})])
def test_a_chat_takes_them_where_no_flag_says_otherwise_and_says_so_once(flags, expected, tmp_path, capsys):
    session = repl.open_session(repl.parse(["--model", f"m={folder(tmp_path / 'model', **ROW)}", *flags]))
    sampling = session.model.sampling
    assert {name: getattr(sampling, name) for name in expected} == expected
    told = [line for line in capsys.readouterr().err.splitlines() if "generation_config" in line]
    assert len(told) == 1
    assert told[0].startswith("m samples by its generation_config.json unless a flag or /set says otherwise: ")
    assert ("temperature" in told[0].rpartition(": ")[2]) == (not flags)


def test_a_chat_with_a_model_that_has_none_keeps_its_own_defaults(tmp_path, capsys):
    session = repl.open_session(repl.parse(["--model", save_tiny(tmp_path / "model")]))
    assert session.model.sampling == SamplingConfig(max_new_tokens=256, temperature=0.7)
    assert "generation_config" not in capsys.readouterr().err


def test_a_request_to_the_server_has_them_where_it_has_none(tmp_path, capsys):
    from hybrid_rlhf.inference.server.app import Limits, Server
    from hybrid_rlhf.inference.server.protocol import read_chat
    from hybrid_rlhf.inference.server.serve import open_model

    path = checkpoints.write("llama3_2_base", tmp_path / "base")
    served = open_model("m", path, argparse.Namespace(max_context=64, max_batch=2))
    assert "m samples by its generation_config.json unless a request says otherwise: temperature 0.6, top_p 0.9" in \
        capsys.readouterr().err
    server, hello = Server([served], None, Limits(), None), {"messages": [{"role": "user", "content": "a"}]}
    for body, expected in ((hello, (0.6, 0.9)), (hello | {"model": "m", "temperature": None}, (0.6, 0.9)),
                           (hello | {"temperature": 0, "top_p": 0.5}, (0.0, 0.5)),
                           (hello | {"model": "other"}, (1.0, 1.0)), (hello | {"model": 3}, None),
                           (hello | {"logprobs": True}, (1.0, 1.0)), (hello | {"echo": True}, (1.0, 1.0))):
        if expected:
            sampling = read_chat(server._with_defaults(body)).sampling
            assert (sampling.temperature, sampling.top_p) == expected
        else:
            assert server._with_defaults(body) == body
