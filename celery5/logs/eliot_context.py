"""Run each job inside an eliot action: the one that it was sent in, or a child of its process's action.

Eliot's messages make a tree, and what code logs belongs to the action that is current where it runs. A job that was
sent inside an action carries its place there in `trace`, so its own action continues that one, in whatever process it
runs.
Any other job gets an action when its code first logs through eliot, or at once where something besides celery5's log
listens to eliot. So whoever does not use eliot pays nothing.

One object, `JobContext`, is current for all jobs of a worker. It looks up the action of the job that runs: to set a
current action for each job would cost 2 µs of each.
"""

import re
from binascii import crc32
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast

import eliot

from celery5.runners.context import CURRENT_JOB, CurrentJob

JOB = "celery5:job"
"""The type of a job's action, and of the message about its end."""
MAX_OPEN_ACTIONS = 10_000
"""The most actions of jobs that have not ended. More are forgotten, the oldest first: their jobs ended elsewhere."""

_PLACE = re.compile(r"[0-9A-Za-z-]{1,64}@(?:/\d{1,10}){0,50}/?")
_MEMBER = "~"
"""A part of the ids of jobs of workflows, which share one trace."""


def is_place(trace: str) -> bool:
    """Return whether a trace is a place in an eliot action: any program may have written it."""
    return "@" in trace and len(trace) <= 700 and _PLACE.fullmatch(trace) is not None


class AttemptFailed(Exception):
    """How an attempt of a job has failed. Eliot wants an exception to end an action with."""


class _Listeners:
    """Stands for a destination of eliot that is not there. Eliot compares it with each that is."""

    def __init__(self) -> None:
        self.found: list[object] = []

    def __eq__(self, other: object) -> bool:
        self.found.append(other)
        return False

    __hash__ = None  # type: ignore[assignment]


def find_listeners() -> list[object]:
    """Return the destinations that eliot has. It has no call for that, but to remove one that it does not have."""
    listeners = _Listeners()
    with suppress(ValueError):
        eliot.remove_destination(cast("Any", listeners))
    return [
        destination for destination in listeners.found if type(destination).__name__ != "BufferingDestination"
    ]


class JobActions:
    """The eliot actions of the jobs that run in one process.

    Args:
        parent: The action of the process.
        worker: The name of the worker, for the fields of an action.
        place: Where the actions continue, in a process of another one; '' where jobs come from Redis.
    """

    def __init__(self, parent: eliot.Action | None, worker: str, place: str = "") -> None:
        self._parent = parent
        self._place = place
        self._worker = worker
        self._open: dict[tuple[str, int], eliot.Action] = {}
        self._context = JobContext(self)

    @property
    def parent(self) -> eliot.Action | None:
        """The action of the process; None where that is another process."""
        return self._parent

    def _reserve(self) -> str:
        """Return a new place in the action of the process."""
        return self._place if self._parent is None else self._parent.serialize_task_id().decode()

    def surround(self) -> AbstractContextManager[Any]:
        """Have what code of jobs logs through eliot belong to its job, in this block."""
        return self._context.context()

    def get(self, job: CurrentJob) -> eliot.Action:
        """Return the action of a job that runs; it begins if it has not."""
        action = self._open.get((job.id, job.attempt))
        return self._begin(job) if action is None else action

    def find(self, job: CurrentJob) -> eliot.Action | None:
        """Return the action of a job, if it has begun."""
        return self._open.get((job.id, job.attempt))

    def begin(self, job: CurrentJob) -> None:
        """Begin the action of a job that was sent inside one, before its code runs."""
        self.get(job)

    def take(self, job: str, attempt: int) -> eliot.Action | None:
        """Return the action of a job that has ended, and forget it; None if it has none."""
        return self._open.pop((job, attempt), None) if self._open else None

    def get_place(self, job: CurrentJob) -> str:
        """Return where another process continues a job's action; without beginning that, if it has not begun."""
        action = self.find(job)
        if action is None and is_place(job.trace):
            action = self._begin(job)
        return self._reserve() if action is None else action.serialize_task_id().decode()

    def _begin(self, job: CurrentJob) -> eliot.Action:
        if len(self._open) >= MAX_OPEN_ACTIONS:
            self._open.pop(next(iter(self._open)), None)
        fields: dict[str, Any] = {"job": job.id, "task": job.task, "worker": job.worker or self._worker}
        action = eliot.Action.continue_task(task_id=self._find_place(job), action_type=JOB, **fields)
        self._open[job.id, job.attempt] = action
        return action

    def _find_place(self, job: CurrentJob) -> str:
        if self._place or not is_place(job.trace):
            return self._reserve()
        if job.attempt == 1 and _MEMBER not in job.id:
            return job.trace
        # Several actions continue in one place: attempts of a job, and the jobs of a run. Each gets a number below it.
        return f"{job.trace.rstrip('/')}/{crc32(f'{job.id} {job.attempt}'.encode()) + 2}"


class JobContext(eliot.Action):
    """The current action wherever code of jobs runs: it stands for the action of the job."""

    def __init__(self, actions: JobActions) -> None:
        self._actions = actions

    def get_place(self) -> str:
        """Return the place that a job that is sent here goes on from; '' if the job here has no action."""
        job = CURRENT_JOB.get()
        if job is None:
            return ""
        action = self._actions.get(job) if is_place(job.trace) else self._actions.find(job)
        return "" if action is None else action.serialize_task_id().decode()

    @property
    def _here(self) -> eliot.Action:
        job = CURRENT_JOB.get()
        if job is not None:
            return self._actions.get(job)
        return self._actions.parent or eliot.start_task(action_type="celery5:box")

    @property
    def task_uuid(self) -> str:
        """The id of the job's tree."""
        return self._here.task_uuid

    def log(self, message_type: str, **fields: Any) -> None:
        """Log a message of the job."""
        self._here.log(message_type, **fields)

    def child(self, logger: Any, action_type: str, serializers: Any = None) -> eliot.Action:
        """Return a new action inside the job's."""
        return self._here.child(logger, action_type, serializers)

    def serialize_task_id(self) -> bytes:
        """Return a new place in the job's action."""
        return self._here.serialize_task_id()

    def add_success_fields(self, **fields: Any) -> None:
        """Add fields to the message that ends the job's action."""
        self._here.add_success_fields(**fields)

    def finish(self, exception: BaseException | None = None) -> None:
        """Do nothing: the job's action ends with the job."""

    # Eliot's older spellings.
    serializeTaskId = serialize_task_id
    addSuccessFields = add_success_fields


def end_action(action: eliot.Action, fields: Mapping[str, Any], error: str) -> None:
    """Log the end of a job, and end its action: as failed if there is an `error`."""
    action.log(JOB, **fields)
    action.finish(AttemptFailed(error) if error else None)


_ADDED: set[Callable[[dict[str, Any]], None]] = set()


@contextmanager
def continued(
    place: str, job: str, attempt: int, send: Callable[[dict[str, Any]], None]
) -> Generator[None, None, None]:
    """Have what a job logs through eliot in this block continue an action of another process.

    Args:
        place: The place in that action.
        job: The id of the job.
        attempt: The number of its attempt.
        send: Takes all messages of this process. The first ones are those from before the first job.
    """
    if send not in _ADDED:
        _ADDED.add(send)
        eliot.add_destinations(send)
    actions = JobActions(None, "", place)
    with actions.surround():
        yield
    action = actions.take(job, attempt)
    if action is not None:
        action.finish()
