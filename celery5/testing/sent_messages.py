"""What an application has sent, and assertions on it that say what was sent instead."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import msgspec

from celery5.app import App
from celery5.broker.keys import EVENTS
from celery5.events.event import Event, get_event_declaration
from celery5.protocol.counts import format_count
from celery5.protocol.events.messages import EventMessage, parse_event
from celery5.protocol.job.job import Job
from celery5.protocol.job.messages import Command, read_command
from celery5.protocol.shards import get_queue_of_shard
from celery5.tasks.task import Task

SHOWN = 20
"""How many jobs an error names."""


@dataclass(frozen=True)
class SentJob:
    """A job that was sent while `recorded` or `in_memory` was in force."""

    id: str
    # The task's name.
    task: str
    queue: str
    # Its arguments by the names of the parameters, converted as a worker would; defaults are left out.
    arguments: dict[str, Any]
    # Seconds from the sending until it is due, None for at once.
    countdown: float | None
    priority: str
    # The `key` option; '' without one.
    key: str
    # The job itself, as it would have been published.
    job: Job


class SentMessages:
    """What an application has sent. Jobs come in the order in which they were sent, and so do events."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.jobs: list[SentJob] = []
        self.events: list[EventMessage] = []

    def record(self, jobs: Sequence[Job]) -> None:
        """Record these."""
        for job in jobs:
            if job.queue == EVENTS:
                self.events.append(parse_event(job.message))
            else:
                self.jobs.append(make_sent_job(self._app, job))

    def jobs_of(self, task: Task[..., Any]) -> list[SentJob]:
        """Return the jobs of one task."""
        return [job for job in self.jobs if job.task == task.name]

    def events_of(self, kind: Any) -> list[Event]:
        """Return the events of one class, as instances of it."""
        declared = get_event_declaration(kind)
        return [declared.parse_event(event.fields) for event in self.events if event.event == declared.name]

    def clear(self) -> None:
        """Remove all recorded jobs and events."""
        self.jobs.clear()
        self.events.clear()

    def assert_sent(self, what: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first job of a task, or the first event of a class, that was sent with these arguments.

        Args:
            what: The task or the class of the event.
            args: The arguments that are compared, as they are passed to `delay`: those that are left out may be any.
            kwargs: The same, by name.

        Raises:
            AssertionError: There is none. It says what was sent instead.
        """
        found, wanted, others = self._find(what, args, kwargs)
        if not found:
            raise AssertionError(f"{wanted} was not sent; {describe_calls(others, 'sent')}")
        return found[0]

    def assert_not_sent(self, what: Any, *args: Any, **kwargs: Any) -> None:
        """Raise AssertionError if `assert_sent` would not."""
        found, wanted, _ = self._find(what, args, kwargs)
        if found:
            raise AssertionError(f"{wanted} was sent, {count_times(len(found))}")

    def _find(
        self, what: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], str, list[str]]:
        """Return what was sent that fits, what was wanted, and descriptions of all that was sent of that kind."""
        if isinstance(what, Task):
            values = bind_arguments(what.function, args, kwargs)
            sent: list[Any] = self.jobs_of(cast("Any", what))
            name, found = what.name, [job for job in sent if fits(job.arguments, values)]
            others = [
                describe_call(job.task, job.arguments, values if job.task == name else None)
                for job in sort_first(self.jobs, sent)
            ]
        else:
            declared = get_event_declaration(what)
            values = bind_arguments(what, args, kwargs)
            name, instances = declared.name, self.events_of(what)
            found = [event for event in instances if fits(_get_fields(event), values)]
            others = [
                *[describe_call(name, _get_fields(event), values) for event in instances],
                *[event.event for event in self.events if event.event != name],
            ]
        return found, describe_call(name, values), others


def make_sent_job(app: App, job: Job) -> SentJob:
    """Return a job as tests see it."""
    command = read_command(job.message)
    due = None
    if job.at:
        due = int(job.at) / 1000 - (0.0 if job.at.startswith("+") else command.sent)
    arguments = decode_arguments(app, command)
    return SentJob(
        job.id, job.task, get_queue_of_shard(job.queue), arguments, due, command.priority, command.key, job
    )


def decode_arguments(app: App, command: Command) -> dict[str, Any]:
    """Return the arguments of a job by the names of the parameters, converted as a worker would."""
    task = app.tasks[command.task]
    args, kwargs = task.parameters.decode(command.args, command.kwargs)
    return dict(signature(task.function).bind(*args, **kwargs).arguments)


def bind_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments by the names of the parameters. Raises TypeError if the function has no such parameters."""
    return dict(signature(function).bind_partial(*args, **kwargs).arguments)


def fits(arguments: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether arguments have all values that are wanted."""
    return all(name in arguments and arguments[name] == value for name, value in wanted.items())


def describe_call(name: str, arguments: Mapping[str, Any], wanted: Mapping[str, Any] | None = None) -> str:
    """Return a call as it is written in code, and which of its arguments differ from those that are wanted."""
    text = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    different = [
        key for key, value in (wanted or {}).items() if key not in arguments or arguments[key] != value
    ]
    return f"{text}: {', '.join(different)} differs" if different and wanted else text


def describe_calls(calls: Sequence[str], verb: str) -> str:
    """Return what was sent, or what ran, on a line each."""
    if not calls:
        return f"nothing was {verb}" if verb == "sent" else f"nothing {verb}"
    lines = [*calls[:SHOWN], *([f"and {len(calls) - SHOWN} more"] if len(calls) > SHOWN else [])]
    return f"this {'was ' if verb == 'sent' else ''}{verb}:\n  " + "\n  ".join(lines)


def count_times(count: int) -> str:
    """Return how often something happened, in words."""
    return "once" if count == 1 else format_count(count, "time")


def sort_first(jobs: Sequence[Any], first: Sequence[Any]) -> list[Any]:
    """Return jobs, with those first that come nearest to what was wanted."""
    return [*first, *[job for job in jobs if job not in first]]


def _get_fields(event: Any) -> dict[str, Any]:
    """Return the fields of an event by their names."""
    return msgspec.structs.asdict(event)
