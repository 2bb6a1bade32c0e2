"""Spellings: what Celery and Fennel call by a name that is not ours, and how it is said here.

Floor: domain. Reads: nothing. Writes: nothing.

Looked into only when a name is not there, so it costs nothing else. The guide's pages "From Celery" and "From Fennel"
have the whole of it; a test sees that what is said here is there, too.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

Thing = Literal["module", "task", "signature", "result", "app", "option", "setting"]

CELERY: Mapping[Thing, Mapping[str, str]] = {
    "module": {
        "Celery": "App",
        "shared_task": "task",
        "group": "app.send_many([...]), then gather(...)",
        "chain": "nothing yet: let a task send the next job",
        "chord": "nothing yet: gather(...), then send the next job",
        "signature": "task.s(...), or app.signature(name, ...)",
        "states": "JobState",
        "current_task": "current_job()",
        "current_app": "task.app, or default_app()",
    },
    "signature": {
        "apply_async": "task.options(countdown=5).s(...), then delay() or app.send_many([...])",
        "set": "task.options(queue=...).s(...)",
        "link": "nothing yet: let the task send the next job",
        "link_error": "nothing yet",
    },
    "task": {
        "apply_async": "task.options(countdown=5).delay(...)",
        "apply": "task(...), which runs the function here",
        "retry": "raise Retry(countdown=5)",
        "request": "current_job()",
        "signature": "task.s(...)",
        "si": "task.s(...)",
        "update_state": "nothing: a job has no states of its own",
    },
    "result": {
        "ready": "wait([result], timeout=0), or result.status()",
        "successful": 'result.status() == "SUCCESS"',
        "failed": 'result.status() == "DEAD"',
        "state": "result.status()",
        "result": "result.get()",
        "traceback": "the traceback of the TaskFailed that get() raises",
        "task_id": "result.id",
        "collect": "result.get()",
    },
    "app": {
        "conf": 'App("shop", concurrency=200), app.configure(...) and app.settings',
        "send_task": "app.signature(name, ...).delay()",
        "autodiscover_tasks": 'App("shop", include=["shop.**.tasks"])',
        "config_from_object": 'App("shop", concurrency=200), or CELERY5_CONCURRENCY=200',
        "AsyncResult": "app.result(id)",
        "worker_main": "celery5 -A shop worker start",
        "add_periodic_task": "app.schedule(task.s(...), when), or @app.task(schedule=...)",
    },
    "option": {
        "acks_late": "nothing: jobs are always acknowledged with their outcome",
        "reject_on_worker_lost": "nothing: a dead worker's jobs are always put back",
        "retry_kwargs": "max_retries and backoff",
        "retry_backoff_max": "cap",
        "retry_jitter": "jitter",
        "default_retry_delay": "backoff, with jitter=False",
        "task_id": "id, or key: one live job of each",
        "rate_limit": "nothing yet",
        "serializer": "nothing: it is always JSON",
        "link": "nothing yet: let the task send the next job",
        "track_started": "nothing: EXECUTING is always known",
    },
    "setting": {
        "backend": "nothing: results are where the jobs are",
        "broker_url": "broker",
        "result_backend": "nothing: results are where the jobs are",
        "result_expires": "results_ttl",
        "task_default_queue": "default_queue",
        "task_ignore_result": "ignore_result",
        "task_time_limit": "time_limit",
        "task_soft_time_limit": "soft_time_limit",
        "task_acks_late": "nothing: jobs are always acknowledged with their outcome",
        "worker_concurrency": "concurrency and cpu_slots",
        "worker_prefetch_multiplier": "nothing: it is learnt",
        "visibility_timeout": "nothing: there is none",
        "broker_transport_options": "nothing: there is no visibility timeout",
        "beat_schedule": "schedules",
    },
}
FENNEL: Mapping[Thing, Mapping[str, str]] = {
    "result": {"uuid": "result.id"},
    "option": {"retries": "max_retries"},
    "setting": {
        "redis_url": "broker",
        "interface": "nothing: delay and adelay are both there",
        "processes": "celery5 worker start --processes 2",
        "default_retries": "retry_policy=RetryPolicy(max_retries=3)",
        "read_timeout": "read_block, in seconds",
        "prefetch_count": "nothing: it is learnt",
        "heartbeat_timeout": "lease",
        "heartbeat_interval": "lease",
        "schedule_interval": "nothing: Redis says when a job is due",
        "maintenance_interval": "lease",
        "task_timeout": "result.get(timeout=10), or time_limit",
        "results_enabled": "ignore_result",
        "log_level": "celery5 worker start --log-level info",
        "autodiscover": 'include=["shop.**.tasks"]',
    },
}


def hint(thing: Thing, name: str) -> str:
    """What to write instead of `name`, as the end of a message; '' when it is nobody's name."""
    for whose, names in (("Celery", CELERY), ("Fennel", FENNEL)):
        ours = names.get(thing, {}).get(name)
        if ours:
            return f'; for {whose}\'s {name} there is {ours} (guide: "From {whose}")'
    return ""


def not_there(thing: Thing, of: Any, name: str) -> AttributeError:
    """The error of an attribute that is not there."""
    kind = type(of).__name__
    return AttributeError(f"{kind!r} object has no attribute {name!r}{hint(thing, name)}", name=name, obj=of)


def not_in_celery5(name: str) -> Exception:
    """The error of a name that celery5 does not have. `from celery5 import` shows the text of an ImportError only."""
    said = f"module 'celery5' has no attribute {name!r}{hint('module', name)}"
    return ImportError(said, name="celery5") if hint("module", name) else AttributeError(said, name=name)


class NoCanvas:
    """What a signature is of Celery's canvas: nothing yet, and whoever tries is told what there is instead."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a checker knows what is there

        def __getattr__(self, name: str) -> Any:
            raise not_there("signature", self, name)

        def __or__(self, _other: object) -> Any:
            raise TypeError(f"signatures make no chains{hint('module', 'chain')}")

        def __call__(self, *_args: object, **_kwargs: object) -> Any:
            raise TypeError("a signature is sent, not called: write .delay(), or app.send_many([...])")
