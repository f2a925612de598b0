import pytest

from hybrid_rlhf.report.metric_names import meaning
from hybrid_rlhf.report.summary import METRICS, conclude, read_history
from hybrid_rlhf.run import reporter
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


@pytest.fixture(autouse=True)
def explained(monkeypatch) -> None:
    """Every metric that a run of any stage writes has its line in the reports."""

    def checked(folder, *given):
        names = {name for row in read_history(folder / METRICS) for name in row}
        assert not (missing := sorted(name for name in names if not meaning(name))), missing
        return conclude(folder, *given)

    monkeypatch.setattr(reporter, "conclude", checked)
