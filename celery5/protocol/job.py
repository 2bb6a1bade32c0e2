"""Job: one Command message that is about to be published, and the options it was given.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from base64 import urlsafe_b64encode
from datetime import datetime, timedelta
from os import urandom
from typing import cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.retry import LONGEST, RetryPolicy


class Job(msgspec.Struct, frozen=True):
    """A job on its way: its message, where to (`queue`), and when (`at`: ms since 1970, `+ms` from now, '' for now)."""

    id: str
    task: str
    queue: str
    message: bytes
    at: str = ""
    ignore_result: bool = False


class Options(msgspec.Struct, frozen=True):
    """How a job is sent. Every field may be given for a task and again for one call.

    `countdown` and `expires` are seconds from the call, or a timedelta; `eta` is an aware datetime.
    """

    queue: str | None = None
    countdown: float | timedelta | None = None
    eta: datetime | None = None
    expires: float | timedelta | datetime | None = None
    ignore_result: bool = False
    max_retries: int | None = None
    backoff: float | None = None
    cap: float | None = None
    jitter: bool | None = None

    def checked(self) -> "Options":
        """Itself. Raises Misconfigured when options contradict each other or make no sense."""
        if self.countdown is not None and self.eta is not None:
            raise Misconfigured("give countdown or eta, not both")
        _check_moment("eta", self.eta)
        _check_span("countdown", self.countdown)
        if isinstance(self.expires, datetime):
            _check_moment("expires", self.expires)
        else:
            _check_span("expires", self.expires)
        if self.queue is not None and not _is_queue_name(self.queue):
            raise Misconfigured(
                f"queue {self.queue!r}: a queue's name is 1 to 200 characters without spaces or braces"
            )
        self.policy(RetryPolicy()).checked()
        return self

    def policy(self, fallback: RetryPolicy) -> RetryPolicy:
        """The retry policy: what is said here, over `fallback`."""
        said = {name: getattr(self, name) for name in ("max_retries", "backoff", "cap", "jitter")}
        given = {name: value for name, value in said.items() if value is not None}
        return msgspec.structs.replace(fallback, **given) if given else fallback

    @property
    def has_policy(self) -> bool:
        """Whether anything about retries is said here."""
        return not (
            self.max_retries is None and self.backoff is None and self.cap is None and self.jitter is None
        )

    def at(self) -> str:
        """When the job may start, as the schedule script reads it; '' for now."""
        if self.eta is not None:
            return str(int(self.eta.timestamp() * 1000))
        if self.countdown is not None:
            return f"+{max(0, int(_seconds(self.countdown) * 1000))}"
        return ""

    def expiry(self, now: float) -> float | None:
        """When the job expires, in seconds since 1970."""
        if self.expires is None:
            return None
        if isinstance(self.expires, datetime):
            return self.expires.timestamp()
        return now + _seconds(self.expires)


def new_id() -> str:
    """A new job id: 22 url-safe characters, as Fennel's (F16). It never begins with `-`, which is for options."""
    made = urlsafe_b64encode(urandom(16))[:22].decode()
    return made if made[0] != "-" else new_id()


def _seconds(span: float | timedelta) -> float:
    return span.total_seconds() if isinstance(span, timedelta) else float(span)


def _check_moment(name: str, moment: object) -> None:
    if moment is None:
        return
    if not isinstance(moment, datetime):
        raise Misconfigured(f"{name} is {moment!r}: give an aware datetime")
    if moment.utcoffset() is None:
        raise Misconfigured(f"{name} {moment} has no time zone: use datetime.now(UTC) or another aware time")


def _check_span(name: str, span: object) -> None:
    if span is None:
        return
    number = isinstance(span, int | float | timedelta) and not isinstance(span, bool)
    if not number or not abs(_seconds(cast("float | timedelta", span))) <= LONGEST:
        raise Misconfigured(f"{name} is {span!r}: give seconds or a timedelta, at most a hundred years")


def _is_queue_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= 200
        and not any(each.isspace() or each in "{}" for each in name)
    )
