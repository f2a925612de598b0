"""When a run that has a process may be taken up again: only where that process is about to go."""

import json

import pytest

from hybrid_rlhf.studio.job_files import Job
from hybrid_rlhf.studio.job_requests import _is_ending

BEGAN = "2026-11-26T10:00:00+00:00"


@pytest.mark.parametrize(("status", "finished", "state", "is_ending"), [
    ("running", None, "running", False),
    ("stopped", None, "running", True),  # it writes its model
    ("stopped", "2026-11-26T10:05:00+00:00", "running", True),
    ("stopped", "2026-11-26T09:55:00+00:00", "running", False),  # by an earlier process; this one has yet to begin
    ("failed", None, "running", False),
    ("stopped", None, "queued", False)])
def test_a_run_is_ending_once_its_record_says_so(tmp_path, status, finished, state, is_ending):
    (tmp_path / "run.json").write_text(json.dumps({"status": status, "finished": finished}))
    assert _is_ending(Job("1", {}, state, started=BEGAN), tmp_path) == is_ending
