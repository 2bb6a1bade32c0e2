"""Orders: what a worker answers to a command, on the wire."""

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec
from msgspec import Raw

from celery5.protocol.similar_names import find_similar

MAX_REPLY_SIZE = 1024 * 1024
"""Bytes of an answer."""
NULL = Raw(b"null")


class CommandReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a command: who did it, or did not; its `answer`, or the `reason` in a word and `why` it was not."""

    v: Literal[1] = 1
    worker: str
    ok: bool
    answer: Raw = NULL
    reason: str = ""
    why: str = ""


def get_inbox_name(worker: str) -> str:
    """The name of a worker's inbox: its own without the word that each of its incarnations adds, so that a process that
    begins again, or another one of the same name, is commanded at the same place."""
    return worker.rpartition(":")[0] or worker


def find_inbox(name: str, living: Collection[str]) -> str:
    """The inbox that somebody means by `name`: that of a worker which lives, named in full, else `name` itself. A name
    that only looks like a worker's in full is left alone: `host:4711` is no incarnation of `host`."""
    inboxes = {get_inbox_name(each) for each in living}
    return get_inbox_name(name) if name in living and name not in inboxes else name


def format_living_workers(
    name: str, living: Collection[str], beside: Mapping[str, Collection[str]] | None = None
) -> str:
    """What to tell somebody to whom nobody of that name has answered: whom of the `living` workers they may have meant,
    or of the others who live, by what they are (`beside`); '' when it lives."""
    others = {get_inbox_name(each): what for what, names in (beside or {}).items() for each in names}
    if name in others:
        return ""
    inboxes = sorted({get_inbox_name(each) for each in living})
    if name in inboxes:
        return ""
    former = [each for each in inboxes if each == get_inbox_name(name)]
    if near := next(iter(former), "") or find_similar(name, [*inboxes, *others]):
        return f"no worker {name!r} lives: did you mean {near!r}?"
    more = f" and {len(inboxes) - 10} more" if len(inboxes) > 10 else ""
    return (
        f"no worker {name!r} lives; those that do: {', '.join(inboxes[:10]) or 'none'}{more}{_told(beside)}"
    )


def _told(beside: Mapping[str, Collection[str]] | None) -> str:
    """Who lives that is no worker."""
    found = {what: sorted(set(map(get_inbox_name, names))) for what, names in (beside or {}).items() if names}
    return "".join(f"; {what}: {', '.join(names[:10])}" for what, names in found.items())
