"""Handle the outcome of a job: derive the verdict, queue its settlement, count it and log it."""

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from celery5.errors import BadResult
from celery5.logs.fence import FENCE
from celery5.logs.log import Level, Log
from celery5.protocol.job.delivery import Delivery, Settlement, make_settlement, make_sink_document
from celery5.protocol.job.messages import Command, Failure
from celery5.protocol.job.verdict import (
    BackoffFunction,
    Complete,
    Expire,
    FailForGood,
    HandOver,
    Hold,
    Outcome,
    PermanentFailure,
    Postpone,
    Reason,
    RejectVerdict,
    Release,
    RetryVerdict,
    Returned,
    Revoke,
    StartMissed,
    Verdict,
    judge,
)
from celery5.protocol.masking import MAX_ERROR_LENGTH, get_error_text, get_type_name
from celery5.protocol.observability.job_tally import RETRY_REQUESTED, JobTally
from celery5.runners.outcome import make_failure
from celery5.runners.user_errors import guard_scopes
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.job.attempt_recorder import AttemptRecorder
from celery5.services.job.internal_queues import InternalResultsQueue
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.process.lease import RedisClock
from celery5.tasks.task import Task

CHECKED_RESULTS = 20
"""The results of each task that are compared with its annotation. Decoding all of them would cost time for each job,
and a wrong annotation shows in the first ones."""
MAX_CHECKED_BYTES = 64 * 1024
"""The most bytes of a result that is compared."""


class OutcomeHandler:
    """Handles the end of every job that an executor took, or that was revoked or expired before."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        job_middleware: JobMiddleware,
        results: InternalResultsQueue,
        circuit_breakers: CircuitBreakers,
        log: Log,
        worker: str,
        tally: JobTally,
        attempt_recorder: AttemptRecorder,
        redis_clock: RedisClock,
        results_ttl: float,
        message_limit: int,
        retry_tracebacks: bool,
    ) -> None:
        tasks = self._tasks = tasks
        self._results = results
        self._circuit_breakers = circuit_breakers
        self._log = log
        self._worker = worker
        self._results_ttl = results_ttl
        self._message_limit = message_limit
        self._tally = tally
        self._attempt_recorder = attempt_recorder
        self._redis_clock = redis_clock
        self._job_middleware = job_middleware
        self._without_traceback: tuple[type, ...] = () if retry_tracebacks else (RetryVerdict, Postpone)
        self._checks_left = {
            name: CHECKED_RESULTS for name, task in tasks.items() if task.result_type.is_declared
        }

    @property
    def ended_counts(self) -> dict[str, int]:
        """The number of attempts that have ended in this process, by the resulting state."""
        return self._tally.count_by_state()

    def decide(self, delivery: Delivery, outcome: Outcome) -> Verdict:
        """Return the verdict on `delivery`, which has ended with `outcome`. It is decided once."""
        command = delivery.command
        assert command is not None
        if type(outcome) is Returned and len(outcome.value) > self._message_limit:
            outcome = _make_too_large_failure(len(outcome.value), self._message_limit)
        if type(outcome) is PermanentFailure and _is_result_unused(outcome, delivery, command):
            outcome = Returned(b"null")
        is_plain = not delivery.workflow and not command.flow
        if command.task in self._checks_left and type(outcome) is Returned and is_plain:
            self._check_result(outcome.value, command)
        if type(outcome) is not Returned or command.task in self._circuit_breakers.needing_success:
            self._circuit_breakers.record_outcome(delivery, command.task, outcome)
        if type(outcome) is Returned:  # no policy concerns it
            return Complete(outcome.value)
        task = self._tasks[command.task]
        return judge(
            outcome,
            attempt=command.attempt,
            policy=command.retry or task.policy,
            random=random.random,
            sections=command.sections,
            backoff=None if task.backoff is None else partial(_back_off, task.backoff),
        )

    def handle_outcome(self, delivery: Delivery, outcome: Outcome) -> None:
        """Handle the end of `delivery` with `outcome`."""
        command, verdict = delivery.command, delivery.verdict
        assert command is not None
        if verdict is None:
            verdict = self.decide(delivery, outcome)
            if self._job_middleware.notes_unstarted:  # what has run is decided already
                self._job_middleware.note_unstarted(delivery, verdict)
        try:
            settlement = self._make_settlement(verdict, delivery)
        except Exception as error:  # what the user's code has named or raised has no form in a message
            verdict = FailForGood(Reason.UNENCODABLE_RESULT, make_failure(error))
            settlement = self._make_settlement(verdict, delivery)
        self._results.put((delivery, settlement))
        if type(outcome) is StartMissed:  # no attempt has ended: nothing to count or to log as an end
            self._log.event("job:rate-limited", "debug", job=command.id, task=command.task)
            return
        try:
            self._count_and_log(delivery, command, verdict)
        except Exception as error:  # it only observes
            FENCE.note("job-end", error)

    def _make_settlement(self, verdict: Verdict, delivery: Delivery) -> Settlement:
        if delivery.recipients is not None:
            delivery.set_document(make_sink_document(verdict, delivery, worker=self._worker))
        return make_settlement(verdict, delivery, worker=self._worker, ttl=self._results_ttl)

    def _check_result(self, value: bytes, command: Command) -> None:
        """Warn, once for each task, of a result that does not fit its annotation: `get` would raise BadResult."""
        task, why = command.task, ""
        try:
            if len(value) <= MAX_CHECKED_BYTES:
                with guard_scopes():
                    self._tasks[task].result_type.decode(value)
        except BadResult as error:
            why = str(error)
        except BaseException as error:  # the user's code: __post_init__, a validator
            why = f"{get_type_name(error)}: {get_error_text(error, MAX_ERROR_LENGTH)}"
        self._checks_left[task] -= 1
        if why:
            self._log.event(
                "job:result-mismatched", "warning", job=command.id, task=task, why=why, hint=_MISMATCH_HINT
            )
        if why or not self._checks_left[task]:
            del self._checks_left[task]

    def _count_and_log(self, delivery: Delivery, command: Command, verdict: Verdict) -> None:
        level, state, extra_fields = _LOG_RULES[type(verdict)]
        tally = self._tally.tallies[delivery.queue, command.task]
        if type(verdict) is RetryVerdict and verdict.is_requested:
            level = "info"
            tally.counts[RETRY_REQUESTED] += 1
        else:
            tally.counts[state] += 1
        seconds = waited = 0.0
        if delivery.started:
            duration = delivery.finished - delivery.started
            seconds = int(duration * 1e6 + 0.5) / 1e6  # round() takes five times as long
            tally.run_times.add(seconds)
            tally.wait_times.add(waited := self._redis_clock.measure_wait(delivery))
            if command.trace:
                tally.set_exemplar(command.trace, seconds, delivery.finished)
        if type(verdict) is Complete:
            successes = tally.successes
            if seconds > successes.slow_bar or delivery.finished >= successes.next_sample_at:
                self._attempt_recorder.record_success(successes, delivery, verdict, seconds, waited)
        else:
            self._attempt_recorder.record_failure(delivery, verdict, waited)
        self._log.log_job_end(
            level,
            job=command.id,
            task=command.task,
            queue=delivery.queue,
            state=state,
            attempt=command.attempt,
            seconds=seconds,
            trace=command.trace,
            extra=_get_log_fields(verdict, extra_fields, traced=type(verdict) not in self._without_traceback)
            if extra_fields
            else None,
        )


_MISMATCH_HINT = (
    "it is stored unchanged, and get() raises BadResult: correct the annotation or what is returned"
)


def _get_log_fields(verdict: Verdict, names: Sequence[str], *, traced: bool) -> dict[str, Any]:
    """Return the additional log fields of a job that did not succeed; with the traceback if it is `traced`."""
    fields = {name: value for name in names if (value := getattr(verdict, name)) != ""}
    if "reason" in fields and isinstance(verdict, (Hold, HandOver, RejectVerdict)):
        fields["why"] = fields.pop("reason")  # as in every other event
    failure = fields.pop("failure", None)
    if failure is not None:
        fields["error"] = f"{failure.type}: {failure.message}"
        fields |= {"traceback": failure.traceback} if failure.traceback and traced else {}
    return fields


def _is_result_unused(outcome: PermanentFailure, delivery: Delivery, command: Command) -> bool:
    """Return whether a job only failed to store a result, and nobody gets it: then it has succeeded."""
    is_of_result = outcome.reason in (Reason.UNENCODABLE_RESULT, Reason.RESULT_TOO_LARGE)
    return is_of_result and command.ignore_result and not command.flow and delivery.recipients is None


def _back_off(backoff: BackoffFunction, retry: int) -> float | str:
    with guard_scopes():  # it runs in the task of an executor
        return backoff(retry)


def _make_too_large_failure(size: int, limit: int) -> PermanentFailure:
    text = (
        f"the task has returned, and its result has {size} bytes, over the limit of {limit}: "
        "return a reference, or raise message_limit"
    )
    return PermanentFailure(Reason.RESULT_TOO_LARGE, Failure(type="MessageTooLarge", message=text))


_LOG_RULES: Mapping[type, tuple[Level, str, tuple[str, ...]]] = {
    Complete: ("info", "SUCCESS", ()),
    RetryVerdict: ("warning", "RETRY", ("delay", "failure", "section", "backoff_error")),
    FailForGood: ("error", "DEAD", ("reason", "failure")),
    Release: ("warning", "SENT", ()),
    Postpone: ("warning", "RETRY", ("delay", "failure")),
    Hold: ("info", "HELD", ("delay", "reason")),
    HandOver: ("warning", "HELD", ("delay", "reason")),
    Expire: ("warning", "EXPIRED", ()),
    RejectVerdict: ("warning", "REJECTED", ("reason",)),
    Revoke: ("warning", "REVOKED", ()),
}
