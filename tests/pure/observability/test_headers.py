"""Headers in messages, the flag of a trace, and what counts as middleware."""

from typing import Any

import msgspec
import pytest

from celery5 import App
from celery5.errors import Misconfigured
from celery5.middleware.jobs import OutgoingJob
from celery5.observability import Middleware
from celery5.observability.opentelemetry import is_sampled
from celery5.protocol.job.messages import add_headers, make_replay, read_command, read_headers

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def test_headers_are_merged_and_all_else_stays_byte_for_byte() -> None:
    raw = b'{"v":1,"id":"j","task":"t","args":[1.10,1e400],"new":{"a":1},"headers":{"a":"1","b":"2"}}'
    changed = add_headers(raw, {"b": "3", "c": "4", "traceparent": "t"})
    assert b"[1.10,1e400]" in changed
    assert b'"new":{"a":1}' in changed
    assert read_headers(changed) == {"traceparent": "t", "a": "1", "b": "3", "c": "4"}
    command = read_command(b'{"v":1,"id":"j","task":"t","headers":{"a":"1"},"trace":"t"}')
    assert (command.headers, command.trace) == ({"a": "1"}, "t")


def test_a_replayed_job_has_its_headers() -> None:
    raw = b'{"v":1,"id":"j","task":"t","attempt":3,"headers":{"a":"1"}}'
    assert read_headers(make_replay(raw)) == {"a": "1"}


def test_a_job_whose_headers_were_only_read_is_the_same_job() -> None:
    app = App("headers")

    @app.task
    def work() -> None: ...

    job = work.job()
    outgoing = OutgoingJob(job)
    assert outgoing.headers == {}
    assert outgoing.make_job() is job
    outgoing.headers["a"] = "1"
    assert msgspec.structs.replace(outgoing.make_job(), message=b"") == msgspec.structs.replace(
        job, message=b""
    )
    assert read_command(outgoing.make_job().message).headers == {"a": "1"}


@pytest.mark.parametrize("bad", [{"a": 1}, {2: "a"}, {"a": "x" * 9000}])
def test_headers_that_are_no_texts_or_too_large_are_refused(bad: Any) -> None:
    app = App("headers")

    @app.task
    def work() -> None: ...

    outgoing = OutgoingJob(work.job())
    outgoing.headers.update(bad)
    with pytest.raises(ValueError, match="header"):
        outgoing.make_job()


@pytest.mark.parametrize(
    ("trace", "sampled"),
    [(TRACE + "01", True), (TRACE + "00", False), (TRACE + "03", True), (TRACE + "02", False), ("", True)],
)
def test_the_last_bit_of_a_traceparent_decides(trace: str, sampled: bool) -> None:
    assert is_sampled(trace) is sampled


@pytest.mark.parametrize("bad", [Middleware, object(), None])
def test_what_is_no_middleware_is_refused(bad: Any) -> None:
    with pytest.raises(Misconfigured, match="no object of a subclass of"):
        App("refused", middleware=[bad])


def test_only_methods_that_are_overridden_count() -> None:
    class Sends(Middleware):
        def sending(self, batch: Any) -> None: ...

    none, some = App("none").middleware, App("some", middleware=[Middleware(), Sends()]).middleware
    assert (none.sends, none.runs, none.settles, none.receives) == (False,) * 4
    assert (some.sends, some.runs, some.settles, some.receives) == (True, False, False, False)
