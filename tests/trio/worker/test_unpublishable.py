"""Unpublishable, alone: what has begun here and what sleeps when the worker stops, and what was sent already."""

from collections.abc import Iterator

import pytest
from trio.testing import MockClock

from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery, Settlement, make_settlement
from celery5.protocol.job.messages import Command, Failure, encode, read_command
from celery5.protocol.job.retry_policy import (
    UnpublishableChoice,
    UnpublishableFallback,
    UnpublishableRetry,
)
from celery5.protocol.job.verdict import Complete, RetryVerdict
from celery5.services.job.internal_queues import InternalResultsQueue, InternalTasksQueue
from celery5.services.worker.result_publisher import UnpublishableRetries
from tests.redis.worker.workers import Lines


class Worker:
    """The queues of a worker, and what sorts its retries out."""

    def __init__(self, how: UnpublishableChoice | UnpublishableFallback, log: Log) -> None:
        self.tasks = InternalTasksQueue()
        self.results = InternalResultsQueue()
        self.unpublishable = UnpublishableRetries(
            when_unpublishable=how,
            queues={"trio": self.tasks},
            results=self.results,
            log=log,
            worker="w",
            results_ttl=60.0,
        )

    def retry(self, delay: float, job: str = "a") -> tuple[Delivery, Settlement]:
        """The outcome of a job's first attempt, to be tried again."""
        command = Command(v=1, id=job, task="t")
        delivery = Delivery("q", job.encode(), encode(command), command=command, kind="trio")
        verdict = RetryVerdict(delay, Failure(type="ValueError", message="no"))
        return delivery, make_settlement(verdict, delivery, worker="w", ttl=60.0)

    def verbs(self) -> list[tuple[str, str, int]]:
        """What is to be settled now: verb, job, and the attempt that its message is for."""
        return [(words[0], words[2], read_command(words[3]).attempt) for _, words in self.results.drain()]


@pytest.fixture
def log() -> Iterator[Log]:
    """A log of its own."""
    one = Log(worker="w", app="tested")
    yield one
    one.finish()


async def test_waiting_and_sleeping_jobs_are_requeued_at_stop(log: Log, mock_clock: MockClock) -> None:
    worker = Worker("local", log)
    soon, late = worker.retry(1.0, "soon"), worker.retry(30.0, "late")
    assert worker.unpublishable.filter_outcomes([soon, late], sent=False) == []
    worker.unpublishable.run_due_attempts()
    assert not worker.tasks
    mock_clock.jump(2.0)
    worker.unpublishable.run_due_attempts()
    assert [item.command and item.command.attempt for item in worker.tasks.items] == [2]
    worker.unpublishable.close()
    assert (len(worker.tasks), worker.verbs()) == (0, [("retry", "late", 2), ("release", "soon", 2)])
    assert worker.unpublishable.filter_outcomes([soon, late], sent=False) == [soon, late]


async def test_a_retry_that_may_have_arrived_does_not_begin_here(log: Log) -> None:
    worker = Worker("local", log)
    outcome = worker.retry(0.0)
    assert worker.unpublishable.filter_outcomes([outcome], sent=True) == [outcome]
    worker.unpublishable.run_due_attempts()
    assert not worker.tasks


@pytest.mark.parametrize("how", ["backlog", "local", "abandon"])
async def test_what_is_no_retry_is_left_alone_and_in_its_order(log: Log, how: UnpublishableChoice) -> None:
    worker = Worker(how, log)
    delivery, _ = worker.retry(0.0)
    done = (delivery, make_settlement(Complete(b"1"), delivery, worker="w", ttl=60.0))
    assert worker.unpublishable.filter_outcomes([done], sent=False) == [done]
    worker.results.put(done)
    worker.results.put(worker.retry(0.0, "b"))
    worker.unpublishable.run_due_attempts()
    kept = [words[0] for _, words in worker.results.drain()]
    assert (
        kept
        == {"backlog": ["complete", "retry"], "local": ["complete"], "abandon": ["complete", "bury"]}[how]
    )


async def test_what_sleeps_is_a_retry_after_what_is_left_of_its_delay(
    log: Log, mock_clock: MockClock
) -> None:
    worker = Worker("local", log)
    worker.unpublishable.filter_outcomes([worker.retry(30.0)], sent=False)
    mock_clock.jump(10.0)
    worker.unpublishable.release_retries()
    assert [words.delay for _, words in worker.results.drain()] == [20.0]


async def test_a_function_decides_for_each_retry_and_is_called_once_for_it(
    log: Log, mock_clock: MockClock
) -> None:
    calls: list[UnpublishableRetry] = []

    def decide(retry: UnpublishableRetry) -> UnpublishableChoice:
        calls.append(retry)
        return {"here": "local", "never": "abandon"}.get(retry.id, "backlog")  # type: ignore[return-value]

    worker = Worker(decide, log)
    kept, here, never = worker.retry(2.0, "kept"), worker.retry(0.0, "here"), worker.retry(0.0, "never")
    remaining = worker.unpublishable.filter_outcomes([kept, here, never], sent=False)
    assert [(settlement.verb, settlement.job_id) for _, settlement in remaining] == [
        ("retry", "kept"),
        ("bury", "never"),
    ]
    worker.unpublishable.run_due_attempts()
    assert [delivery.command and delivery.command.id for delivery in worker.tasks.items] == ["here"]
    assert worker.unpublishable.filter_outcomes(remaining, sent=False) == remaining
    assert [retry.id for retry in calls] == ["kept", "here", "never"]
    assert calls[0] == UnpublishableRetry("kept", "t", "q", 1, 2.0, "ValueError", "no")
    worker.unpublishable.release_retries()
    worker.unpublishable.filter_outcomes([kept], sent=False)
    assert len(calls) == 4, "another outage, another question"


@pytest.mark.parametrize("answer", ["later", None, ZeroDivisionError("oh")])
async def test_a_function_that_fails_or_returns_nonsense_keeps_the_retry_with_one_warning(
    log: Log, answer: object
) -> None:
    def decide(_retry: UnpublishableRetry) -> UnpublishableChoice:
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    worker = Worker(decide, log)
    outcomes = [worker.retry(0.0, "a"), worker.retry(0.0, "b")]
    with Lines() as lines:
        assert worker.unpublishable.filter_outcomes(outcomes, sent=False) == outcomes
    (warning,) = lines.of("results:fallback-failed")
    assert (warning["job"], warning["task"]) == ("a", "t")
    assert warning["why"] == (
        "ZeroDivisionError: oh"
        if isinstance(answer, Exception)
        else f"it returned {answer!r}, not one of abandon, backlog, local"
    )


async def test_a_function_is_asked_again_when_the_attempt_that_it_chose_fails_too(log: Log) -> None:
    calls: list[int] = []

    def decide(retry: UnpublishableRetry) -> UnpublishableChoice:
        calls.append(retry.attempt)
        return "local" if len(calls) == 1 else "abandon"

    worker = Worker(decide, log)
    outcome = worker.retry(0.0)
    assert worker.unpublishable.filter_outcomes([outcome], sent=False) == []
    worker.unpublishable.run_due_attempts()
    (delivery,) = worker.tasks.drain()
    verdict = RetryVerdict(0.0, Failure(type="ValueError", message="again"))
    again = (delivery, make_settlement(verdict, delivery, worker="w", ttl=60.0))
    (remaining,) = worker.unpublishable.filter_outcomes([again], sent=False)
    assert (remaining[1].verb, calls) == ("bury", [1, 2])
