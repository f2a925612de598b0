"""A tokenizer whose template shows tools."""

import pytest

from tests.factories.trl_templates import tokenizer_of


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("qwen2_5")
