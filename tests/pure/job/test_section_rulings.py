"""Rulings: what sections say of an error stays with it, whatever it is and wherever it goes."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from celery5 import Misconfigured, RetryPolicy
from celery5.errors import BrokerUnavailable, Reject, Retry
from celery5.protocol.job.verdict import (
    BrokerLost,
    JobRejected,
    Raised,
    Reason,
    RetryRequested,
    Ruling,
    find_strictest,
    get_leaf_errors,
    get_ruling,
    set_ruling,
)
from celery5.protocol.names import get_class_names
from celery5.runners.context import CURRENT_JOB, CurrentJob
from celery5.runners.outcome import get_error_outcome

POISONOUS = Ruling(reason=Reason.POISONOUS)
USED_UP = Ruling("a", reason=Reason.EXHAUSTED)
AGAIN = Ruling("a", RetryPolicy())


class Slotted(Exception):
    """An error that has no place for more, one would think."""

    __slots__ = ()


@dataclass(frozen=True)
class Frozen(Exception):
    """An error that refuses to be changed."""

    code: int = 5


class Hostile(Exception):
    """An error that answers anything, and has an opinion on what is equal to it."""

    def __getattr__(self, name: str) -> Any:
        return f"no {name}"

    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError("hands off")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("incomparable")

    __hash__ = Exception.__hash__


def group(*errors: BaseException) -> BaseExceptionGroup[BaseException]:
    """Errors as a nursery raises them."""
    return BaseExceptionGroup("several", errors)


@pytest.mark.parametrize(
    "error",
    [ValueError(), Slotted(), Frozen(), Hostile(), KeyboardInterrupt()],
    ids=lambda e: type(e).__name__,
)
def test_any_error_keeps_what_was_said_of_it_for_each_run_by_itself(error: BaseException) -> None:
    run, other = object(), object()
    assert get_ruling(error, run) is None
    set_ruling(error, run, AGAIN)
    set_ruling(error, other, POISONOUS)
    set_ruling(error, run, USED_UP)
    assert (get_ruling(error, run), get_ruling(error, other), get_ruling(error, None)) == (
        USED_UP,
        POISONOUS,
        None,
    )


def test_one_object_that_is_raised_for_ever_does_not_grow() -> None:
    error = ValueError()
    for _ in range(2000):
        set_ruling(error, object(), AGAIN)
    assert sum(len(value) for value in vars(error).values()) <= 1000


def test_shared_exception_keeps_its_details_for_each_job() -> None:
    error, runs = ValueError(), [object() for _ in range(500)]
    for run in runs:
        set_ruling(error, run, POISONOUS)
    assert [get_ruling(error, run) for run in runs] == [POISONOUS] * 500


def test_groups_are_looked_through_in_order_however_deep() -> None:
    errors = [ValueError(), KeyError(), SystemExit(), OSError()]
    deep: BaseException = group(errors[2], errors[3])
    for _ in range(5000):
        deep = group(deep)
    set_ruling(errors[1], None, AGAIN)
    found = get_leaf_errors(group(errors[0], group(errors[1]), deep), None)
    assert [leaf.error for leaf in found] == errors
    assert [leaf.ruling for leaf in found] == [None, AGAIN, None, None]
    assert found[0].kinds[:2] == ("builtins.ValueError", "builtins.Exception")
    assert "builtins.BaseExceptionGroup" in found[3].kinds
    assert get_leaf_errors(errors[0], None)[0].kinds == get_class_names(errors[0])


def test_what_ends_a_job_beats_what_tries_it_again() -> None:
    plain, first, second, third = ValueError("plain"), ValueError("1"), ValueError("2"), ValueError("3")
    set_ruling(first, None, POISONOUS)
    set_ruling(second, None, USED_UP)
    set_ruling(third, None, AGAIN)
    lenient = [third, plain, Retry(), Reject(), second, first]
    for strictest in range(len(lenient)):
        errors = lenient[: strictest + 1]
        assert find_strictest(get_leaf_errors(group(*errors), None)).error is errors[-1]
        assert find_strictest(get_leaf_errors(group(*reversed(errors)), None)).error is errors[-1]


def test_the_outcome_is_what_the_strictest_error_asks_for() -> None:
    job = CurrentJob("id", "task", "queue", 1, "worker")
    token = CURRENT_JOB.set(job)
    try:
        again, used_up, poisonous, stranger = (ValueError(str(number)) for number in range(4))
        set_ruling(again, job, AGAIN)
        set_ruling(used_up, job, USED_UP)
        set_ruling(poisonous, job, POISONOUS)
        set_ruling(stranger, object(), POISONOUS)
        assert shown(get_error_outcome(again)) == AGAIN
        assert shown(get_error_outcome(group(again, again))) == AGAIN
        assert shown(get_error_outcome(group(again, KeyError()))) is None, "one that no section has spoken of"
        assert shown(get_error_outcome(group(again, used_up))) == USED_UP
        assert shown(get_error_outcome(group(used_up, Reject(), poisonous))) == POISONOUS
        assert shown(get_error_outcome(stranger)) is None, "that was another run"
        outcome = get_error_outcome(group(again, KeyError(), stranger))
        assert isinstance(outcome, Raised)
        assert [kinds[0] for kinds in outcome.kinds] == ["builtins.KeyError", "builtins.ValueError"]
        assert outcome.failure.type == "ExceptionGroup"
        assert isinstance(get_error_outcome(group(again, Reject("why"))), JobRejected)
        assert isinstance(get_error_outcome(group(KeyError(), Retry())), RetryRequested)
        assert get_error_outcome(Reject("")) == JobRejected("its task rejected it")
    finally:
        CURRENT_JOB.reset(token)


def shown(outcome: Any) -> Ruling | None:
    """The ruling of a task that raised."""
    assert isinstance(outcome, Raised)
    return outcome.ruling


def test_broker_outage_is_judged_as_such_unless_a_section_is_poisonous() -> None:
    error = BrokerUnavailable("away")
    set_ruling(error, None, AGAIN)
    outcome = get_error_outcome(error)
    assert isinstance(outcome, BrokerLost)
    assert shown(outcome.raised) == AGAIN
    set_ruling(error, None, POISONOUS)
    assert shown(get_error_outcome(error)) == POISONOUS


class Odd(Retry):
    """A user's own, that makes nothing of what it is given."""

    def __init__(self, **said: Any) -> None:
        vars(self).update(said)


@pytest.mark.parametrize(
    "said",
    [{}, {"countdown": "soon", "max_retries": "many", "retry_policy": 5}, {"countdown": float("nan")}],
    ids=str,
)
def test_a_retry_of_ones_own_that_makes_no_sense_is_one_that_says_nothing(said: dict[str, Any]) -> None:
    asked = get_error_outcome(Odd(**said))
    assert isinstance(asked, RetryRequested)
    assert (asked.countdown, asked.policy, asked.max_retries) == (None, None, None)


@pytest.mark.parametrize(
    "said",
    [
        {"countdown": -1},
        {"countdown": "1"},
        {"countdown": float("inf")},
        {"max_retries": -1},
        {"max_retries": 1.5},
    ],
    ids=str,
)
def test_a_retry_that_makes_no_sense_cannot_be_made(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(Misconfigured, match=f"^{name} is "):
        Retry(**said)
    assert Retry(countdown=timedelta(minutes=1), max_retries=0).countdown == 60


def test_a_retry_remembers_the_failure_that_it_was_raised_for() -> None:
    def remembered(cause: BaseException | None, context: BaseException | None, hidden: bool) -> str:
        retry = Retry("later")
        retry.__cause__, retry.__context__, retry.__suppress_context__ = cause, context, hidden
        asked = get_error_outcome(retry)
        assert isinstance(asked, RetryRequested)
        assert "Retry: later" in asked.failure.traceback
        return asked.failure.message

    cause, context = KeyError("cause"), OSError("context")
    assert remembered(None, None, False) == "later"
    assert remembered(None, context, False) == "context"
    assert remembered(None, context, True) == "later", "raise Retry() from None"
    assert remembered(cause, context, True) == "'cause'"
