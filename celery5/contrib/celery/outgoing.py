"""Tasks that workers of Celery run: a job of ours sends the message, and is tried again until it is sent."""

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, cast

from celery5.app import App
from celery5.contrib.celery.receivers import TIMEOUT, make_celery
from celery5.protocol.job.job import new_id
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.runners.context import current_job
from celery5.tasks.task import Task

SENDING = RetryPolicy(max_retries=100, backoff=1.0, cap=300.0)
"""The default retry policy of sending: attempts for about eight hours."""
_OPTIONS = {
    "confirm_publish": True,
    "max_retries": 1,
    "interval_start": 0.0,
    "socket_connect_timeout": TIMEOUT,
}
"""RabbitMQ confirms each message, and connecting is not tried for ever: the job is tried again."""
P = ParamSpec("P")
R = TypeVar("R")


def celery_task(
    app: App,
    celery: Any,
    *,
    name: str = "",
    celery_queue: str = "",
    retry_policy: RetryPolicy = SENDING,
) -> Callable[[Callable[P, object]], Task[P, str]]:
    """Declare a task that workers of Celery run; the body of the function is never run.

    `delay` sends a job of ours, which a worker of ours runs: it sends the message to Celery, with the job's id. So the
    message is sent at least once, and each time with the same id. The job's result is that id:
    `AsyncResult(id)` of Celery has the result of the task.

    Args:
        app: The application of ours.
        celery: The application of Celery; or the URL of its broker.
        name: The name of the task in Celery; by default that of the function with its module.
        celery_queue: The queue of Celery; by default the one to which its settings route the task.
        retry_policy: For how long sending is tried again while Celery's broker is unreachable.

    Raises:
        Misconfigured: Celery is not installed, or an argument makes no sense.
    """
    old = make_celery(celery, "broker")

    def declare(function: Callable[P, object]) -> Task[P, str]:
        task_name = name or f"{function.__module__}.{function.__name__}"

        @functools.wraps(function)
        def send(*args: P.args, **kwargs: P.kwargs) -> str:
            return _send(old, task_name, args, kwargs, celery_queue)

        send.__annotations__ = {**function.__annotations__, "return": str}
        cast("Any", send).__signature__ = inspect.signature(function).replace(return_annotation=str)
        declared = app.task(name=task_name, retry_policy=retry_policy)(send)
        return cast("Task[P, str]", declared)

    return declare


def _send(celery: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], queue: str) -> str:
    """Send one message, and return its id when the broker has it."""
    job = current_job()
    job_id = job.id if job else new_id()  # the function was called, not sent
    pools: Any = import_module("kombu.pools")
    connection = celery.connection_for_write(
        connect_timeout=TIMEOUT,
        transport_options={**_OPTIONS, **celery.conf.broker_transport_options},
    )
    options = {"queue": queue} if queue else {}
    with pools.producers[connection].acquire(block=True, timeout=TIMEOUT) as producer:
        celery.send_task(name, args, kwargs, task_id=job_id, producer=producer, retry=False, **options)
    return job_id
