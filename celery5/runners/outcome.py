"""Outcomes: what a task returned or raised, as a value."""

from math import inf
from pathlib import Path
from types import CoroutineType, TracebackType
from typing import Any

from msgspec.structs import replace

from celery5.errors import (
    ASKED_FOR,
    BrokerLoading,
    BrokerReadOnly,
    BrokerUnavailable,
    CircuitOpen,
    Reject,
    Retry,
)
from celery5.protocol.job.arguments import encode_value
from celery5.protocol.job.json_values import REPETITION, SHORT
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.retry_policy import LONGEST, RetryPolicy
from celery5.protocol.job.tracebacks import can_show_others, format_traceback, get_traceback
from celery5.protocol.job.verdict import (
    BrokerLost,
    JobRejected,
    PermanentFailure,
    Raised,
    Reason,
    RetryRequested,
    Returned,
    find_strictest,
    get_leaf_errors,
    iterate_leaves,
)
from celery5.protocol.masking import MAX_ERROR_TYPE, describe_error, get_type_name, mask_passwords
from celery5.protocol.names import get_qualified_name
from celery5.runners.context import CURRENT_JOB, JOB_ERRORS

TRACEBACK_LIMIT = 8_000
"""Characters of a traceback that are kept with the failure: the last ones."""
TEXT_LIMIT = 2_000
"""Characters of a message that are kept with the failure."""
RESULT_LIMIT = 300
"""Characters of a result that cannot be encoded that are kept with the failure."""
ARGS_LIMIT = 20
"""Arguments of an error that are kept with the failure."""

NOT_AWAITED = (
    "the task has returned a coroutine that nobody awaits, so it has done nothing: its function is async behind a "
    "plain wrapper; write the wrapper as async def, so that it is called in an event loop"
)
_PACKAGE = Path(__file__).parent.parent
_CALLER_FOLDERS = tuple(f"{_PACKAGE / layer}/" for layer in ("runners", "services", "protocol", "tasks"))
"""Folders of the code that calls a task: left out of tracebacks."""
_OUTAGES = (BrokerUnavailable, CircuitOpen, BrokerLoading, BrokerReadOnly)


def get_result_outcome(value: Any) -> Returned | PermanentFailure:
    """Return the outcome of a task that returned `value`.

    Without a JSON form that is a failure, which says what was returned. Whatever error the value's own methods raise:
    the work is done, so this is no error of an attempt, which would run it again. A coroutine has done nothing yet: its
    function looks like a plain one, so it was called in a thread. It is not awaited here, since nobody says in which
    event loop it would run.
    """
    if type(value) is CoroutineType:  # asked of its class: it may answer anything itself
        value.close()
        return PermanentFailure(Reason.UNENCODABLE_RESULT, Failure(type="TypeError", message=NOT_AWAITED))
    try:
        return Returned(encode_value(value))
    except BaseException as error:
        is_plain = type(error) is TypeError
        why = _get_text(error) if is_plain else f"a result cannot be encoded: {describe_error(error)}"
        # As a dataclass it would show its parts again and again, too.
        form = object.__repr__ if REPETITION in why else SHORT.repr
        shown = mask_passwords(_get_text(value, form)[:RESULT_LIMIT])
        text = f"{_escape_surrogates(why)}; the task has returned {shown}, and does not run again by itself"
        return PermanentFailure(
            Reason.UNENCODABLE_RESULT, Failure(type="TypeError", message=text[:TEXT_LIMIT])
        )


def get_error_outcome(error: BaseException) -> Raised | RetryRequested | JobRejected | BrokerLost:
    """Return the outcome of a task that raised `error`, which may be an exception group. Never raises.

    The strictest error of a group decides, see `find_strictest`. BrokerLost if a broker could not be reached.
    """
    observer = JOB_ERRORS.get()
    if observer is not None:
        cause = _find_cause(error)
        observer.note_error(error if cause is None else cause)
    try:
        return _get_error_outcome(error)
    except BaseException:  # the error's class, or a metaclass of it, is hostile
        return Raised(Failure(type=_get_class_name(error), message="<an error that cannot be examined>"))


def _get_error_outcome(error: BaseException) -> Raised | RetryRequested | JobRejected | BrokerLost:
    leaves = get_leaf_errors(error, CURRENT_JOB.get())
    leaf = find_strictest(leaves)
    if isinstance(leaf.error, Retry) and leaf.ruling is None:
        return _make_retry_request(error, leaf.error)
    if isinstance(leaf.error, Reject) and leaf.ruling is None:
        return JobRejected(_get_text(leaf.error) or "its task rejected it")
    kinds = tuple(error_leaf.kinds for error_leaf in leaves if error_leaf.ruling is None)
    outcome = Raised(make_failure(error), kinds, leaf.ruling)
    is_poisonous = leaf.ruling is not None and leaf.ruling.reason is Reason.POISONOUS
    return BrokerLost(outcome.failure, outcome) if _is_outage(error) and not is_poisonous else outcome


def _make_retry_request(error: BaseException, retry: Retry) -> RetryRequested:
    """Return the request for another attempt. The error that caused it, if any, is the failure that is kept."""
    cause = _find_cause(error)
    failure = make_failure(error) if cause is None else _make_cause_failure(error, cause)
    policy = retry.retry_policy if isinstance(retry.retry_policy, RetryPolicy) else None
    # A subclass in user code may have set anything.
    countdown = retry.countdown if _is_number(retry.countdown, LONGEST) else None
    max_retries = retry.max_retries if _is_number(retry.max_retries, inf) else None
    return RetryRequested(failure, countdown, policy, max_retries)


def _make_cause_failure(error: BaseException, cause: BaseException) -> Failure:
    """Return the failure to store for a retry with a cause. Its traceback ends with the cause."""
    # A cause that was never raised has no traceback: show where the retry was requested.
    text = _format_traceback(cause, get_traceback(cause) or get_traceback(error))
    message = _get_text(error)
    why = "" if message == ASKED_FOR else f"celery5.errors.Retry: {message}\n\nIt was for this error:\n\n"
    return replace(make_failure(cause), traceback=why + text)


def _find_cause(error: BaseException) -> BaseException | None:
    """Return the error for which a retry was requested, by `exc=` or by handling it; None for any other error."""
    if not issubclass(type(error), Retry):
        return None
    if error.__cause__ is None and not error.__suppress_context__:
        return error.__context__
    return error.__cause__


def _is_number(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and 0 <= value <= limit


def _is_outage(error: BaseException) -> bool:
    """Return whether this is an error of celery5 for an unreachable broker, or a group of such errors."""
    return all(type(leaf) in _OUTAGES for leaf in iterate_leaves(error))


def make_failure(error: BaseException) -> Failure:
    """Return an error as text. Never raises, whatever the error's own methods do."""
    return Failure(
        type=_get_class_name(error),
        message=_get_text(error),
        args=_get_arguments(error),
        traceback=_format_traceback(error, get_traceback(error)),
    )


def _format_traceback(error: BaseException, steps: TracebackType | None) -> str:
    return format_traceback(error, _skip_callers(steps))[-TRACEBACK_LIMIT:]


def _get_class_name(error: BaseException) -> str:
    return _escape_surrogates(get_qualified_name(error))[:MAX_ERROR_TYPE]


def _get_arguments(error: BaseException) -> tuple[str, ...]:
    try:
        # The first of a group is its message; to show the second is to show all its members.
        count = ARGS_LIMIT if can_show_others(error) else 1
        return tuple(_get_text(arg, repr) for arg in error.args[:count])
    except BaseException:  # a class may have redefined `args`
        return ()


def _skip_callers(steps: TracebackType | None) -> TracebackType | None:
    """Return a traceback without our own frames at its beginning; all of it if there are no others."""
    step = steps
    while step is not None and step.tb_frame.f_code.co_filename.startswith(_CALLER_FOLDERS):
        step = step.tb_next
    return step or steps


def _get_text(value: object, form: Any = str) -> str:
    try:
        return _escape_surrogates(str(form(value))[:TEXT_LIMIT])
    except BaseException:
        return f"<{get_type_name(value)} that cannot be shown>"


def _escape_surrogates(text: str) -> str:
    """Return the text with lone surrogates escaped, which file names may contain and JSON may not."""
    return text.encode("utf-8", "backslashreplace").decode()
