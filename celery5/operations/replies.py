"""Say what came of a control command, from what the processes have answered."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from celery5.operations.operation import Changed

if TYPE_CHECKING:
    from celery5.commands.control import Reply


def summarize_replies(done: str, replies: "Sequence[Reply]", *, keep_answers: bool = True) -> Changed:
    """Return what a command has changed.

    Args:
        done: What it does, in words.
        replies: What the processes have answered.
        keep_answers: Whether the answers say more than that it is done.
    """
    from celery5.commands.control import find_failures

    found = find_failures(replies)
    failures = [f"{reply.worker}: {reply.why}" for reply in found]
    count = sum(reply.ok for reply in replies)
    concerned = count + len(found)
    return Changed(
        summary=done if not replies else f"{done}: {count} of {concerned} processes",
        count=count,
        replies={reply.worker: reply.answer if reply.ok else reply.why for reply in replies}
        if keep_answers
        else {},
        failure="; ".join(failures[:10]),
    )
