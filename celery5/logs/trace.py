"""Trace: the context of a trace, carried along with jobs, so that what belongs together says so in every log (C17).

A producer says it with `tracing`; what runs for a job passes on what came with that; else it is the place in an eliot
action, if the producer is in one. celery5 carries it and makes no spans of its own.
"""

import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from celery5.errors import Misconfigured
from celery5.runners.context import CURRENT_JOB

_SAID: ContextVar[str] = ContextVar("celery5_trace", default="")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ELIOT: list[Callable[[], str]] = []


@contextmanager
def tracing(traceparent: str) -> Generator[None, None, None]:
    """Have the jobs that are sent in the block carry `traceparent`, a W3C trace context: `00-<trace>-<span>-<flags>`.

    Raises Misconfigured for anything else.
    """
    if not _TRACEPARENT.fullmatch(str(traceparent)):
        raise Misconfigured(
            f"tracing({traceparent!r}): give a W3C traceparent, such as "
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        )
    token = _SAID.set(traceparent)
    try:
        yield
    finally:
        _SAID.reset(token)


def get_current_trace() -> str:
    """The context that a job sent now would carry; '' for none."""
    said = _SAID.get()
    if said:
        return said
    job = CURRENT_JOB.get()
    if job is not None and job.trace:
        return job.trace
    return _of_eliot() if "eliot" in sys.modules else ""


def _of_eliot() -> str:
    """Only who has imported eliot can be in an action of it: nobody else pays for it."""
    if not _ELIOT:
        from celery5.logs.log import get_eliot_context

        _ELIOT.append(get_eliot_context)
    return _ELIOT[0]()
