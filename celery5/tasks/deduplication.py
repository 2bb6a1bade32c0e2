"""Deduplicate: a task's policy that says, on the worker, whether a job is still wanted."""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.verdict import JobRejected, Outcome, Returned

DeduplicationPolicy = Callable[..., Any]
"""A function with the task's own parameters: true, or a text that says why, ends the job as REJECTED."""

DEFAULT_REASON = "its deduplicate policy says that it is not wanted"
"""The reason of a policy that gave none."""
_WANTED = b'""'


def prepare_policy(
    policy: DeduplicationPolicy, function: Callable[..., Any], task: str
) -> DeduplicationPolicy:
    """The policy as it is run: it gives a text, empty for a job that is wanted.

    Raises Misconfigured, at declaration, for a policy of another colour than the task or with other parameters.
    """
    if not callable(policy):
        raise Misconfigured(f"task {task}: deduplicate is {policy!r}: give a function")
    colour = inspect.iscoroutinefunction(function)
    if inspect.iscoroutinefunction(policy) is not colour:
        wanted = "async def, as the task is" if colour else "a plain def, as the task is"
        raise Misconfigured(f"task {task}: its deduplicate policy must be {wanted}")
    if not _takes_the_same(policy, function):
        raise Misconfigured(
            f"task {task}: its deduplicate policy takes {inspect.signature(policy)}; "
            f"it must take the task's own parameters, {inspect.signature(function)}, or (*args, **kwargs)"
        )
    return _awaiting(policy) if colour else _calling(policy)


def get_rejection(answer: Outcome) -> Outcome | None:
    """What the policy's `answer` means for the job: None when it is wanted. One that failed is a failed attempt."""
    if type(answer) is not Returned:
        return answer
    return None if answer.value == _WANTED else JobRejected(msgspec.json.decode(answer.value, type=str))


def _awaiting(policy: DeduplicationPolicy) -> DeduplicationPolicy:
    async def deduplicate(*args: Any, **kwargs: Any) -> str:
        return _why(await policy(*args, **kwargs))

    return deduplicate


def _calling(policy: DeduplicationPolicy) -> DeduplicationPolicy:
    def deduplicate(*args: Any, **kwargs: Any) -> str:
        return _why(policy(*args, **kwargs))

    return deduplicate


def _why(answer: object) -> str:
    if isinstance(answer, str):
        return answer
    return DEFAULT_REASON if answer else ""


def _takes_the_same(policy: DeduplicationPolicy, function: Callable[..., Any]) -> bool:
    shape = _shape(policy)
    anything = [kind for _, kind, _ in shape] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]
    return anything or shape == _shape(function)


def _shape(function: Callable[..., Any]) -> list[tuple[str, object, bool]]:
    """Name, kind and whether there is a default, of each parameter."""
    return [
        (name, each.kind, each.default is not inspect.Parameter.empty)
        for name, each in inspect.signature(function).parameters.items()
    ]
