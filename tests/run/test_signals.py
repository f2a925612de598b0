import signal

import pytest

from hybrid_rlhf.run import signals


@pytest.fixture(autouse=True)
def as_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("processes", "after"), [(1, signal.SIG_DFL), (2, signal.SIG_IGN)])
def test_the_launcher_s_signal_does_not_cut_off_what_one_of_several_has_to_say_when_it_fails(
        monkeypatch, processes, after):
    monkeypatch.setattr(signals, "world_size", lambda: processes)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(RuntimeError), signals.interruptible(print):
        raise RuntimeError("Connection closed by peer")
    assert signal.getsignal(signal.SIGTERM) == after


def test_a_run_of_several_that_ends_well_leaves_the_signals_as_they_were(monkeypatch):
    monkeypatch.setattr(signals, "world_size", lambda: 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with signals.interruptible(print):
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
