"""Verdict: one outcome, one verdict."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import RetryPolicy
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.verdict import (
    MAX_SECTIONS,
    POSTPONE_DELAY,
    BrokerLost,
    Complete,
    Expire,
    FailForGood,
    Interrupted,
    JobExpired,
    JobRejected,
    JobRevoked,
    Outcome,
    PermanentFailure,
    Postpone,
    Raised,
    Reason,
    RejectVerdict,
    Release,
    RetryRequested,
    RetryVerdict,
    Returned,
    Revoke,
    Ruling,
    StartMissed,
    judge,
    make_ruling,
)

FAILURE = Failure(type="ValueError", message="no")
attempts = st.integers(1, 100)
policies = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 100),
    backoff=st.floats(0, 1e4),
    cap=st.floats(0, 1e4),
    jitter=st.booleans(),
)
outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Returned, st.binary(max_size=5)),
    st.just(Raised(FAILURE)),
    st.just(BrokerLost(FAILURE)),
    st.just(Interrupted()),
    st.just(StartMissed()),
    st.just(JobExpired()),
    st.builds(PermanentFailure, st.sampled_from(Reason), st.just(FAILURE)),
    st.builds(JobRejected, st.text()),
    st.just(JobRevoked()),
)


@given(outcomes, attempts, policies, st.floats(0, 1, exclude_max=True))
def test_every_outcome_has_its_verdict(
    outcome: Outcome, attempt: int, policy: RetryPolicy, chance: float
) -> None:
    verdict = judge(outcome, attempt=attempt, policy=policy, random=lambda: chance)
    match outcome:
        case Returned(value):
            assert verdict == Complete(value)
        case BrokerLost(failure):
            assert verdict == Postpone(POSTPONE_DELAY, failure)
        case Interrupted() | StartMissed():
            assert verdict == Release()
        case JobExpired():
            assert verdict == Expire()
        case PermanentFailure(reason, failure):
            assert verdict == FailForGood(reason, failure)
        case JobRejected(why):
            assert verdict == RejectVerdict(why)
        case JobRevoked():
            assert verdict == Revoke()
        case Raised(failure) if attempt > policy.max_retries:
            assert verdict == FailForGood(
                Reason.EXHAUSTED if policy.max_retries else Reason.NOT_RETRIED, failure
            )
        case Raised(failure):
            assert verdict == RetryVerdict(policy.delay(attempt, lambda: chance), failure)


@given(st.none() | st.floats(0, 1e4), st.none() | policies, st.none() | st.integers(0, 9), attempts, policies)
def test_requested_retry_follows_the_request_or_else_the_policy(
    countdown: float | None, said: RetryPolicy | None, most: int | None, attempt: int, policy: RetryPolicy
) -> None:
    asked = RetryRequested(FAILURE, countdown, said, most)
    verdict = judge(asked, attempt=attempt, policy=policy, random=lambda: 0.5)
    own = said or policy
    allowed = own.max_retries if most is None else most
    if attempt > allowed:
        assert verdict == FailForGood(Reason.EXHAUSTED if allowed else Reason.NOT_RETRIED, FAILURE)
    else:
        wait = own.delay(attempt, lambda: 0.5) if countdown is None else countdown
        assert verdict == RetryVerdict(wait, FAILURE)


@given(
    st.builds(Ruling, st.just("a"), policies) | st.builds(Ruling, reason=st.sampled_from(Reason)), attempts
)
def test_a_sections_ruling_beats_the_tasks_policy(ruling: Ruling, attempt: int) -> None:
    for policy in (RetryPolicy(max_retries=0), RetryPolicy(max_retries=10**6)):
        verdict = judge(Raised(FAILURE, ruling=ruling), attempt=attempt, policy=policy, random=lambda: 0.5)
        if ruling.reason is not None:
            assert verdict == FailForGood(ruling.reason, FAILURE)
        else:
            assert ruling.policy is not None
            assert verdict == RetryVerdict(ruling.policy.delay(1, lambda: 0.5), FAILURE, "a")


@given(policies.filter(lambda policy: policy.max_retries < 20))
def test_a_job_that_always_fails_runs_once_and_then_max_retries_times(policy: RetryPolicy) -> None:
    attempt = 1
    while isinstance(
        judge(Raised(FAILURE), attempt=attempt, policy=policy, random=lambda: 0.5), RetryVerdict
    ):
        attempt += 1
    assert attempt == policy.max_retries + 1


@given(attempts)
def test_leaving_expiring_and_refusing_never_count_an_attempt(attempt: int) -> None:
    once = RetryPolicy(max_retries=0)
    for outcome in (Interrupted(), StartMissed(), JobExpired(), PermanentFailure(Reason.CORRUPT, FAILURE)):
        verdict = judge(outcome, attempt=attempt, policy=once, random=lambda: 0.0)
        assert not isinstance(verdict, RetryVerdict)
        assert not (isinstance(verdict, FailForGood) and verdict.reason is Reason.EXHAUSTED)
    assert judge(Interrupted(), attempt=attempt, policy=once, random=lambda: 0.0) == Release()


small = st.integers(0, 4)


@given(
    st.dictionaries(st.sampled_from("abc"), small),
    small,
    st.lists(st.sampled_from([*"abc", "", "asked"])),
    st.data(),
)
def test_a_job_never_runs_more_often_than_its_task_and_its_sections_allow(
    limits: dict[str, int], retries: int, fails: list[str], data: Any
) -> None:
    """However its failures are spread over sections of their own counters, the task, and what it asks for."""
    task = RetryPolicy(max_retries=retries, backoff=0)
    counts: Counter[str] = Counter()
    for attempt in range(1, 2 + retries + sum(limits.values()) + 1):
        where = fails.pop() if fails else data.draw(st.sampled_from([*limits, "", "asked"]))
        outcome: Outcome = RetryRequested(FAILURE) if where == "asked" else Raised(FAILURE)
        if where in limits:
            policy = RetryPolicy(max_retries=limits[where], backoff=0)
            outcome = Raised(FAILURE, ruling=make_ruling(where, policy, counts))
        verdict = judge(outcome, attempt=attempt, policy=task, random=lambda: 0.5, sections=counts)
        if isinstance(verdict, FailForGood):
            allowed = limits.get(where, retries)
            assert verdict.reason is (Reason.EXHAUSTED if allowed else Reason.NOT_RETRIED)
            return
        assert isinstance(verdict, RetryVerdict)
        counts.update([verdict.section] if verdict.section else [])
        assert all(counts[name] <= limits[name] for name in counts)
    pytest.fail(f"ran {attempt} times")


def test_retry_section_uses_its_own_policy_for_each_retry() -> None:
    policy = RetryPolicy(max_retries=2, backoff=5, step=5, jitter=False)
    waits = []
    for counts in ({}, {"a": 1, "b": 9}):
        outcome = Raised(FAILURE, ruling=make_ruling("a", policy, counts))
        verdict = judge(outcome, attempt=11, policy=RetryPolicy(), random=lambda: 0.5, sections=counts)
        assert isinstance(verdict, RetryVerdict)
        waits.append((verdict.delay, verdict.section))
    assert waits == [(5, "a"), (10, "a")]
    assert make_ruling("a", policy, {"a": 2}) == Ruling("a", reason=Reason.EXHAUSTED)


def test_the_retries_of_sections_are_not_the_tasks() -> None:
    once = RetryPolicy(max_retries=1, backoff=0)
    for outcome in (Raised(FAILURE), RetryRequested(FAILURE)):
        verdicts = [
            judge(outcome, attempt=attempt, policy=once, random=lambda: 0.5, sections={"a": 5, "b": 2})
            for attempt in (8, 9)
        ]
        assert verdicts == [RetryVerdict(0, FAILURE), FailForGood(Reason.EXHAUSTED, FAILURE)]


def test_so_many_sections_are_counted_and_no_more() -> None:
    policy = RetryPolicy()
    full = {str(number): 1 for number in range(MAX_SECTIONS)}
    assert make_ruling("5", policy, full).policy is policy
    assert make_ruling("new", policy, full).reason is Reason.EXHAUSTED


def test_a_policy_must_cover_every_error_of_a_group() -> None:
    policy = RetryPolicy(autoretry_for=("a.A", "a.B"), dont_autoretry_for=("a.C",))
    verdicts = {
        kinds: type(judge(Raised(FAILURE, kinds), attempt=1, policy=policy, random=lambda: 0.0)).__name__
        for kinds in [(("a.A",),), (("a.A",), ("a.B", "x")), (("a.A",), ("x",)), (("a.A", "a.C"), ("a.B",))]
    }
    assert list(verdicts.values()) == ["RetryVerdict", "RetryVerdict", "FailForGood", "FailForGood"]


def test_custom_backoff_replaces_the_policy_and_counts_from_0() -> None:
    asked: list[int] = []

    def mine(retry: int) -> float | str:
        asked.append(retry)
        return 7.5 if retry else "broken"

    policy = RetryPolicy(max_retries=9, backoff=3, jitter=False)

    def verdict(outcome: Outcome, attempt: int, sections: dict[str, int] | None = None) -> Any:
        return judge(
            outcome, attempt=attempt, policy=policy, random=lambda: 0.5, sections=sections, backoff=mine
        )

    assert verdict(Raised(FAILURE), 1) == RetryVerdict(3, FAILURE, backoff_error="broken")
    assert verdict(Raised(FAILURE), 4, {"a": 2}) == RetryVerdict(7.5, FAILURE)
    assert verdict(RetryRequested(FAILURE), 3) == RetryVerdict(7.5, FAILURE)
    assert asked == [0, 1, 2]
    assert verdict(RetryRequested(FAILURE, countdown=1), 3) == RetryVerdict(1, FAILURE)
    assert verdict(RetryRequested(FAILURE, policy=policy), 2) == RetryVerdict(6, FAILURE)
    assert verdict(Raised(FAILURE, ruling=Ruling("a", policy)), 2) == RetryVerdict(3, FAILURE, "a")
    assert asked == [0, 1, 2]


@pytest.mark.parametrize(
    ("policy", "attempt", "reason"),
    [
        (RetryPolicy(max_retries=0), 1, Reason.NOT_RETRIED),
        (RetryPolicy(max_retries=5, dont_autoretry_for=[LookupError]), 1, Reason.NOT_RETRIED),
        (RetryPolicy(max_retries=5, dont_autoretry_for=[LookupError]), 6, Reason.NOT_RETRIED),
        (RetryPolicy(max_retries=5, autoretry_for=[OSError]), 2, Reason.NOT_RETRIED),
        (RetryPolicy(max_retries=2), 3, Reason.EXHAUSTED),
        (RetryPolicy(max_retries=2, autoretry_for=[LookupError]), 3, Reason.EXHAUSTED),
    ],
    ids=repr,
)
def test_retries_are_exhausted_only_where_there_were_any(
    policy: RetryPolicy, attempt: int, reason: Reason
) -> None:
    raised = Raised(FAILURE, (("builtins.KeyError", "builtins.LookupError", "builtins.Exception"),))
    verdict = judge(raised, attempt=attempt, policy=policy, random=lambda: 0.5)
    assert isinstance(verdict, FailForGood)
    assert verdict.reason is reason


def test_a_section_without_retries_has_none_to_exhaust() -> None:
    assert make_ruling("a", RetryPolicy(max_retries=0), {}).reason is Reason.NOT_RETRIED
