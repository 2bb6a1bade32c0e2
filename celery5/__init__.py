"""celery5: a Trio-native distributed task runtime on Redis Streams.

Floor: the top of `celery5/`. Reads: nothing. Writes: nothing.

General layout, from the ground up:

protocol/   values and decisions, pure: envelope, arguments, states, verdict, retry, prefetch, breaker
broker/     the one room that knows Redis: keys, calls, Lua, connections of three colours, the embedded server
runners/    where user code runs: Trio, asyncio, threads
app, task, result, publisher, connections, settings, log: what application code imports
services/   what lives until it is cancelled; bootsteps/ what must happen before
processes/  one wiring page for each process; cli/ words on a terminal
"""

from typing import TYPE_CHECKING

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
from celery5.health import HealthCheck
from celery5.protocol.box import Box
from celery5.protocol.breaker import BreakerPolicy
from celery5.protocol.budget import Budget, BudgetStrategy, ByLoad, ByMemory, Demand, Growth
from celery5.protocol.dead_letters import DeadJob
from celery5.protocol.job import Job
from celery5.protocol.retry import RetryPolicy
from celery5.protocol.states import JobState
from celery5.protocol.story import JobStory
from celery5.result import AsyncResult, agather, arevoke, await_, gather, revoke, wait
from celery5.runners.context import CurrentJob, current_job
from celery5.sections import optional, poisonous, retry
from celery5.spellings import not_in_celery5
from celery5.task import Signature, Task
from celery5.trace import tracing

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
    "Growth",
    "HealthCheck",
    "Job",
    "JobState",
    "JobStory",
    "MessageTooLarge",
    "Misconfigured",
    "NotReplicated",
    "Reject",
    "ResultTimeout",
    "ResultsDisabled",
    "Retry",
    "RetryPolicy",
    "Signature",
    "SoftTimeLimitExceeded",
    "Task",
    "TaskExpired",
    "TaskFailed",
    "TaskRejected",
    "TaskRevoked",
    "TimeLimitExceeded",
    "UnknownQueue",
    "UnknownTask",
    "agather",
    "arevoke",
    "await_",
    "current_job",
    "default_app",
    "gather",
    "optional",
    "poisonous",
    "retry",
    "revoke",
    "service",
    "task",
    "tracing",
    "wait",
]

if not TYPE_CHECKING:  # a checker knows what is there

    def __getattr__(name: str) -> object:
        raise not_in_celery5(name)
