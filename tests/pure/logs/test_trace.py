"""Trace: which context a job takes along, and who may say it."""

import subprocess
import sys

import eliot
import pytest

from celery5 import App, Misconfigured
from celery5.logs.trace import get_current_trace, tracing
from celery5.protocol.job.messages import read_command
from celery5.runners.context import CURRENT_JOB, CurrentJob

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"

app = App("traces")


@app.task
async def noop() -> None: ...


def sent() -> str:
    """The trace in the message that would be sent."""
    return read_command(noop.job().message).trace


def test_a_job_carries_the_traceparent_of_its_block_and_none_outside() -> None:
    with tracing(PARENT):
        assert sent() == PARENT
        with tracing(OTHER):
            assert sent() == OTHER
        assert sent() == PARENT
    assert sent() == ""
    assert b'"trace"' not in noop.job().message


def test_a_job_that_is_sent_from_a_job_carries_the_trace_on() -> None:
    token = CURRENT_JOB.set(CurrentJob("j", "t", "q", 1, "w", None, PARENT))
    try:
        assert sent() == PARENT
        with tracing(OTHER):
            assert sent() == OTHER
    finally:
        CURRENT_JOB.reset(token)


def test_inside_an_eliot_action_a_job_carries_the_place_in_it() -> None:
    with eliot.start_action(action_type="order") as action:
        said = sent()
        uuid, at, level = said.partition("@")
        assert (uuid, at) == (action.task_uuid, "@")
        assert level.startswith("/")
        assert sent() != said  # each goes on in its own place
    assert get_current_trace() == ""


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "nonsense",
        PARENT.upper(),
        PARENT + "-",
        PARENT + "\n",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        None,
    ],
)
def test_what_is_no_traceparent_is_refused(bad: object) -> None:
    with pytest.raises(Misconfigured, match="give a W3C traceparent"), tracing(bad):  # type: ignore[arg-type]
        pass


def test_a_producer_without_eliot_does_not_import_it() -> None:
    code = (
        "import sys; from celery5 import App; app = App('x')\n"
        "@app.task\nasync def t(): ...\n"
        "t.job(); assert not {'eliot', 'trio', 'celery5.logs.log'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
