"""celery5: a Trio-native distributed task runtime on Redis Streams.

This package has the names that nearly every application uses. The others are in the package of their subject:
`celery5.limits.Range`, `celery5.scaling.Growth`, `celery5.health.HealthCheck`. `docs/internals.md` has the map.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from celery5.app import App, default_app, event, task
    from celery5.boot_step import BootStep, service
    from celery5.errors import (
        BrokerError,
        BrokerUnavailable,
        CeleryError,
        Misconfigured,
        Reject,
        ResultTimeout,
        Retry,
        SoftTimeLimitExceeded,
        TaskFailed,
        TaskRevoked,
        TimeLimitExceeded,
    )
    from celery5.events.event import Event
    from celery5.events.sources import source
    from celery5.protocol.job.retry_policy import RetryPolicy
    from celery5.protocol.job.states import JobState
    from celery5.protocol.scheduling.declaration import at, cron, every
    from celery5.results.async_result import AsyncResult, agather, arevoke, gather, revoke, wait, wait_async
    from celery5.runners.context import current_job
    from celery5.runners.progress import progress
    from celery5.tasks.sections import optional, poisonous, retry
    from celery5.workflows.compose import Workflow, chain, chord, first, fork, group

__version__ = "0.1.0"

__all__ = [
    "App",
    "AsyncResult",
    "BootStep",
    "BrokerError",
    "BrokerUnavailable",
    "CeleryError",
    "Event",
    "JobState",
    "Misconfigured",
    "Reject",
    "ResultTimeout",
    "Retry",
    "RetryPolicy",
    "SoftTimeLimitExceeded",
    "TaskFailed",
    "TaskRevoked",
    "TimeLimitExceeded",
    "Workflow",
    "agather",
    "arevoke",
    "at",
    "chain",
    "chord",
    "cron",
    "current_job",
    "default_app",
    "event",
    "every",
    "first",
    "fork",
    "gather",
    "group",
    "optional",
    "poisonous",
    "progress",
    "retry",
    "revoke",
    "service",
    "source",
    "task",
    "wait",
    "wait_async",
]

_MODULES = {
    "App": "celery5.app",
    "AsyncResult": "celery5.results.async_result",
    "BootStep": "celery5.boot_step",
    "BrokerError": "celery5.errors",
    "BrokerUnavailable": "celery5.errors",
    "CeleryError": "celery5.errors",
    "Event": "celery5.events.event",
    "JobState": "celery5.protocol.job.states",
    "Misconfigured": "celery5.errors",
    "Reject": "celery5.errors",
    "ResultTimeout": "celery5.errors",
    "Retry": "celery5.errors",
    "RetryPolicy": "celery5.protocol.job.retry_policy",
    "SoftTimeLimitExceeded": "celery5.errors",
    "TaskFailed": "celery5.errors",
    "TaskRevoked": "celery5.errors",
    "TimeLimitExceeded": "celery5.errors",
    "Workflow": "celery5.workflows.compose",
    "agather": "celery5.results.async_result",
    "arevoke": "celery5.results.async_result",
    "at": "celery5.protocol.scheduling.declaration",
    "chain": "celery5.workflows.compose",
    "chord": "celery5.workflows.compose",
    "cron": "celery5.protocol.scheduling.declaration",
    "current_job": "celery5.runners.context",
    "default_app": "celery5.app",
    "event": "celery5.app",
    "every": "celery5.protocol.scheduling.declaration",
    "first": "celery5.workflows.compose",
    "fork": "celery5.workflows.compose",
    "gather": "celery5.results.async_result",
    "group": "celery5.workflows.compose",
    "optional": "celery5.tasks.sections",
    "poisonous": "celery5.tasks.sections",
    "progress": "celery5.runners.progress",
    "retry": "celery5.tasks.sections",
    "revoke": "celery5.results.async_result",
    "service": "celery5.boot_step",
    "source": "celery5.events.sources",
    "task": "celery5.app",
    "wait": "celery5.results.async_result",
    "wait_async": "celery5.results.async_result",
}
"""The module of each name. It is imported when the name is first used."""


class _OldModules:
    """A finder that finds nothing, and raises with a hint for modules of Celery's, such as `celery5.schedules`.

    It is the last of Python's finders, so it runs only for modules that no other finder has found.
    """

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name.startswith("celery5."):
            from celery5.hints import refuse_old_module

            refuse_old_module(name)


sys.meta_path.append(cast("Any", _OldModules))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker knows the names

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        elif name == "errors":  # so that `celery5.errors` works without importing it
            value = import_module("celery5.errors")
        else:
            from celery5.hints import make_import_error

            raise make_import_error(name)
        globals()[name] = value
        return value
