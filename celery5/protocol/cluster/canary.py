"""Decide by one worker of the new version, the canary, whether a change goes on or is taken back."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.members import Member, MemberState, Phase
from celery5.protocol.counts import format_count
from celery5.protocol.health.worker_status import Attempts, parse_worker_status


class CanaryVerdict(msgspec.Struct, frozen=True):
    """The result of all canaries of a change."""

    passed: bool
    # What was seen, for people.
    why: str


class CanaryWatch:
    """Watches canaries beside the other workers of their groups, for `cluster.canary` seconds after each is up.

    Args:
        canaries: They start after `now`: what has that name until then is another process.
        cluster: The description with the bounds.
        now: The present time.
    """

    def __init__(self, canaries: Sequence[Member], cluster: Cluster, now: float) -> None:
        self.canaries = canaries
        self._cluster = cluster
        self._began_at = now
        self._up_since: dict[str, float] = {}
        self._last: dict[str, Attempts] = {canary.name: Attempts() for canary in canaries}
        self._watched: defaultdict[str, Attempts] = defaultdict(Attempts)

    def judge(self, states: Mapping[str, MemberState], now: float) -> CanaryVerdict | None:
        """Return the verdict; None while it is open. The first canary that fails decides, else the last to pass."""
        findings: list[str] = []
        for canary in self.canaries:
            state = states[canary.name]
            if state.recent_deaths:
                return CanaryVerdict(passed=False, why=f"{canary.name}: {state.end_reason}")
            if state.phase is not Phase.UP or state.phase_since < self._began_at:
                continue
            others = [
                other
                for name, other in states.items()
                if other.group == state.group and name != canary.name and other.phase is Phase.UP
            ]
            own, theirs = self._count([state]), self._count(others)
            seen = (
                f"{own.failures} of its {format_count(own.total, 'attempt')} failed, "
                f"{theirs.failures} of {theirs.total} of the other workers"
            )
            if (
                own.total >= self._cluster.canary_attempts
                and own.failed_share > theirs.failed_share + self._cluster.canary_failures
            ):
                return CanaryVerdict(passed=False, why=f"{canary.name}: {seen}")
            if now - self._up_since.setdefault(canary.name, now) < self._cluster.canary:
                continue
            if problem := _find_own_problem(state, others):
                return CanaryVerdict(passed=False, why=f"{canary.name}: it is not ready: {problem}")
            findings.append(f"{canary.name}: {seen}")
        if len(findings) < len(self.canaries):
            return None
        return CanaryVerdict(passed=True, why="; ".join(findings))

    def _count(self, states: Sequence[MemberState]) -> Attempts:
        """Return the attempts that these workers have ended since they are watched."""
        total = Attempts()
        for state in states:
            name, status = state.member.name, parse_worker_status(state.status)
            if status is not None:
                before = self._last.get(name, status.attempts)
                self._watched[name] = self._watched[name].plus(status.attempts.since(before))
                self._last[name] = status.attempts
            total = total.plus(self._watched[name])
        return total


def _find_own_problem(state: MemberState, others: Sequence[MemberState]) -> str:
    """Return why a canary is not ready; empty if all other workers are not ready for the same reason."""
    status = parse_worker_status(state.status)
    reported = [found for other in others if (found := parse_worker_status(other.status)) is not None]
    if status is None or (reported and all(found.problem for found in reported)):
        return ""
    return status.problem
