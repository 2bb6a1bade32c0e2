"""Answers: what workers answer to `active`, `stats` and `health`, as tables for people.

Floor: cli. Reads: nothing. Writes: nothing.

Answers come from other processes, perhaps of another version: a field that is missing leaves its cell empty.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from celery5.cli.said import format_duration, format_table
from celery5.protocol.recycling import format_mib

Row = dict[str, object]


def active_table(worker: str, answer: Any) -> Iterator[Row]:
    """Yield a row for each running job."""
    for job in _mappings(answer):
        yield {
            "worker": worker,
            "job": job.get("id", ""),
            "task": job.get("task", ""),
            "arguments": job.get("arguments", ""),
            "queue": job.get("queue", ""),
            "attempt": job.get("attempt", ""),
            "for": _span(job.get("seconds")),
        }


def stats_table(worker: str, answer: Any) -> Iterator[Row]:
    """Yield one row."""
    numbers = _mapping(answer)
    memory, process = numbers.get("memory"), _mapping(numbers.get("process"))
    yield {
        "worker": worker,
        "kind": numbers.get("kind", ""),
        "pid": process.get("pid", ""),
        "up": _span(numbers.get("uptime")),
        "jobs": ", ".join(f"{many} {state}" for state, many in _mapping(numbers.get("jobs")).items()),
        "running": numbers.get("running", ""),
        "slots": ", ".join(_slots(_mapping(numbers.get("slots")))),
        "queues": ", ".join(_queues(_mapping(numbers.get("queues")))),
        "memory": format_mib(memory) if isinstance(memory, int) else "",
        "loop lag": _span(numbers.get("loop_lag")),
    }


def health_table(worker: str, answer: Any) -> Iterator[Row]:
    """Yield a row for each check and each circuit breaker."""
    found = _mapping(answer)
    for check in _mappings(found.get("checks")):
        stale = " (stale)" if check.get("is_stale") else ""
        state = f"{check.get('state', '')}{stale}"
        yield {
            "worker": worker,
            "what": "check",
            "name": check.get("check", ""),
            "state": state,
            **_why(check),
        }
    for breaker in _mappings(found.get("breakers")):
        watches = " (only watches)" if breaker.get("mode") == "watch" else ""
        state = f"{breaker.get('state', '')}{watches}"
        yield {
            "worker": worker,
            "what": "breaker",
            "name": breaker.get("of", ""),
            "state": state,
            **_why(breaker),
        }


TABLES: Mapping[str, tuple[Callable[[str, Any], Iterator[Row]], str]] = {
    "active": (active_table, "no job runs"),
    "stats": (stats_table, "nobody has answered"),
    "health": (health_table, "no checks, and no circuit breaker has seen a failure"),
}
"""By the name of the command: the function that makes rows of one worker's answer, and the text when there are none."""


def format_answers(command: str, answers: Iterable[tuple[str, Any]]) -> str:
    """Return one table of what workers have answered to a command of TABLES, each with its name."""
    rows_of, nothing = TABLES[command]
    return format_table([row for worker, answer in answers for row in rows_of(worker, answer)], empty=nothing)


def _why(found: Mapping[str, Any]) -> Row:
    return {"why": found.get("why", "")}


def _slots(slots: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many slots of each kind are taken, and how many there are; kinds without slots are left out."""
    for kind, each in slots.items():
        numbers = _mapping(each)
        if numbers.get("current"):
            yield f"{kind} {numbers.get('executing', 0)}/{numbers['current']}"


def _queues(queues: Mapping[str, Any]) -> Iterator[str]:
    for name, state in queues.items():
        yield name if state == "read" else f"{name} ({state})"


def _span(seconds: object) -> str:
    return format_duration(seconds) if isinstance(seconds, int | float) else ""


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [_mapping(each) for each in cast("list[object]", value)] if isinstance(value, list) else []
