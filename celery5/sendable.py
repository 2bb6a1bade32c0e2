"""Sendable: what an application may send, and what is said to those who give it anything else.

Floor: domain. Reads: the tasks that an application includes, for another one's job. Writes: nothing.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery5.errors import Misconfigured
from celery5.owning import find_tasks
from celery5.protocol.job import Job
from celery5.result import AsyncResult
from celery5.task import Signature, Task

if TYPE_CHECKING:
    from celery5.app import App

R = TypeVar("R")


def check_signatures(given: Iterable[Signature[R]]) -> list[Signature[R]]:
    """The signatures that `send_many` is given. Raises TypeError for anything else."""
    listed = _listed(given, "send_many", "task.s(...)")
    for each in listed:
        if type(each) is not Signature:
            raise TypeError(
                f"send_many takes signatures, got {_shown(each)}: {_instead(each, 'task.s(...)')}"
            )
    return listed


def check_jobs(given: Iterable[Job]) -> list[Job]:
    """The jobs that `send_jobs` is given. Raises TypeError for anything else."""
    listed = _listed(given, "send_jobs", "task.job(...)")
    for each in listed:
        if type(each) is not Job:
            raise TypeError(f"send_jobs takes jobs, got {_shown(each)}: {_instead(each, 'task.job(...)')}")
    return listed


def check_job_id(given: str) -> str:
    """The id that `result` and `find` are given. Raises TypeError for anything else."""
    if not isinstance(cast("object", given), str):
        raise TypeError(f"a job's id is a text, got {_shown(given)}")
    return given


def check_tasks_declared(app: "App", jobs: list[Job]) -> list[Job]:
    """The jobs, all of which are of tasks that `app` has. Raises Misconfigured for another application's: it would go
    to a queue whose workers do not know its task."""
    for job in jobs:
        if job.app != app.name and job.app and not _has(app, job.task):
            raise Misconfigured(
                f"task {job.task} is of application {job.app!r}, not of {app.name!r}: send it there, or declare it "
                f"with celery5.task and include its module in {app.name!r}"
            )
    return jobs


def _has(app: "App", name: str) -> bool:
    """Whether a task is declared in `app`, or is a free one that it includes and another application found first."""
    app.load()
    return name in app.tasks or any(task.had_no_app and task.name == name for task in find_tasks(app))


def _listed(given: Any, what: str, wanted: str) -> list[Any]:
    if type(given) is list:
        return cast("list[Any]", given)
    if not isinstance(given, Iterable) or isinstance(given, Job | str | bytes):
        raise TypeError(f"{what} takes a list, got {_shown(given)}: write {what}([{wanted}])")
    return list(cast("Iterable[Any]", given))


def _instead(thing: object, wanted: str) -> str:
    if isinstance(thing, AsyncResult):
        return f"it was sent already; write {wanted}, not delay"
    if isinstance(thing, Job):
        return "send it with send_jobs"
    if isinstance(thing, Signature):
        return "send it with send_many"
    if isinstance(thing, bytes):
        return "make it a job with Job.from_bytes(...)"
    return f"write {wanted}"


def _shown(thing: Any) -> str:
    return (
        "a signature"
        if isinstance(thing, Signature)
        else "a task"
        if isinstance(thing, Task)
        else repr(thing)[:80]
    )
