"""Say to which processes a control command goes, and what came of it, from what they have answered."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from celery5.operations.operation import Changed
from celery5.operations.parameters import Names, about, as_duration
from celery5.protocol.counts import format_count
from celery5.similar_names import join_names

if TYPE_CHECKING:
    from celery5.commands.control import Reply

WORKER_NAMES = Annotated[Names, about("Workers, by name; default: all that live.", metavar="NAME")]
"""The workers that get a command."""
CONTROLLER_NAMES = Annotated[Names, about("Controllers, by name; default: all that live.", metavar="NAME")]
"""The Controllers that get a command."""
TIMEOUT = 5.0
"""Seconds to wait for processes to do something."""
ReplyTimeout = Annotated[
    float,
    as_duration(at_least=0.01, at_most=3600),
    about("How long answers are waited for.", metavar="SECONDS"),
]
"""How long the answers to a command are waited for."""
ReadingTimeout = Annotated[
    ReplyTimeout | None,
    about("How long answers are waited for, also of processes that have yet to start.", metavar="SECONDS"),
]
"""The same for what only reads: unless it is given, nobody is waited for who is not there."""


def summarize_replies(done: str, replies: "Sequence[Reply]", *, keep_answers: bool = True) -> Changed:
    """Return what a command has changed.

    Args:
        done: What it does, in words.
        replies: What the processes have answered.
        keep_answers: Whether the answers say more than that it is done.
    """
    from celery5.commands.control import find_failures

    found = find_failures(replies)
    failed: dict[
        str, list[str]
    ] = {}  # one reason of several is stated once: a full Redis takes 300 characters
    for reply in found:
        failed.setdefault(reply.why, []).append(reply.worker)
    failures = [f"{join_names(names, 5)}: {why}" for why, names in failed.items()]
    count = sum(reply.ok for reply in replies)
    concerned = format_count(count + len(found), "process", "processes")
    if not replies:
        summary = done
    elif found and not count:
        summary = f"nothing was done: 0 of {concerned}"
    else:
        summary = f"{done}: {count} of {concerned}"
    return Changed(
        summary=summary,
        count=count,
        replies={reply.worker: reply.answer if reply.ok else reply.why for reply in replies}
        if keep_answers
        else {},
        failure=join_names(failures, 10, separator="; "),
        value=list(replies),
    )
