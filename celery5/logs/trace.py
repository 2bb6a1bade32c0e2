"""The trace context that jobs carry, so that each log line shows the trace that it belongs to.

A producer sets it with `tracing`. A job passes its own to the jobs that it sends. Otherwise it is a place in the
producer's eliot action, in which the job goes on (`celery5.logs.eliot_context`). Spans are made by middleware
(`celery5.observability`).
"""

import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from random import getrandbits

from celery5.errors import Misconfigured
from celery5.logs.fence import FENCE
from celery5.runners.context import CURRENT_JOB

_TRACE: ContextVar[str] = ContextVar("celery5_trace", default="")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_GET_ELIOT_CONTEXT: list[Callable[[], str]] = []


@contextmanager
def tracing(traceparent: str) -> Generator[None, None, None]:
    """Let the jobs that are sent in the block carry a W3C trace context: `00-<trace>-<span>-<flags>`.

    Raises Misconfigured for anything else.
    """
    if not _TRACEPARENT.fullmatch(str(traceparent)):
        raise Misconfigured(
            f"tracing({traceparent!r}): give a W3C traceparent, such as "
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        )
    token = _TRACE.set(traceparent)
    try:
        yield
    finally:
        _TRACE.reset(token)


def get_current_trace() -> str:
    """Return the context that a job sent now would carry; '' for none."""
    traceparent = _TRACE.get()
    if traceparent:
        return traceparent
    job = CURRENT_JOB.get()
    carried = "" if job is None else job.trace
    if carried and "@" not in carried:
        return carried
    if "eliot" in sys.modules:
        with FENCE("trace"):
            if place := _read_eliot_context():
                return place
    # A place in an eliot action is of one job: the next one gets its own number below it.
    return f"{carried.rstrip('/')}/{getrandbits(31) + 2}" if carried else ""


def _read_eliot_context() -> str:
    """Return the place in an eliot action. Called only when eliot was imported, so that others do not pay for it."""
    if not _GET_ELIOT_CONTEXT:
        from celery5.logs.log import get_eliot_context

        _GET_ELIOT_CONTEXT.append(get_eliot_context)
    return _GET_ELIOT_CONTEXT[0]()
