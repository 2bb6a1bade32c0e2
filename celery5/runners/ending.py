"""Ending: what a task returned or raised, as an outcome.

Floor: runners. Reads: nothing. Writes: nothing.
"""

import traceback
from typing import Any, cast

from celery5.errors import BrokerLoading, BrokerReadOnly, BrokerUnavailable, CircuitOpen
from celery5.protocol.arguments import encode_value
from celery5.protocol.envelope import Failure
from celery5.protocol.verdict import Interrupted, Raised, Reason, Refused, Returned, Stranded

TRACEBACK_LIMIT = 8_000
"""Characters of a traceback that travel with the failure; the end says most."""
TEXT_LIMIT = 2_000
ARGS_LIMIT = 20
"""Arguments of an error that travel with the failure."""

INTERRUPTED = Interrupted()
_OUTAGES = (BrokerUnavailable, CircuitOpen, BrokerLoading, BrokerReadOnly)


def returned(value: Any) -> Returned | Refused:
    """The outcome of a task that returned `value`: refused when it has no JSON form."""
    try:
        return Returned(encode_value(value))
    except TypeError as error:
        return Refused(Reason.UNENCODABLE_RESULT, Failure(type="TypeError", message=str(error)[:TEXT_LIMIT]))


def raised(error: BaseException) -> Raised | Stranded:
    """The outcome of a task that raised `error`: Stranded, to be looked into, when it could not reach a broker."""
    return Stranded(failure_of(error)) if _is_an_outage(error) else Raised(failure_of(error))


def _is_an_outage(error: Any) -> bool:
    """Whether it is celery5's own word for a broker that cannot be reached, alone or in a nursery's group."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(_is_an_outage(each) for each in group.exceptions)
    return type(error) in _OUTAGES


def failure_of(error: BaseException) -> Failure:
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
        return _encodable("".join(traceback.format_exception(error)))
    except Exception as other:
        return f"<no traceback: {type(other).__name__} while it was made>"


def _text(value: object, form: Any = str) -> str:
    try:
        return _encodable(str(form(value))[:TEXT_LIMIT])
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _encodable(text: str) -> str:
    """Half of a surrogate pair, as in the name of a file, has no place in JSON: it is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
