"""Outcomes: whatever a task returns or raises, its outcome is known soon, and what has returned is not run again."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from celery5.errors import Retry
from celery5.protocol.job.tracebacks import format_traceback
from celery5.protocol.job.verdict import PermanentFailure, Reason, RetryRequested, Returned
from celery5.runners.outcome import get_error_outcome, get_result_outcome
from tests.pure.job.hostile_errors import ERRORS
from tests.pure.job.hostile_errors import __file__ as script
from tests.pure.job.repeated_values import VALUES as REPEATED
from tests.pure.job.repeated_values import __file__ as values_script


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_has_no_end_is_an_outcome_in_a_bound_of_time_and_memory(name: str) -> None:
    """In its own process, which its limits end if it does not come to an end."""
    command = [sys.executable, script, name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-500:]
    outcome, error_type, message, traceback = json.loads(ended.stdout)
    assert outcome == ("BrokerLost" if name.startswith("outages") else "Raised")
    assert message
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert f"{error_type}: " in traceback
    assert len(traceback) <= 8_000
    if "group" in name:
        assert "ValueError: " in traceback, "its first members are shown"


@pytest.mark.parametrize("was_raised", [True, False])
def test_the_traceback_of_a_retry_ends_with_the_error_that_it_was_for(was_raised: bool) -> None:
    def charge() -> None:
        error: Exception = LookupError("made")
        try:
            if was_raised:
                raise ConnectionError("busy")
        except ConnectionError as busy:
            error = busy
        raise Retry(countdown=5) from error

    with pytest.raises(Retry) as caught:
        charge()
    outcome = get_error_outcome(caught.value)
    assert isinstance(outcome, RetryRequested)
    traceback = outcome.failure.traceback
    assert "Retry" not in traceback.replace("raise Retry", "")
    assert "in charge" in traceback
    assert traceback.endswith("ConnectionError: busy\n" if was_raised else "LookupError: made\n")


@pytest.mark.parametrize("name", REPEATED)
def test_a_result_that_repeats_its_parts_without_end_is_refused(name: str) -> None:
    """In its own process, which its limits end if it does not come to an end."""
    command = [sys.executable, values_script, name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-500:]
    assert "again and again" in ended.stdout, "the size is known before memory is used up"


def test_a_result_that_shares_parts_within_reason_arrives() -> None:
    row = {"a": [1, 2], "b": "x" * 100}
    assert isinstance(get_result_outcome([row] * 10_000), Returned)
    assert isinstance(get_result_outcome([[n] for n in range(500_000)]), Returned)
    assert isinstance(get_result_outcome([[str(n) * 100] * 10 for n in range(1000)]), Returned)


class CountingDict(dict[str, Any]):
    """It counts how often its values are looked at."""

    looked = 0

    def values(self) -> Any:
        CountingDict.looked += 1
        return super().values()


def test_a_result_that_holds_itself_is_refused_after_few_looks() -> None:
    """Each look costs time in which the interpreter's lock is held: two million of them stopped a worker for 2 s."""
    value = CountingDict(a=1)
    value["itself"] = [value, value]
    CountingDict.looked = 0
    assert isinstance(get_result_outcome(value), PermanentFailure)
    assert 0 < CountingDict.looked < 50_000


class Cause(Exception):
    """An error with a cause of an ordinary kind."""


def test_a_traceback_shows_members_causes_and_contexts_as_python_does() -> None:
    errors = [ValueError("one"), KeyError("two")]
    try:
        try:
            raise ExceptionGroup("several", errors)
        except ExceptionGroup as group:
            raise Cause("because of them") from group
    except Cause as error:
        text = format_traceback(error)
    for part in ("ValueError: one", "KeyError: 'two'", "direct cause", "several (2 sub-exceptions)"):
        assert part in text
    assert text.endswith("Cause: because of them\n")


class SilentAbout:
    """A value that raises an error which is no Exception whenever one of its attributes is read or shown."""

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "names"):
            raise KeyboardInterrupt(name)
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        raise SystemExit("not shown")


class Refusing(dict[str, int]):
    """A dict whose every method ends the process, one would think."""

    def __iter__(self) -> Any:
        raise SystemExit("not iterated")

    __len__ = items = keys = values = __repr__ = __iter__


VALUES: dict[str, Callable[[], Any]] = {
    "not shown": SilentAbout,
    "no class": lambda: SilentAbout("__class__"),
    "nothing": lambda: SilentAbout("__class__", "__dict__", "model_dump", "__attrs_attrs__"),
    "in a list": lambda: [SilentAbout("__class__")],
    "in a dict": lambda: {"key": SilentAbout("__class__")},
    "beside a dict": lambda: [Refusing(), object()],
    "too many digits": lambda: [10**5000, object()],
}


@pytest.mark.parametrize("name", VALUES)
def test_result_whose_methods_raise_does_not_cause_another_attempt(name: str) -> None:
    outcome = get_result_outcome(VALUES[name]())
    assert type(outcome) is PermanentFailure
    assert outcome.reason is Reason.UNENCODABLE_RESULT
    assert "does not run again by itself" in outcome.failure.message


def test_arguments_of_a_large_group_are_shown_without_members() -> None:
    outcome: Any = get_error_outcome(ExceptionGroup("several", [ValueError("one")]))
    assert outcome.failure.args == ("'several'", "[ValueError('one')]")
    outcome = get_error_outcome(ExceptionGroup("several", [ValueError("one")] * 2_000))
    assert outcome.failure.args == ("'several'",)
