"""Each kind of log masks the passwords in the errors that it writes."""

import io
import json
import logging

import eliot
import pytest

from celery5 import App
from celery5.logs.log import Log, LogWriter
from celery5.logs.printed_lines import PrintedLines
from celery5.logs.stdlib_log import captured_logging
from celery5.processes.watch.sidecar_log import SidecarLog
from celery5.protocol.job.history import JobRecord, pack_record, unpack_record
from celery5.protocol.masking import describe_error, get_masked_text
from celery5.runners.context import LOG_EVENT

TEXT = "ledger at https://ann:hush@ledger.example refused 11 api_key=hush"
MASKED = "ledger at https://ann:***@ledger.example refused 11 api_key=***"


@pytest.mark.parametrize("form", ["json", "console"])
def test_events_and_ends_of_jobs_are_logged_without_passwords(form: str) -> None:
    stream = io.StringIO()
    with LogWriter(stream, line_format=form) as writer:  # type: ignore[arg-type]
        log = Log(worker="w", app="shop", writer=writer)
        log.event(
            "timer:failed", "error", why=TEXT, traceback=f"Traceback\n  {TEXT}\n", others=[{"why": TEXT}]
        )
        extra = {"error": TEXT, "traceback": f"Traceback\n  {TEXT}\n"}
        log.log_job_end(
            "error", job="j", task="t", queue="q", state="DEAD", attempt=1, seconds=1, extra=extra
        )
        log.finish(ExceptionGroup("several", [ConnectionError(TEXT)]))
    shown = stream.getvalue()
    assert "hush" not in shown
    assert shown.count(MASKED) == 6
    assert "builtins.ConnectionError" in shown


def test_what_code_prints_and_logs_itself_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    stream = io.StringIO()
    with LogWriter(stream) as writer:
        log = Log(worker="w", app="shop", writer=writer)
        log.event("box:printed", line=TEXT)
        with captured_logging(writer, "info"):
            logging.getLogger("shop").error("failed: %s", TEXT)
        eliot.log_message(message_type="shop:failed", why=TEXT)
        log.finish()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["line"] for line in lines if "line" in line] == [TEXT]
    assert [line["message"] for line in lines if "message" in line] == [f"failed: {TEXT}"]
    assert [line["why"] for line in lines if "why" in line] == [TEXT]


def test_a_sidecar_logs_without_passwords() -> None:
    found: list[dict[str, object]] = []

    class Outlet:
        def write(self, messages: list[dict[str, object]]) -> int:
            found.extend(messages)
            return len(messages)

    log = SidecarLog(App("somewhere", log_detectors=[lambda around: Outlet()]))
    log.event("worker:recovery-failed", "warning", why=TEXT)
    log.close()
    assert [line["why"] for line in found] == [MASKED]


def test_a_producer_logs_without_passwords(caplog: pytest.LogCaptureFixture) -> None:
    LOG_EVENT.get()("observer:failed", "warning", observer="audit", why=TEXT)
    assert caplog.messages == [f"observer:failed  observer=audit  why={MASKED}"]


@pytest.mark.parametrize("is_json", [False, True])
def test_the_error_that_ends_a_member_is_written_without_passwords(is_json: bool) -> None:
    stream = io.StringIO()
    printed = PrintedLines(stream, name="stderr", member="web", is_json=is_json)
    printed.write_error(TEXT, f"Traceback\n  {TEXT}\n")
    assert "hush" not in stream.getvalue()
    assert MASKED in stream.getvalue()


def test_an_error_is_described_without_passwords_even_where_it_is_cut() -> None:
    assert describe_error(ConnectionError(TEXT)) == f"ConnectionError: {MASKED}"
    assert get_masked_text(TEXT, TEXT.index("sh@")) == MASKED[: TEXT.index("sh@")]


def test_the_history_keeps_and_shows_errors_without_passwords() -> None:
    old = JobRecord(id="j", queue="q", state="DEAD", error_type="E", error_message=TEXT, reason=TEXT)
    record = unpack_record(pack_record(old))
    assert record is not None
    assert (record.error_message, record.reason) == (MASKED, MASKED)
