"""Ending: what a task returned or raised, as an outcome."""

import traceback
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from celery5.errors import BrokerLoading, BrokerReadOnly, BrokerUnavailable, CircuitOpen, Reject, Retry
from celery5.protocol.job.arguments import encode_value
from celery5.protocol.job.envelope import Failure
from celery5.protocol.job.retry_policy import LONGEST, RetryPolicy
from celery5.protocol.job.section_rulings import find_strictest, get_leaf_errors
from celery5.protocol.job.verdict import (
    BrokerLost,
    JobRejected,
    PermanentFailure,
    Raised,
    Reason,
    RetryRequested,
    Returned,
)
from celery5.runners.context import CURRENT_JOB

TRACEBACK_LIMIT = 8_000
"""Characters of a traceback that travel with the failure; the end says most."""
TEXT_LIMIT = 2_000
ARGS_LIMIT = 20
"""Arguments of an error that travel with the failure."""

_PACKAGE = Path(__file__).parent.parent
_OURS = tuple(f"{_PACKAGE / room}/" for room in ("runners", "services", "protocol"))
"""The folders of what calls a task."""
_OUTAGES = (BrokerUnavailable, CircuitOpen, BrokerLoading, BrokerReadOnly)


def get_result_outcome(value: Any) -> Returned | PermanentFailure:
    """The outcome of a task that returned `value`: refused when it has no JSON form."""
    try:
        return Returned(encode_value(value))
    except TypeError as error:
        return PermanentFailure(
            Reason.UNENCODABLE_RESULT, Failure(type="TypeError", message=str(error)[:TEXT_LIMIT])
        )


def get_error_outcome(error: BaseException) -> Raised | RetryRequested | JobRejected | BrokerLost:
    """The outcome of a task that raised `error`, alone or in a nursery's group: what the strictest of them asks for,
    see `decisive`. Stranded, to be looked into, when it could not reach a broker and may be run again."""
    found = get_leaf_errors(error, CURRENT_JOB.get())
    leaf = find_strictest(found)
    if isinstance(leaf.error, Retry) and leaf.ruling is None:
        return _asked(error, leaf.error)
    if isinstance(leaf.error, Reject) and leaf.ruling is None:
        return JobRejected(_text(leaf.error) or "its task rejected it")
    kinds = tuple(each.kinds for each in found if each.ruling is None)
    outcome = Raised(make_failure(error), kinds, leaf.ruling)
    poisonous = leaf.ruling is not None and leaf.ruling.reason is Reason.POISONOUS
    return BrokerLost(outcome.failure, outcome) if _is_an_outage(error) and not poisonous else outcome


def _asked(error: BaseException, retry: Retry) -> RetryRequested:
    """Another attempt. When it was asked for because of an error, that is the failure to be remembered."""
    failure = make_failure(error)
    cause = retry.__cause__ or (None if retry.__suppress_context__ else retry.__context__)
    if cause is not None and error is retry:
        why = make_failure(cause)
        failure = Failure(type=why.type, message=why.message, args=why.args, traceback=failure.traceback)
    policy = retry.retry_policy if isinstance(retry.retry_policy, RetryPolicy) else None
    # A class of the user's own may have set anything.
    countdown = retry.countdown if _is_number(retry.countdown, LONGEST) else None
    most = retry.max_retries if _is_number(retry.max_retries, inf) else None
    return RetryRequested(failure, countdown, policy, most)


def _is_number(thing: object, most: float) -> bool:
    return isinstance(thing, int | float) and 0 <= thing <= most


def _is_an_outage(error: Any) -> bool:
    """Whether it is celery5's own word for a broker that cannot be reached, alone or in a nursery's group."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(_is_an_outage(each) for each in group.exceptions)
    return type(error) in _OUTAGES


def make_failure(error: BaseException) -> Failure:
    """An error as text. Never raises, whatever the error's own methods do."""
    return Failure(
        type=type(error).__qualname__,
        message=_text(error),
        args=_arguments(error),
        traceback=_traceback(error)[-TRACEBACK_LIMIT:],
    )


def _arguments(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(_text(each, repr) for each in error.args[:ARGS_LIMIT])
    except Exception:  # a class may have made something else of `args`
        return ()


def _traceback(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(error), error, _of_the_users(error.__traceback__))
        return _encodable("".join(lines))
    except Exception as other:
        return f"<no traceback: {type(other).__name__} while it was made>"


def _of_the_users(steps: TracebackType | None) -> TracebackType | None:
    """A traceback without our own steps at its beginning; whole when there is nothing else."""
    step = steps
    while step is not None and step.tb_frame.f_code.co_filename.startswith(_OURS):
        step = step.tb_next
    return step or steps


def _text(value: object, form: Any = str) -> str:
    try:
        return _encodable(str(form(value))[:TEXT_LIMIT])
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _encodable(text: str) -> str:
    """Half of a surrogate pair, as in the name of a file, has no place in JSON: it is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
