"""Supervision: what follows when a boot step or a service fails, as values and a table.

Floor: protocol. Pure: no clock, and chance is passed in. Reads: nothing. Writes: nothing.

A mandatory step that does not come up stops its worker; an optional one is put off, to be tried again by a command
(C71, C72). What crashes after it was up is restarted, for so long as its policy allows. Nothing here is a circuit
breaker, and none stands before it: a step that is asked for again is always tried again (C71).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from celery5.protocol.retry import RetryPolicy

STEADY = 60.0
"""Seconds: whoever was up for so long before it crashed has a clean record again."""


class StepState(Enum):
    """How a boot step stands."""

    WAITING = "waiting"  # for what it requires
    STARTING = "starting"
    UP = "up"
    ENDED = "ended"  # a service that was over by itself
    FAILED = "failed"  # about to be tried again
    GIVEN_UP = "given up"  # until somebody asks for it


class Phase(Enum):
    """When a failure happens."""

    START = "it has not been up in this worker, and nobody has asked for it again"
    RETRY = "it was asked for again"
    CRASH = "it was up"


class Ruling(Enum):
    """What follows."""

    AGAIN = "wait, then try again"
    PUT_OFF = "go on without it, and have a command try it again"
    GIVE_UP = "go on without it"
    STOP = "stop the worker"


# Phase, whether it is optional, whether its policy allows another try: what follows.
RULINGS: Mapping[tuple[Phase, bool, bool], Ruling] = {
    (Phase.START, False, True): Ruling.AGAIN,
    (Phase.START, False, False): Ruling.STOP,
    (Phase.START, True, True): Ruling.PUT_OFF,
    (Phase.START, True, False): Ruling.GIVE_UP,
    (Phase.RETRY, False, True): Ruling.AGAIN,  # only what is optional can be asked for again
    (Phase.RETRY, False, False): Ruling.STOP,
    (Phase.RETRY, True, True): Ruling.AGAIN,
    (Phase.RETRY, True, False): Ruling.GIVE_UP,
    (Phase.CRASH, False, True): Ruling.AGAIN,
    (Phase.CRASH, False, False): Ruling.STOP,
    (Phase.CRASH, True, True): Ruling.AGAIN,
    (Phase.CRASH, True, False): Ruling.GIVE_UP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a step has behind it: whether it is `optional`, its `policy`, in which `phase` it is, and how many
    `failures` there were in a row."""

    optional: bool
    policy: RetryPolicy
    phase: Phase = Phase.START
    failures: int = 0

    @property
    def tries(self) -> int:
        """How often it is tried at most when it is asked for again: once at least."""
        return max(self.policy.max_retries, 1)

    def asked(self) -> "Course":
        """Somebody asks for it again: it counts anew."""
        return replace(self, phase=Phase.RETRY, failures=0)

    def failed(
        self, *, up_for: float | None = None, blameless: bool = False, final: bool = False
    ) -> tuple["Course", Ruling]:
        """It has failed: what it has behind it now, and what follows.

        `up_for`: the seconds that it was up this time, None when it never was. `blameless`: it crashed because Redis is
        away, which does not count. `final`: its policy does not try again after such an error.
        """
        phase = self.phase if up_for is None else Phase.CRASH
        if blameless and phase is Phase.CRASH:
            return replace(self, phase=phase), Ruling.AGAIN
        failures = 1 if up_for is not None and up_for >= STEADY else self.failures + 1
        allowed = failures < self.tries if phase is Phase.RETRY else self.policy.allows(failures)
        course = replace(self, phase=phase, failures=failures)
        return course, RULINGS[phase, self.optional, allowed and not final]

    def wait(self, random: Callable[[], float]) -> float:
        """Seconds until the next try. `random` gives numbers in [0, 1)."""
        return self.policy.delay(max(self.failures, 1), random)
