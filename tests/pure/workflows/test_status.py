"""The status of a run: it can be read whatever its fields in Redis contain."""

import pytest

from celery5.protocol.workflows.status import RunState, make_status


@pytest.mark.parametrize(
    "error", [b"[" * 100_000, b'{"cause":' * 100_000, b"\xff\xfe", b"null", b"7", b'"text"']
)
def test_status_of_a_run_is_read_whatever_its_error_is(error: bytes) -> None:
    status = make_status("run-1", "default", {"state": b"failed", "error": error, "undo_error": error})
    assert status.state is RunState.FAILED
    assert len(status.error) <= 200
