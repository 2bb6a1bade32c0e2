"""Decide whether a change of a cluster is done, goes on or has failed, from what the leading Controller says."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec

from celery5.protocol.process.missing import format_retry


class ChangeProgress(msgspec.Struct, frozen=True):
    """How far a change is: it is done, it has failed, or these members are still in transition."""

    is_done: bool = False
    # Why it has failed, for people; "" if it has not.
    failure: str = ""
    taken_back: bool = False
    pending: tuple[str, ...] = ()


class MemberVersions(msgspec.Struct, frozen=True):
    """Which members run the new version and which the old one, when a change has failed or is not done."""

    new: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    # They start or stop.
    in_transition: tuple[str, ...] = ()
    # They are down, or given up.
    not_running: tuple[str, ...] = ()
    # The change has nothing to do with them.
    unchanged: tuple[str, ...] = ()


def list_versions(
    answer: Mapping[str, Any], *, changed: Container[str] | None, canaries: Container[str], taken_back: bool
) -> MemberVersions:
    """Return which version each member runs.

    Args:
        answer: What the leading Controller answers to the command `members`.
        changed: The members that the change starts or restarts; None: any of them.
        canaries: The members that only try the change, which are left out.
        taken_back: Whether the change was taken back: no member but those has begun it.
    """
    found: dict[str, list[str]] = {}
    for member in answer["members"]:
        name, phase = member["name"], member["phase"]
        if name in canaries:
            continue
        if phase in ("given up", "down"):
            kind = "not_running"
        elif phase in ("starting", "stopping"):
            kind = "in_transition"
        elif taken_back or name in answer["pending"] or not member.get("wanted", True):
            kind = "old"
        else:
            kind = "new" if changed is None or name in changed else "unchanged"
        found.setdefault(kind, []).append(name)
    return MemberVersions(**{kind: tuple(names) for kind, names in found.items()})


def judge_change(
    answer: Mapping[str, Any], *, named: Container[str] | None, change: int | None, has_canaries: bool
) -> ChangeProgress:
    """Return how far a change is.

    A member that was given up before the change says nothing of it: the change may try that member again later, when
    its canary has passed. So it counts only when nothing else is left to do. One that is given up in this change, or
    after it, ends the waiting at once.

    Args:
        answer: What the leading Controller answers to the command `members`.
        named: The members that the command names, which alone count then; None: all.
        change: The number of the change, by the answer to the command; None: not known, then no member was given up
            before it.
        has_canaries: Whether the change is tried with canaries. A change can be taken back only then: what
            a Controller says of one otherwise is about an earlier change.
    """
    given_up = [
        member
        for member in answer["members"]
        if member["phase"] == "given up" and (named is None or member["name"] in named)
    ]
    if any(change is None or member.get("given_up_in", change) >= change for member in given_up):
        return ChangeProgress(failure=answer["line"])
    if pending := tuple(name for name in answer["pending"] if named is None or name in named):
        blocking = () if named is None else _find_blocking(answer["members"], named, pending)
        if blocking:
            why = f"{', '.join(blocking)} must be up before others of the group are restarted"
            return ChangeProgress(failure=f"{answer['line']}; {why}: {format_retry(*blocking, *pending)}")
        return ChangeProgress(pending=pending)
    if has_canaries and (taken_back := answer.get("taken_back")):
        return ChangeProgress(failure=f"the change was taken back: {taken_back}", taken_back=True)
    if given_up:
        retry = format_retry(*[member["name"] for member in given_up])
        return ChangeProgress(
            failure=f"{answer['line']}; given up before, and not tried by this change: {retry}"
        )
    return ChangeProgress(is_done=True)


def _find_blocking(
    members: Sequence[Mapping[str, Any]], named: Container[str], pending: Container[str]
) -> tuple[str, ...]:
    """Return the given-up members that are not tried again, and so hold up the restart of others of their group."""
    groups = {(member["kind"], member["group"]) for member in members if member["name"] in pending}
    return tuple(
        member["name"]
        for member in members
        if member["phase"] == "given up"
        and member["name"] not in named
        and (member["kind"], member["group"]) in groups
    )
