"""Select jobs by what is asked for, and say where a search goes on."""

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from hashlib import sha256
from heapq import nlargest
from typing import Any, cast, get_args

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.bounded_decoding import decode_msgpack
from celery5.protocol.job.history import CUT, JobOrder, JobRecord
from celery5.protocol.job.states import JobState
from celery5.protocol.shards import get_queue_of_shard
from celery5.similar_names import find_similar

Moment = float | datetime
"""Seconds since 1970, or a datetime with a zone."""
ArgumentFilter = str | Mapping[str, object]
"""Arguments by path: `{"order.id": 7}` or `"order.id=7"`."""

MAX_LIMIT = 1000
"""Jobs on one page."""
_WILDCARDS = frozenset("*?[")


class ArgumentMatch(msgspec.Struct, frozen=True):
    """A value that an argument, or a part of one, must have."""

    path: tuple[str, ...]
    wanted: Any
    # The value as it was written; '' where it was no text.
    text: str = ""

    def matches(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether arguments have the value. A text that was shortened is compared as far as it goes."""
        found: Any = arguments
        for name in self.path:
            if isinstance(found, Mapping):
                mapping = cast("Mapping[str, Any]", found)
                if name not in mapping:
                    return False
                found = mapping[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(cast("list[Any]", found)):
                found = cast("list[Any]", found)[int(name)]
            else:
                return False
        if isinstance(found, str):
            wanted = self.wanted if isinstance(self.wanted, str) else self.text
            return found == wanted or (found.endswith(CUT) and wanted.startswith(found[:-1]))
        return (type(found) is type(self.wanted) and bool(found == self.wanted)) or _is_same(
            found, self.wanted
        )


def _is_same(found: Any, wanted: Any) -> bool:
    """Return whether two numbers are equal; True is not 1."""
    is_number = [isinstance(value, int | float) and not isinstance(value, bool) for value in (found, wanted)]
    return all(is_number) and found == wanted


class JobQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What jobs are asked for; what is empty is not compared."""

    id: str = ""
    # With wildcards: `shop.*`.
    task: str = ""
    queue: str = ""
    state: JobState | None = None
    # The class of the error, with wildcards, or a part of its message.
    error: str = ""
    # With wildcards; without them a name stands for all incarnations of its worker, too.
    worker: str = ""
    arguments: tuple[ArgumentMatch, ...] = ()
    # Seconds since 1970.
    since: float = 0.0
    until: float = math.inf
    # Seconds; 0 for jobs that have not run, too.
    longer_than: float = 0.0
    # `ran` leaves out jobs that have not run.
    sort: JobOrder = "time"

    @property
    def needs_run(self) -> bool:
        """Whether only jobs that run, or have run, are asked for."""
        return self.longer_than > 0 or self.sort == "ran"

    def arrange(self, jobs: Iterable[JobRecord], limit: int) -> tuple[JobRecord, ...]:
        """Return at most `limit` jobs in the order that is asked for.

        By time the newest come first, and below them jobs that wait for a time, the soonest first.
        """
        if self.sort == "ran":
            return tuple(nlargest(limit, jobs, key=lambda job: job.ran or 0.0))
        return tuple(sorted(jobs, key=lambda job: (job.due > 0, job.due or -job.at))[:limit])

    def matches(self, record: JobRecord, arguments: Mapping[str, Any] | None = None) -> bool:
        """Return whether a job is asked for.

        Args:
            record: The job.
            arguments: Its arguments, where they are known as a whole; default: those of the record.
        """
        return (
            (not self.id or record.id == self.id)
            and (not self.queue or self.queue in (record.queue, get_queue_of_shard(record.queue)))
            and (self.state is None or record.state == self.state.value)
            and (not self.task or fnmatchcase(record.task, self.task))
            and (not self.worker or self._has_worker(record))
            and (not self.error or self._has_error(record))
            and self.since <= record.at <= self.until
            and (not self.needs_run or (record.ran is not None and record.ran >= self.longer_than))
            and all(
                argument.matches(record.arguments if arguments is None else arguments)
                for argument in self.arguments
            )
        )

    def _has_worker(self, record: JobRecord) -> bool:
        # Records have the name of an incarnation, `NAME:WORD`; `controller status` and `--name` say NAME.
        if _WILDCARDS & set(self.worker):
            return fnmatchcase(record.worker, self.worker)
        return f"{record.worker}:".startswith(f"{self.worker}:")

    def _has_error(self, record: JobRecord) -> bool:
        name = record.error_type
        return bool(record.error) and (
            fnmatchcase(name, self.error)
            or fnmatchcase(name.rpartition(".")[2], self.error)
            or self.error in record.error_message
        )

    @property
    def needles(self) -> tuple[bytes, ...]:
        """Texts of which each stands in every packed record that is asked for: so most need not be unpacked."""
        plain = [self.id, self.queue, self.state.value if self.state else ""]
        plain += [text for text in (self.task, self.worker) if not _WILDCARDS & set(text)]
        return tuple(text.encode() for text in plain if text)

    @property
    def digest(self) -> str:
        """A text that tells this query from others, for a cursor.

        Its times are left out: a span until now has others on the next page.
        """
        timeless = msgspec.structs.replace(self, since=0.0, until=math.inf)
        return sha256(msgspec.json.encode(timeless, order="deterministic")).hexdigest()[:8]


class SearchPosition(msgspec.Struct, frozen=True, array_like=True):
    """The last job that a search has looked at."""

    # The query, see `JobQuery.digest`.
    query: str
    # Which kind of place is read, the queue, and the job there.
    stage: int
    queue: str
    place: str
    # How many jobs of this place were looked at.
    looked_at: int = 0
    # The oldest dead job that was looked at, of each queue that has more of them.
    dead_ends: dict[str, str] = {}

    def encode(self) -> str:
        """Return the cursor."""
        return urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


def read_cursor(cursor: str, query: JobQuery) -> SearchPosition:
    """Return the position of a cursor. Raises Misconfigured for one of another search."""
    try:
        raw = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        position = decode_msgpack(raw, SearchPosition)
    except ValueError:
        raise Misconfigured(f"cursor is {cursor!r}: give the cursor of the page before") from None
    if position.query != query.digest:
        raise Misconfigured("this cursor is of another search: give the same filters as for the page before")
    return position


def make_job_query(
    *,
    id: str = "",  # noqa: A002  the job's own word
    task: str = "",
    queue: str = "",
    state: str = "",
    error: str = "",
    worker: str = "",
    argument: ArgumentFilter = "",
    since: Moment | None = None,
    until: Moment | None = None,
    longer_than: float | None = None,
    sort: JobOrder = "time",
) -> JobQuery:
    """Return the query with these conditions. Raises Misconfigured for what makes no sense."""
    texts = {"id": id, "task": task, "queue": queue, "error": error, "worker": worker}
    for name, text in texts.items():
        if not isinstance(cast("object", text), str):
            raise Misconfigured(f"{name} is {text!r}: give a text")
    return JobQuery(
        **texts,
        state=_read_state(state),
        arguments=_read_arguments(argument),
        since=0.0 if since is None else _read_moment("since", since),
        until=math.inf if until is None else _read_moment("until", until),
        longer_than=0.0 if longer_than is None else _read_span("longer_than", longer_than),
        sort=_read_order(sort),
    )


def check_limit(limit: object) -> int:
    """Return the number of jobs on a page. Raises Misconfigured."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
        raise Misconfigured(f"limit is {limit!r}: give 1 to {MAX_LIMIT}")
    return limit


OTHER_STATE_WORDS = {
    **dict.fromkeys(("RUNNING", "RUN", "STARTED", "ACTIVE", "PROCESSING"), "EXECUTING"),
    **dict.fromkeys(("PENDING", "WAITING", "QUEUED", "READY", "RECEIVED"), "SENT"),
    **dict.fromkeys(("FAILED", "FAILURE", "ERROR", "DEAD-LETTER"), "DEAD"),
    **dict.fromkeys(("SUCCEEDED", "SUCCESSFUL", "DONE", "COMPLETED", "FINISHED", "OK"), "SUCCESS"),
    **dict.fromkeys(("CANCELLED", "CANCELED", "ABORTED"), "REVOKED"),
    **dict.fromkeys(("DELAYED", "ETA", "DEFERRED"), "SCHEDULED"),
}
"""What others call states, and the state that is meant."""


def _read_state(state: str) -> JobState | None:
    if not state:
        return None
    name = str(state).upper()
    known = [known_state.value for known_state in JobState if known_state is not JobState.UNKNOWN]
    if name not in known:
        meant = OTHER_STATE_WORDS.get(name) or find_similar(name, known)
        hint = f"did you mean {meant!r}? The states" if meant else "the states"
        raise Misconfigured(f"no state {state!r}; {hint} are {', '.join(known)}")
    return JobState(name)


def _read_order(sort: JobOrder) -> JobOrder:
    orders = get_args(JobOrder)
    if sort not in orders:
        raise Misconfigured(f"sort is {sort!r}: give {' or '.join(orders)}")
    return sort


def _read_span(name: str, seconds: float) -> float:
    is_number = isinstance(cast("object", seconds), int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < math.inf:
        raise Misconfigured(f"{name} is {seconds!r}: give seconds, 0 or more")
    return float(seconds)


def _read_moment(name: str, moment: Moment) -> float:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise Misconfigured(f"{name} is {moment!r}: give a datetime with a zone")
        return moment.timestamp()
    is_number = isinstance(cast("object", moment), int | float) and not isinstance(moment, bool)
    if not is_number or not 0 <= moment < math.inf:
        raise Misconfigured(f"{name} is {moment!r}: give a datetime, or seconds since 1970")
    return float(moment)


def _read_arguments(argument: ArgumentFilter) -> tuple[ArgumentMatch, ...]:
    if isinstance(argument, str):
        return (_read_argument(argument),) if argument else ()
    if not isinstance(cast("object", argument), Mapping):
        raise Misconfigured(f"argument is {argument!r}: give PATH=VALUE, or a dictionary")
    matches: list[ArgumentMatch] = []
    for path, wanted in argument.items():
        try:
            plain = msgspec.json.decode(msgspec.json.encode(wanted, enc_hook=str))
        except (TypeError, ValueError, RecursionError):
            raise Misconfigured(f"argument {path!r} is {wanted!r}: give a value with a JSON form") from None
        matches.append(ArgumentMatch(tuple(path.split(".")), plain, plain if isinstance(plain, str) else ""))
    return tuple(matches)


def _read_argument(text: str) -> ArgumentMatch:
    path, equals, value = text.partition("=")
    if not path or not equals:
        raise Misconfigured(f"argument is {text!r}: give PATH=VALUE, such as order.id=7")
    try:
        wanted = msgspec.json.decode(value)
    except (ValueError, RecursionError):
        wanted = value
    return ArgumentMatch(tuple(path.split(".")), wanted, value)
