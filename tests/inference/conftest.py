import pytest

from tests.factories.tiny import chatml_tokenizer, tiny_scalar_model


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory) -> str:
    """A tiny reward model with a chat template."""
    folder = tmp_path_factory.mktemp("reward")
    tiny_scalar_model().save_pretrained(folder)
    chatml_tokenizer().save_pretrained(folder)
    return str(folder)
