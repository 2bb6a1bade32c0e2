"""Binding: a task's function whose first parameter is the running job (C22).

Floor: domain. Reads: which job runs. Writes: nothing.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from celery5.errors import Misconfigured
from celery5.protocol.job import new_id
from celery5.runners.context import CURRENT_JOB, CurrentJob


def bind_running_job(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` as it is called without its first parameter, which is the running job."""
    signature = inspect.signature(function)
    first, *others = signature.parameters.values() or [None]
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise Misconfigured(f"task {name}: bind=True needs a first parameter, for the running job")

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(_running(name), *args, **kwargs)

    async def wait(*args: Any, **kwargs: Any) -> Any:
        return await function(_running(name), *args, **kwargs)

    made: Callable[..., Any] = wait if inspect.iscoroutinefunction(function) else call
    functools.update_wrapper(made, function)
    vars(made)["__signature__"] = signature.replace(parameters=[each for each in others if each])
    annotations = getattr(function, "__annotations__", {})
    made.__annotations__ = {each: what for each, what in annotations.items() if each != first.name}
    return made


def _running(task: str) -> CurrentJob:
    """The running job; where there is none, since the task is called like any function, one that stands for it."""
    return CURRENT_JOB.get() or CurrentJob(new_id(), task, "", 1, "")
