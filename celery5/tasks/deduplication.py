"""Run a task's `deduplicate` policy, which decides on the worker whether a job is still wanted."""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.job.verdict import JobRejected, Outcome, Returned

DeduplicationPolicy = Callable[..., Any]
"""A function with the task's parameters. If it returns true, or a text with the reason, the job ends as REJECTED."""

DEFAULT_REASON = "its deduplicate policy says that it is not wanted"
"""The reason for a policy that returns none."""
MAX_REASON = 2_000
"""Characters of a reason that are kept."""
_WANTED = b'""'


def prepare_policy(
    policy: DeduplicationPolicy, function: Callable[..., Any], task: str
) -> DeduplicationPolicy:
    """Return the policy as a function that returns a text, empty for a job that is wanted.

    Raises Misconfigured for a policy that is async where its task is not, or the reverse, or has other parameters.
    """
    if not callable(policy):
        raise Misconfigured(f"task {task}: deduplicate is {policy!r}: give a function")
    refuse_injected(policy, f"task {task}: deduplicate")
    is_async = inspect.iscoroutinefunction(function)
    if inspect.iscoroutinefunction(policy) is not is_async:
        wanted = "async def, as the task is" if is_async else "a plain def, as the task is"
        raise Misconfigured(f"task {task}: its deduplicate policy must be {wanted}")
    if not _takes_the_same(policy, function):
        raise Misconfigured(
            f"task {task}: its deduplicate policy takes {inspect.signature(policy)}; "
            f"it must take the task's own parameters, {inspect.signature(function)}, or (*args, **kwargs)"
        )
    return _awaiting(policy) if is_async else _calling(policy)


def get_rejection(answer: Outcome) -> Outcome | None:
    """Return what the policy's `answer` means for the job: None if it is wanted. An error is a failed attempt."""
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
        # It is stored and shown, and may be of a subclass, or have halves of surrogate pairs.
        return str.__getitem__(answer, slice(MAX_REASON)).encode(errors="backslashreplace").decode()
    return DEFAULT_REASON if answer else ""


def _takes_the_same(policy: DeduplicationPolicy, function: Callable[..., Any]) -> bool:
    parameters = _shape(policy)
    takes_anything = [kind for _, kind, _ in parameters] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]
    return takes_anything or parameters == _shape(function)


def _shape(function: Callable[..., Any]) -> list[tuple[str, object, bool]]:
    """Return name, kind and whether there is a default, for each parameter."""
    return [
        (name, parameter.kind, parameter.default is not inspect.Parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
    ]
