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
    pending: tuple[str, ...] = ()


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
        return ChangeProgress(failure=f"the change was taken back: {taken_back}")
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
