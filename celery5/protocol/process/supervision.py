"""Supervision: what follows when a boot step or a service fails, as values and a table.

A mandatory step that does not come up stops its worker; an optional one is postponed, to be tried again by a
command. A step that crashes after it was up is restarted as long as its policy allows. There is no circuit
breaker here: a command always tries the step again.
"""

from collections.abc import Callable, Mapping
from enum import Enum

import msgspec

from celery5.protocol.job.retry_policy import RetryPolicy

STABLE_AFTER = 60.0
"""Seconds of running after which earlier failures are forgotten."""


class StepState(Enum):
    """The state of a boot step."""

    WAITING = "waiting"  # for what it requires
    STARTING = "starting"
    UP = "up"
    ENDED = "ended"  # a service that ended by itself
    FAILED = "failed"  # about to be tried again
    GIVEN_UP = "given up"  # until a command tries it again


class FailurePhase(Enum):
    """When a failure happens."""

    START = "it has not been up in this worker, and nobody has asked for it again"
    RETRY = "it was asked for again"
    CRASH = "it was up"


class StepDecision(Enum):
    """What follows a failure."""

    RETRY = "wait, then try again"
    DEFER = "go on without it, and have a command try it again"
    GIVE_UP = "go on without it"
    STOP = "stop the worker"


# phase, whether the step is optional, whether its policy allows another try: what follows
STEP_DECISIONS: Mapping[tuple[FailurePhase, bool, bool], StepDecision] = {
    (FailurePhase.START, False, True): StepDecision.RETRY,
    (FailurePhase.START, False, False): StepDecision.STOP,
    (FailurePhase.START, True, True): StepDecision.DEFER,
    (FailurePhase.START, True, False): StepDecision.GIVE_UP,
    (FailurePhase.RETRY, False, True): StepDecision.RETRY,  # only optional steps can be retried by a command
    (FailurePhase.RETRY, False, False): StepDecision.STOP,
    (FailurePhase.RETRY, True, True): StepDecision.RETRY,
    (FailurePhase.RETRY, True, False): StepDecision.GIVE_UP,
    (FailurePhase.CRASH, False, True): StepDecision.RETRY,
    (FailurePhase.CRASH, False, False): StepDecision.STOP,
    (FailurePhase.CRASH, True, True): StepDecision.RETRY,
    (FailurePhase.CRASH, True, False): StepDecision.GIVE_UP,
}


class RetryState(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of a step."""

    optional: bool
    policy: RetryPolicy
    phase: FailurePhase = FailurePhase.START
    failures: int = 0  # in a row

    @property
    def max_tries(self) -> int:
        """Return the most tries after a command: at least one."""
        return max(self.policy.max_retries, 1)

    def restarted(self) -> "RetryState":
        """Return the state after a command to try again: failures count from zero."""
        return msgspec.structs.replace(self, phase=FailurePhase.RETRY, failures=0)

    def record_failure(
        self, *, uptime: float | None = None, is_outage: bool = False, final: bool = False
    ) -> tuple["RetryState", StepDecision]:
        """Return the state after a failure, and what follows.

        Args:
            uptime: the seconds that it was up this time; None when it never was.
            is_outage: it crashed because Redis is unreachable, which does not count.
            final: its policy does not try again after such an error.
        """
        phase = self.phase if uptime is None else FailurePhase.CRASH
        if is_outage and phase is FailurePhase.CRASH:
            return msgspec.structs.replace(self, phase=phase), StepDecision.RETRY
        failures = 1 if uptime is not None and uptime >= STABLE_AFTER else self.failures + 1
        allowed = failures < self.max_tries if phase is FailurePhase.RETRY else self.policy.allows(failures)
        course = msgspec.structs.replace(self, phase=phase, failures=failures)
        return course, STEP_DECISIONS[phase, self.optional, allowed and not final]

    def get_delay(self, random: Callable[[], float]) -> float:
        """Return the seconds until the next try. `random` returns numbers in [0, 1)."""
        return self.policy.delay(max(self.failures, 1), random)
