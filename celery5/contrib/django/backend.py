"""The backend for Django's own tasks (`django.tasks`, from Django 6): their functions run as jobs of celery5."""

# Django 6 alone has these modules, and needs Python 3.12:
# pyright: reportMissingModuleSource=false

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django.apps import apps
from django.core import checks
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import DEFAULT_TASK_QUEUE_NAME, TaskContext, TaskError, TaskResult, TaskResultStatus
from django.tasks.exceptions import TaskResultDoesNotExist
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json
from django.utils.module_loading import import_string

from celery5.app import App
from celery5.contrib.django.application import get_app
from celery5.errors import Misconfigured
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobDetails
from celery5.runners.context import CurrentJob, current_job
from celery5.tasks.task import Task

_READY = frozenset({JobState.SENT, JobState.SCHEDULED, JobState.HELD, JobState.RETRY})


class Celery5Backend(BaseTaskBackend):
    """Sends Django's tasks as jobs of the project's application, in which each has a task of its own.

    `def` functions run in threads, `async def` ones on asyncio. `OPTIONS` of the backend are options of `@app.task`
    that all of its tasks get, such as `max_retries`: without them the application's policy holds.
    """

    supports_defer: bool = True
    supports_async_task: bool = True
    supports_get_result: bool = True
    supports_priority: bool = True

    def validate_task(self, task: Any) -> None:
        """Check a task that is declared, or copied with other options, and declare it for celery5."""
        super().validate_task(task)
        if apps.ready:
            self.declare(task)
        else:
            _DECLARED_EARLY.append((self, task))

    def declare(self, task: Any) -> Task[..., Any]:
        """Return the task of celery5 that runs one of Django's. Raises Misconfigured for a wrong entry in OPTIONS."""
        app = get_app()
        if task.module_path not in app.tasks:
            for name in _SET_BY_DJANGO & self.options.keys():
                raise Misconfigured(
                    f"TASKS[{self.alias!r}]: OPTIONS has {name!r}, which each task of Django has"
                )
            options: dict[str, Any] = {
                "name": task.module_path,
                "queue": _get_queue(app, task),
                **self.options,
            }
            if inspect.iscoroutinefunction(task.func):
                options["loop"] = "asyncio"
            app.task(**options)(_make_function(self, task))
        return app.tasks[task.module_path]

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Send a job; return its result, which has not arrived."""
        self.validate_task(task)
        app, declared = get_app(), self.declare(task)
        options: dict[str, Any] = {"queue": _get_queue(app, task), "priority": _get_priority(task.priority)}
        if task.run_after is not None:
            is_aware = timezone.is_aware(task.run_after)
            options["eta"] = task.run_after if is_aware else timezone.make_aware(task.run_after)
        job = declared.options(**options).job(*normalize_json(list(args)), **normalize_json(dict(kwargs)))
        app.dispatch((job,))
        result = self._make_result(
            task, job.id, TaskResultStatus.READY, args, kwargs, enqueued_at=timezone.now()
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return what is known of a job.

        The arguments of a job that has succeeded are not kept, and are empty then.

        Raises:
            TaskResultDoesNotExist: There is no such job, its result has expired, or it is not one of Django's tasks.
        """
        details = get_app().find(result_id)
        status = None if details is None else _get_status(details)
        if details is None or status is None:
            raise TaskResultDoesNotExist(result_id)
        try:
            task = import_string(details.task)
        except ImportError:
            task = None
        if not isinstance(task, self.task_class):
            raise TaskResultDoesNotExist(result_id)
        has_run = status is not TaskResultStatus.READY or details.attempt > 1
        attempts = details.attempt - (details.state is JobState.RETRY) if has_run else 0
        result = self._make_result(
            task,
            result_id,
            status,
            details.args or [],
            details.kwargs or {},
            enqueued_at=_to_moment(details.sent),
            started_at=_to_moment(details.started or details.taken) if has_run else None,
            finished_at=_to_moment(details.finished) if details.has_ended else None,
            errors=_make_errors(details),
            worker_ids=[details.worker or "unknown"] * attempts,
        )
        if details.has_result:
            object.__setattr__(result, "_return_value", details.value)
        return result

    def check(self, **kwargs: Any) -> Any:
        """Return an error for a project whose INSTALLED_APPS have no celery5."""
        if apps.is_installed("celery5.contrib.django"):
            return super().check(**kwargs)
        return [
            checks.Error(
                f"TASKS[{self.alias!r}] needs celery5.contrib.django in INSTALLED_APPS", id="celery5.E001"
            )
        ]

    def make_context(self, task: Any, job: CurrentJob, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the context of a task that runs."""
        result = self._make_result(
            task,
            job.id,
            TaskResultStatus.RUNNING,
            args,
            kwargs,
            started_at=timezone.now(),
            worker_ids=[job.worker] * job.attempt,
        )
        return TaskContext(task_result=result)

    def _make_result(
        self,
        task: Any,
        job_id: str,
        status: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        **fields: Any,
    ) -> Any:
        values: dict[str, Any] = {
            "enqueued_at": None,
            "started_at": None,
            "finished_at": None,
            "errors": [],
            "worker_ids": [],
            **fields,
        }
        return TaskResult(
            task=task,
            id=job_id,
            status=status,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            last_attempted_at=values["started_at"],
            **values,
        )


_SET_BY_DJANGO = frozenset({"name", "queue", "priority", "eta", "countdown", "loop", "bind"})
_DECLARED_EARLY: list[tuple[Celery5Backend, Any]] = []
"""Tasks of modules that were imported before the apps were ready."""


def declare_early_tasks() -> None:
    """Declare what was imported before the application was there. `Celery5Config.ready` calls it."""
    while _DECLARED_EARLY:
        backend, task = _DECLARED_EARLY.pop()
        backend.declare(task)


def _make_function(backend: Celery5Backend, task: Any) -> Callable[..., Any]:
    """Return the function of the task of celery5: it calls that of Django's task, and sends Django's signals."""

    def begin(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
        job = current_job() or CurrentJob("", task.module_path, "", 1, "")
        context = backend.make_context(task, job, args, kwargs)
        return context.task_result, [context, *args] if task.takes_context else args

    def end(result: Any, error: BaseException | None, value: Any = None) -> Any:
        status = TaskResultStatus.SUCCESSFUL if error is None else TaskResultStatus.FAILED
        for name, changed in (("status", status), ("finished_at", timezone.now()), ("_return_value", value)):
            object.__setattr__(result, name, changed)
        return result

    def run(*args: Any, **kwargs: Any) -> Any:
        result, words = begin(args, kwargs)
        task_started.send(type(backend), task_result=result)
        try:
            value = normalize_json(task.func(*words, **kwargs))
        except Exception as error:
            task_finished.send(type(backend), task_result=end(result, error))
            raise
        task_finished.send(type(backend), task_result=end(result, None, value))
        return value

    async def run_async(*args: Any, **kwargs: Any) -> Any:
        result, words = begin(args, kwargs)
        await task_started.asend(type(backend), task_result=result)
        try:
            value = normalize_json(await task.func(*words, **kwargs))
        except Exception as error:
            await task_finished.asend(type(backend), task_result=end(result, error))
            raise
        await task_finished.asend(type(backend), task_result=end(result, None, value))
        return value

    function: Callable[..., Any] = run_async if inspect.iscoroutinefunction(task.func) else run
    function.__module__, function.__doc__ = task.func.__module__, task.func.__doc__
    return function


def _get_queue(app: App, task: Any) -> str:
    """Return the queue of a task; Django's default one is that of the application."""
    return app.settings.default_queue if task.queue_name == DEFAULT_TASK_QUEUE_NAME else str(task.queue_name)


def _get_priority(number: int) -> str:
    """Return the priority for one of Django's numbers, from -100 to 100."""
    return "normal" if number == 0 else "high" if number > 0 else "low"


def _get_status(details: JobDetails) -> Any:
    """Return Django's status of a job; None when nothing is known of it."""
    if details.state is JobState.UNKNOWN:
        return None
    if details.state is JobState.EXECUTING:
        return TaskResultStatus.RUNNING
    if details.state is JobState.SUCCESS:
        return TaskResultStatus.SUCCESSFUL
    return TaskResultStatus.READY if details.state in _READY else TaskResultStatus.FAILED


def _make_errors(details: JobDetails) -> list[Any]:
    """Return the errors of a job's failed attempts, the first one first."""
    failures = list(details.failures)
    if details.failure is not None and details.failure not in failures:
        failures.append(details.failure)
    return [
        TaskError(exception_class_path=_find_class_path(failure), traceback=failure.traceback)
        for failure in failures
    ]


def _find_class_path(failure: Failure) -> str:
    """Return the full name of an error's class: a failure has the short one, and the traceback ends with the full."""
    full_names = re.findall(rf"(?m)^((?:\w+\.)*{re.escape(failure.type)})(?::|$)", failure.traceback)
    path = full_names[-1] if full_names else failure.type
    return path if "." in path else f"builtins.{path}"


def _to_moment(seconds: float) -> datetime | None:
    """Return seconds since 1970 as Django's settings want a time; None for 0, which is unknown."""
    if not seconds:
        return None
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment if timezone.now().tzinfo else timezone.make_naive(moment)
