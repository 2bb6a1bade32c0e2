"""celery5: a Trio-native distributed task runtime on Redis Streams.

Floor: the top of `celery5/`. Reads: nothing. Writes: nothing.

General layout, from the ground up:

protocol/   values and decisions, pure: envelope, arguments, states, verdict, retry, prefetch, breaker
broker/     the one room that knows Redis: keys, calls, Lua, connections of three colours, the embedded server
runners/    where user code runs: Trio, asyncio, threads, boxes
*.py        what application code imports, and what that is made of; here by what it is about:

    applications  app brokers connections settings configuration origins strategies include owning spellings
    tasks         task declaring binding sections gate deduplicate
    sending       sending sendable publisher backlog replicas colourless; by way of a daemon:
                  handing publisher_client daemon_line messages_backlog sqlite_backlog
    results       result patience whereabouts overview dead_letters graves emptying
    events        event event_fields events
    documents     sinks file_sink sql_sink sources
    schedules     schedule scheduled periodic triggers fire_times
    limits        limiting suspending
    health        health checks http_check loop machine probe; of a whole installation:
                  doctor broker_checks host_checks
    processes     control keyring own_commands boot_step platform
    logs          log log_lines log_runtime journald stdlib_log trace

services/   what lives until it is cancelled; bootsteps/ what must happen before
processes/  one wiring page for each process; cli/ words on a terminal; testing/ for tests of applications
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from celery5.app import App, default_app, task
    from celery5.boot_step import BootStep, service
    from celery5.errors import (
        BacklogFull,
        BadArguments,
        BadBrokerURL,
        BadResult,
        BlockingInEventLoop,
        BootStepFailed,
        BoxCrashed,
        BrokerDenied,
        BrokerError,
        BrokerTooOld,
        BrokerUnavailable,
        CeleryError,
        CircuitOpen,
        DuplicateTask,
        MessageTooLarge,
        Misconfigured,
        NotReplicated,
        PublisherUnavailable,
        Reject,
        ResultsDisabled,
        ResultTimeout,
        Retry,
        SoftTimeLimitExceeded,
        TaskExpired,
        TaskFailed,
        TaskRejected,
        TaskRevoked,
        TimeLimitExceeded,
        UnknownQueue,
        UnknownTask,
    )
    from celery5.event import Event, event
    from celery5.events import EventState
    from celery5.file_sink import FileSink
    from celery5.health import HealthCheck
    from celery5.periodic import Periodic
    from celery5.protocol.autoscale import Load, Scale
    from celery5.protocol.box import Box
    from celery5.protocol.breaker import BreakerPolicy
    from celery5.protocol.budget import Budget, BudgetStrategy, ByLoad, ByMemory, Demand, Growth
    from celery5.protocol.dead_letters import DeadJob
    from celery5.protocol.documents import ResultDocument, SourceDocument
    from celery5.protocol.job import Job
    from celery5.protocol.limits import Limit, Range, Rate
    from celery5.protocol.retry import RetryPolicy
    from celery5.protocol.schedules import Misfire
    from celery5.protocol.situation import ClusterSnapshot
    from celery5.protocol.states import JobState
    from celery5.protocol.story import JobDetails
    from celery5.result import AsyncResult, agather, arevoke, await_, gather, revoke, wait
    from celery5.runners.context import CurrentJob, current_job
    from celery5.sections import optional, poisonous, retry
    from celery5.sinks import RedisResults, Sink
    from celery5.sources import Emit, Source, source
    from celery5.sql_sink import SQLSink
    from celery5.suspending import TaskResumed, TaskSuspended
    from celery5.task import Signature, Task
    from celery5.trace import tracing
    from celery5.triggers import at, calendar, cron, every

__version__ = "0.1.0"

__all__ = [
    "App",
    "AsyncResult",
    "BacklogFull",
    "BadArguments",
    "BadBrokerURL",
    "BadResult",
    "BlockingInEventLoop",
    "BootStep",
    "BootStepFailed",
    "Box",
    "BoxCrashed",
    "BreakerPolicy",
    "BrokerDenied",
    "BrokerError",
    "BrokerTooOld",
    "BrokerUnavailable",
    "Budget",
    "BudgetStrategy",
    "ByLoad",
    "ByMemory",
    "CeleryError",
    "CircuitOpen",
    "CurrentJob",
    "DeadJob",
    "Demand",
    "DuplicateTask",
    "Emit",
    "Event",
    "EventState",
    "FileSink",
    "Growth",
    "HealthCheck",
    "Job",
    "JobState",
    "JobDetails",
    "Limit",
    "Load",
    "MessageTooLarge",
    "Misconfigured",
    "Misfire",
    "NotReplicated",
    "Periodic",
    "PublisherUnavailable",
    "Range",
    "Rate",
    "RedisResults",
    "Reject",
    "ResultDocument",
    "ResultTimeout",
    "ResultsDisabled",
    "Retry",
    "RetryPolicy",
    "SQLSink",
    "Scale",
    "Signature",
    "Sink",
    "ClusterSnapshot",
    "SoftTimeLimitExceeded",
    "Source",
    "SourceDocument",
    "Task",
    "TaskExpired",
    "TaskFailed",
    "TaskRejected",
    "TaskResumed",
    "TaskRevoked",
    "TaskSuspended",
    "TimeLimitExceeded",
    "UnknownQueue",
    "UnknownTask",
    "agather",
    "arevoke",
    "at",
    "await_",
    "calendar",
    "cron",
    "current_job",
    "default_app",
    "event",
    "every",
    "gather",
    "optional",
    "poisonous",
    "retry",
    "revoke",
    "service",
    "source",
    "task",
    "tracing",
    "wait",
]

_HOMES: Mapping[str, str] = {
    "app": "App default_app task",
    "boot_step": "BootStep service",
    "errors": (
        "BacklogFull BadArguments BadBrokerURL BadResult BlockingInEventLoop BootStepFailed BoxCrashed "
        "BrokerDenied BrokerError BrokerTooOld BrokerUnavailable CeleryError CircuitOpen DuplicateTask "
        "MessageTooLarge Misconfigured NotReplicated PublisherUnavailable Reject ResultsDisabled ResultTimeout Retry "
        "SoftTimeLimitExceeded TaskExpired TaskFailed TaskRejected TaskRevoked TimeLimitExceeded "
        "UnknownQueue UnknownTask"
    ),
    "file_sink": "FileSink",
    "suspending": "TaskResumed TaskSuspended",
    "event": "Event event",
    "events": "EventState",
    "health": "HealthCheck",
    "periodic": "Periodic",
    "protocol.autoscale": "Load Scale",
    "protocol.box": "Box",
    "protocol.breaker": "BreakerPolicy",
    "protocol.budget": "Budget BudgetStrategy ByLoad ByMemory Demand Growth",
    "protocol.dead_letters": "DeadJob",
    "protocol.documents": "ResultDocument SourceDocument",
    "protocol.job": "Job",
    "protocol.limits": "Limit Range Rate",
    "protocol.retry": "RetryPolicy",
    "protocol.schedules": "Misfire",
    "protocol.situation": "ClusterSnapshot",
    "protocol.states": "JobState",
    "protocol.story": "JobDetails",
    "result": "AsyncResult agather arevoke await_ gather revoke wait",
    "runners.context": "CurrentJob current_job",
    "sections": "optional poisonous retry",
    "sinks": "RedisResults Sink",
    "sources": "Emit Source source",
    "sql_sink": "SQLSink",
    "task": "Signature Task",
    "trace": "tracing",
    "triggers": "at calendar cron every",
}
"""In which module each public name is made. It is imported when the name is first asked for: who needs few of them, as
a probe does that is run every few seconds, does not pay for all. A test sees that the three lists agree."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


class _Package(ModuleType):
    """This package: the import system hangs each module that was loaded into it. Where a function has the same name,
    as `task` does, the function is what users mean."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


class _OldModules:
    """The last of Python's finders, so it is asked only for modules that no other has found. It finds none, but says
    what to write instead of `celery5.schedules` and other modules that Celery has."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name.startswith("celery5."):
            from celery5.spellings import refuse_old_module

            refuse_old_module(name)


sys.meta_path.append(cast("Any", _OldModules))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a checker knows what is there

    def __getattr__(name: str) -> object:
        if name in _HOME_OF:
            value = getattr(import_module(f"celery5.{_HOME_OF[name]}"), name)
        elif name in _HOMES:  # `celery5.errors` without an import of its own
            value = import_module(f"celery5.{name}")
        else:
            from celery5.spellings import make_import_error

            raise make_import_error(name)
        globals()[name] = value
        return value
