import pytest

from hybrid_rlhf.training import on_policy


@pytest.fixture
def built(monkeypatch) -> list:
    """The roles that a run built."""
    found, plain = [], on_policy.build

    def keeping(*given, **options):
        roles, reward = plain(*given, **options)
        found.append(roles)
        return roles, reward

    monkeypatch.setattr(on_policy, "build", keeping)
    return found
