"""Errors that are expensive or hostile, for `test_outcomes.py`: run with a name it prints the outcome of one."""

import inspect
import json
import resource
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from celery5.errors import BrokerUnavailable
from celery5.runners.outcome import get_error_outcome


def _make_class(parent: type[Exception], **attributes: Any) -> Any:
    """Return a class of errors that has redefined what type checkers let nobody redefine."""
    return type("Hostile", (parent,), attributes)


def _get_endless_traceback(_error: object) -> Any:
    step = SimpleNamespace(tb_frame=inspect.currentframe(), tb_lineno=1, tb_lasti=0)
    step.tb_next = step
    return step


def _get_another_context(error: Any, name: str) -> Any:
    return (
        EverAnotherContext("the context")
        if name == "__context__"
        else Exception.__getattribute__(error, name)
    )


ContainsItself: Any = _make_class(ExceptionGroup, exceptions=property(lambda self: (self,)))
EverAnotherCause: Any = _make_class(
    Exception, __cause__=property(lambda _self: EverAnotherCause("the cause"))
)
EverAnotherContext: Any = _make_class(Exception, __getattribute__=_get_another_context)
EndlessTraceback: Any = _make_class(Exception, __traceback__=property(_get_endless_traceback))


def _double(error: Exception) -> Exception:
    for _ in range(40):
        error = ExceptionGroup("twice the same", [error, error])
    return error


def _nest(error: Exception) -> Exception:
    for _ in range(100_000):
        error = ExceptionGroup("deeper", [error])
    return error


def _chain() -> Exception:
    error = ValueError("the first")
    for number in range(50_000):
        last = ValueError(f"number {number}")
        last.__cause__ = error
        error = last
    return error


def _annotate() -> Exception:
    error, note = ValueError("the leaf"), "x" * 1_000_000
    for _ in range(3_000):  # they are one text in memory
        error.add_note(note)
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "groups named twice": lambda: _double(ValueError("the leaf")),
    "outages named twice": lambda: _double(BrokerUnavailable("the leaf")),
    "groups nested deeply": lambda: _nest(ValueError("the leaf")),
    "a group of many": lambda: ExceptionGroup("many", [ValueError(f"number {n}") for n in range(100_000)]),
    "a group in itself": lambda: ContainsItself("itself", [ValueError("the leaf")]),
    "a long chain": _chain,
    "long notes": _annotate,
    "ever another cause": lambda: EverAnotherCause("at the top"),
    "ever another context": lambda: EverAnotherContext("at the top"),
    "an endless traceback": lambda: EndlessTraceback("at the top"),
}


def _tell() -> Iterator[str]:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    try:
        raise ERRORS[sys.argv[1]]()
    except BaseException as error:
        outcome: Any = get_error_outcome(error)
    failure = outcome.failure
    yield json.dumps([type(outcome).__name__, failure.type, failure.message, failure.traceback])


if __name__ == "__main__":
    sys.stdout.writelines(_tell())
