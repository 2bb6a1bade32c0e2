"""Find the members of a cluster that are missing: those that were given up, and those that stay down."""

from collections.abc import Iterable

from celery5.protocol.cluster.members import Kind, MemberState, Phase
from celery5.protocol.process.missing import (
    MAX_NAMED,
    GroupReport,
    MembersReport,
    MissingMember,
    format_restarting,
    format_retry,
)

MISSING_AFTER = 30.0
"""Seconds after the end of its process from which on a member is missing that is still started again."""
MAX_GROUPS = 500
"""Groups of a report."""


def is_missing(state: MemberState, now: float) -> bool:
    """Return whether a member should work, and has not since its process ended out of order."""
    return (
        state.is_wanted
        and not state.is_canary
        and state.missing_since is not None
        and (state.phase is Phase.GIVEN_UP or now - state.missing_since >= MISSING_AFTER)
    )


def make_report(states: Iterable[MemberState], now: float, *, epoch: float) -> MembersReport:
    """Return the report on these members.

    An additional member, which tries a new version in place of the only one of its group, is missing when it was given
    up, and counts for no group.

    Args:
        states: The members.
        now: The time by the clock of the members' times.
        epoch: What that clock shows, added to this, is in seconds since 1970.
    """
    wanted = [state for state in states if state.is_wanted]
    missing = [state for state in wanted if is_missing(state, now)]
    names = {state.member.name for state in missing}
    missing.sort(key=lambda state: (state.phase is not Phase.GIVEN_UP, state.member.name))
    groups: dict[tuple[Kind, str], list[MemberState]] = {}
    for state in wanted:
        if not state.is_spare:
            groups.setdefault(state.group, []).append(state)
    return MembersReport(
        groups=tuple(
            GroupReport(
                kind=kind,
                name=name,
                declared=len(members),
                missing=sum(state.member.name in names for state in members),
            )
            for (kind, name), members in sorted(groups.items())[:MAX_GROUPS]
        ),
        missing=tuple(_describe(state, epoch) for state in missing[:MAX_NAMED]),
    )


def _describe(state: MemberState, epoch: float) -> MissingMember:
    is_given_up = state.phase is Phase.GIVEN_UP
    name = state.member.name
    return MissingMember(
        kind=state.member.kind,
        name=name,
        group=state.member.group,
        condition="given up" if is_given_up else "down",
        since=None if state.missing_since is None else state.missing_since + epoch,
        why=state.end_reason,
        remedy=format_retry(name) if is_given_up else format_restarting(name),
    )
