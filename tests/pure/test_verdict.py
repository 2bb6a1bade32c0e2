"""Verdict: one outcome, one verdict.

Floor: tests. Reads: nothing. Writes: nothing.
"""

from hypothesis import given
from hypothesis import strategies as st

from celery5 import RetryPolicy
from celery5.protocol.envelope import Failure
from celery5.protocol.verdict import (
    PAUSE,
    Bury,
    Complete,
    Expire,
    Interrupted,
    Lapsed,
    Outcome,
    Postpone,
    Raised,
    Reason,
    Refused,
    Release,
    Retry,
    Returned,
    Stranded,
    judge,
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
    st.just(Stranded(FAILURE)),
    st.just(Interrupted()),
    st.just(Lapsed()),
    st.builds(Refused, st.sampled_from(Reason), st.just(FAILURE)),
)


@given(outcomes, attempts, policies, st.floats(0, 1, exclude_max=True))
def test_every_outcome_has_its_verdict(
    outcome: Outcome, attempt: int, policy: RetryPolicy, chance: float
) -> None:
    verdict = judge(outcome, attempt=attempt, policy=policy, random=lambda: chance)
    match outcome:
        case Returned(value):
            assert verdict == Complete(value)
        case Stranded(failure):
            assert verdict == Postpone(PAUSE, failure)
        case Interrupted():
            assert verdict == Release()
        case Lapsed():
            assert verdict == Expire()
        case Refused(reason, failure):
            assert verdict == Bury(reason, failure)
        case Raised(failure) if attempt > policy.max_retries:
            assert verdict == Bury(Reason.EXHAUSTED, failure)
        case Raised(failure):
            assert verdict == Retry(policy.delay(attempt, lambda: chance), failure)


@given(policies.filter(lambda policy: policy.max_retries < 20))
def test_a_job_that_always_fails_runs_once_and_then_max_retries_times(policy: RetryPolicy) -> None:
    attempt = 1
    while isinstance(judge(Raised(FAILURE), attempt=attempt, policy=policy, random=lambda: 0.5), Retry):
        attempt += 1
    assert attempt == policy.max_retries + 1


@given(attempts)
def test_leaving_expiring_and_refusing_never_count_an_attempt(attempt: int) -> None:
    once = RetryPolicy(max_retries=0)
    for outcome in (Interrupted(), Lapsed(), Refused(Reason.CORRUPT, FAILURE)):
        verdict = judge(outcome, attempt=attempt, policy=once, random=lambda: 0.0)
        assert not isinstance(verdict, Retry)
        assert not (isinstance(verdict, Bury) and verdict.reason is Reason.EXHAUSTED)
