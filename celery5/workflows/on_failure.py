"""Read `on_failure`: the task, or the call of one, that is called with what has failed."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from celery5.errors import BadArguments, Misconfigured
from celery5.protocol.job.messages import FailureCall
from celery5.protocol.workflows.status import StepFailure
from celery5.workflows.tree import TaskCall

_SAMPLE_FAILURES = msgspec.json.encode([StepFailure(id="run~0", run="run", node=0)])
_FAILURES = object()
"""Stands for the failures in a call that is encoded."""


def read_on_failure(target: Any) -> TaskCall:
    """Return the call that `on_failure` names. The failures are its first argument, unless it has all arguments."""
    tree = getattr(target, "tree", None)
    if isinstance(tree, TaskCall):
        return tree
    takes_failures = bool(target.parameters.signature.parameters)
    return TaskCall(target, (), {}, is_partial=takes_failures)


def refuse_dynamic(what: str, task: Any) -> None:
    """Raise Misconfigured for a task that is dynamic; `what` is the option that names it."""
    if task.send_options.dynamic:
        raise Misconfigured(
            f"{what}={task.name}: that task is dynamic: nothing takes the workflow it returns"
        )


def check_takes_failures(task: Any, args: Sequence[bytes | None], kwargs: Mapping[str, bytes]) -> None:
    """Raise Misconfigured when a task cannot be called with failures: what is None in `args`."""
    raw = [_SAMPLE_FAILURES if value is None else value for value in args]
    named = {name: Raw(value) for name, value in kwargs.items()}
    try:
        task.parameters.decode(Raw(b"[" + b",".join(raw) + b"]"), Raw(msgspec.json.encode(named)))
    except BadArguments as error:
        raise Misconfigured(
            f"on_failure={task.name}: it is called with a list[StepFailure] first: {error}"
        ) from None


def encode_on_failure(target: Any) -> FailureCall:
    """Return the `on_failure` of a job that is in no workflow, as its message has it.

    Raises:
        Misconfigured: The task cannot be called with failures.
        BadArguments: The arguments do not fit the task.
    """
    call = read_on_failure(target)
    task = call.task
    refuse_dynamic("on_failure", task)
    args = (_FAILURES, *call.args) if call.is_partial else call.args
    raw_args, raw_kwargs = task.parameters.encode_values(args, call.kwargs, _is_failures)
    check_takes_failures(task, raw_args, raw_kwargs)
    made: FailureCall = task.make_failure_call(
        raw_args[call.is_partial :], raw_kwargs, takes_failures=call.is_partial
    )
    return made


def _is_failures(value: object) -> bool:
    return value is _FAILURES
