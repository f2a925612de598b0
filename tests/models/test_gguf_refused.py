"""A model as llama.cpp has it is named as such, wherever a model is asked for."""

from __future__ import annotations

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.inference.conversation import check_can_chat
from hybrid_rlhf.models.load import check_folder


@pytest.mark.parametrize("check", [check_folder, check_can_chat])
def test_a_gguf_is_named_and_what_it_was_made_from_asked_for(tmp_path, check):
    (tmp_path / "m-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"\(m-q4.gguf\) is llama.cpp's GGUF, which is not read here; give the folder"):
        check(str(tmp_path))
    with pytest.raises(UserError, match=r"m-q4.gguf is llama.cpp's GGUF, which"):
        check_folder(str(tmp_path / "m-q4.gguf"))
