"""Store the rows of django-celery-results, as `manage.py dumpdata django_celery_results` prints them, as results.

A file may have millions of rows: it is read piece by piece, and no more than a batch of rows is in memory.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec

from celery5.app import App
from celery5.broker.calls.jobs import store_result
from celery5.broker.calls.queues import register_queue
from celery5.errors import Misconfigured
from celery5.protocol.job.job import to_seconds
from celery5.protocol.job.messages import VERSION, Document, Failure

MAX_ROW = 16 * 1024 * 1024
"""The most characters of one row."""
BATCH = 200
"""Results that are stored in one round trip."""
RESULTS_TTL = 3600.0
"""Seconds for which results are wanted where no application says it: the default of `results_ttl`."""
_CHUNK = 64 * 1024
_BETWEEN_ROWS = re.compile(r"[\s,\[\]]*")
_MODEL = "django_celery_results.taskresult"
_STATES = {"SUCCESS": "SUCCESS", "FAILURE": "DEAD", "REVOKED": "REVOKED"}


class OldResult(msgspec.Struct, frozen=True):
    """A result of Celery's that is still wanted."""

    queue: str
    document: Document
    ttl: float  # seconds that it is kept for


class ResultCounts(msgspec.Struct):
    """How many rows there were."""

    wanted: int = 0  # that can be stored, or are
    known: int = 0  # of these, whose jobs have a result already
    left_out: int = 0


def read_result_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the fields of each row of results, from a list in JSON or from a line of JSON for each row.

    Raises:
        Misconfigured: The file cannot be read, or is no fixture.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            for value in _iterate_values(stream.read, file):
                row = cast("dict[str, object]", value) if isinstance(value, dict) else {}
                fields = row.get("fields")
                if not isinstance(fields, dict):
                    raise Misconfigured(
                        f"{file} has no rows: manage.py dumpdata django_celery_results > {file.name}"
                    )
                if str(row.get("model")).lower() == _MODEL:
                    yield cast("Mapping[str, Any]", fields)
    except OSError as error:
        raise Misconfigured(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Misconfigured(f"{file} is no JSON: {error}") from None


def _iterate_values(read: Callable[[int], str], file: Path) -> Iterator[Any]:
    decoder, text, position, is_end = json.JSONDecoder(), "", 0, False
    while True:
        position = cast("re.Match[str]", _BETWEEN_ROWS.match(text, position)).end()
        if position < len(text):
            try:
                value, position = decoder.raw_decode(text, position)
            except RecursionError:
                raise Misconfigured(f"{file} is no JSON: it is nested too deep") from None
            except ValueError as error:
                if is_end or len(text) - position > MAX_ROW:
                    raise Misconfigured(f"{file} is no JSON: {error}") from None
            else:
                yield value
                continue
        elif is_end:
            return
        rest = text[position:]
        more = read(max(_CHUNK, len(rest)))  # a large row is parsed a few times, not once for each chunk
        text, position, is_end = rest + more, 0, not more


def parse_result_row(app: App | None, row: Mapping[str, Any], now: float) -> OldResult:
    """Return the result of a row. Raises ValueError, with the reason, for one that is not to be stored."""
    status, job, task = str(row.get("status")), row.get("task_id"), str(row.get("task_name") or "")
    if not isinstance(job, str) or not job:
        raise ValueError("it has no task_id")
    if status not in _STATES:
        raise ValueError(f"it is {status}: it has not ended")
    finished = _read_time(row.get("date_done"))
    queue, ttl = _find_place(app, task)
    left = finished + ttl - now
    if left <= 0:
        raise ValueError(f"it ended {now - finished:.0f} s ago, and results are kept for {ttl:.0f} s")
    value = _read_value(row)
    failure = _read_failure(value, row, finished) if status == "FAILURE" else None
    raw = msgspec.Raw(msgspec.json.encode(value if status == "SUCCESS" else None))
    if app is not None and len(raw) > app.settings.message_limit:
        raise ValueError(f"its result of {len(raw)} bytes is over the limit: raise message_limit")
    document = Document(
        v=VERSION,
        id=job,
        task=task,
        state=_STATES[status],
        value=raw,
        failure=failure,
        reason="not-retried" if failure else "",
        worker=str(row.get("worker") or ""),
        finished=finished,
    )
    return OldResult(queue, document, min(left, ttl))


def _find_place(app: App | None, task: str) -> tuple[str, float]:
    """Return the queue where the result of a task is looked for, and how long it is kept."""
    if app is None:
        return "default", RESULTS_TTL
    declared = app.tasks.get(task)
    if declared is None:
        return app.settings.default_queue, app.settings.results_ttl
    return declared.queue, to_seconds(declared.send_options.results_ttl) or app.settings.results_ttl


def _read_time(value: object) -> float:
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"its date_done is {str(value)[:40]!r}, which is no time") from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _read_value(row: Mapping[str, Any]) -> Any:
    """Return the result of a row, whose text is JSON. Nothing is unpickled."""
    kind, text = row.get("content_type"), row.get("result")
    if kind != "application/json":
        raise ValueError(f"its result is {str(kind)[:40]!r}, and only JSON is read")
    try:
        return json.loads(str(text), object_hook=_unwrap) if text is not None else None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("its result is no JSON") from None


def _unwrap(value: dict[str, Any]) -> Any:
    """Return the JSON form of a date, a decimal or a UUID that kombu has marked with its type."""
    if value.keys() != {"__type__", "__value__"}:
        return value
    inner: Any = value["__value__"]
    return inner["hex"] if value["__type__"] == "uuid" else inner


def _read_failure(value: Any, row: Mapping[str, Any], finished: float) -> Failure:
    error = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    message = error.get("exc_message", "")
    parts = cast("list[object]", message) if isinstance(message, list) else [message]
    return Failure(
        type=str(error.get("exc_type") or "Exception"),
        message=", ".join(map(str, parts)),
        traceback=str(row.get("traceback") or ""),
        at=finished,
    )


def import_results(
    app: App | None,
    rows: Iterable[Mapping[str, Any]],
    now: float,
    leave_out: Callable[[str], None],
    *,
    store: bool,
) -> ResultCounts:
    """Store the results of rows that are still wanted, unless their jobs have one; or only count them.

    Args:
        leave_out: Gets a line for each row that is left out.

    Raises:
        Misconfigured: An application must be named to store them.
        BrokerError: A broker cannot be reached.
    """
    if store and app is None:
        raise Misconfigured("which application? write celery5 -A module[:app] migrate --results FILE --store")
    if app is not None:
        app.load()
    counts = ResultCounts()
    wanted = _iterate_wanted(app, rows, now, leave_out, counts)
    for batch in iter(lambda: list(islice(wanted, BATCH)), []):
        counts.wanted += len(batch)
        if store and app is not None:
            counts.known += _store(app, batch)
    return counts


def _iterate_wanted(
    app: App | None,
    rows: Iterable[Mapping[str, Any]],
    now: float,
    leave_out: Callable[[str], None],
    counts: ResultCounts,
) -> Iterator[OldResult]:
    for row in rows:
        try:
            yield parse_result_row(app, row, now)
        except ValueError as error:
            counts.left_out += 1
            leave_out(f"{str(row.get('task_id'))[:100]}: {error}")


def _store(app: App, batch: Sequence[OldResult]) -> int:
    """Store results; return how many jobs had one already."""
    by_broker: dict[str, list[OldResult]] = {}
    for result in batch:
        by_broker.setdefault(app.brokers.broker_of_queue(result.queue), []).append(result)
    known = 0
    for broker, results in by_broker.items():
        redis = app.brokers.get(broker).get_blocking_driver()
        # A result without its task is looked for on the queues that are registered.
        redis.perform_all([register_queue(app.keys, queue) for queue in {result.queue for result in results}])
        calls = [
            store_result(
                app.queue(result.queue), result.document.id, msgspec.json.encode(result.document), result.ttl
            )
            for result in results
        ]
        known += redis.perform_all(calls).count(False)
    return known
