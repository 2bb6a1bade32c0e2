"""Calls that are made again when their reply was lost: what they change is changed once, and they say so.

A call has a token, which the run keeps. Whoever sends the token again hears what the first call did. Drivers send a
command again by themselves; a call that raised and is made again has the same token, too, for as long as its process
lives.
"""

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import NamedTuple

from celery5.protocol.job.job import new_id

MOST_UNANSWERED = 1000
"""Calls without a reply that a process remembers."""


class CallToken(NamedTuple):
    """What tells a call from all others."""

    text: str
    # Whether an earlier call had it, whose reply was lost.
    is_repeated: bool


class RepeatedCalls:
    """The calls that had no reply."""

    def __init__(self) -> None:
        self._unanswered: dict[Hashable, list[str]] = {}

    @contextmanager
    def token_for(self, *what: Hashable) -> Generator[CallToken]:
        """Yield the token for a call. When it raises, the next call of the same kind has it again."""
        tokens = self._unanswered.get(what)
        token = CallToken(tokens.pop(), True) if tokens else CallToken(new_id(), False)
        if not tokens:
            self._unanswered.pop(what, None)
        try:
            yield token
        except BaseException:
            if len(self._unanswered) >= MOST_UNANSWERED:
                self._unanswered.clear()
            self._unanswered.setdefault(what, []).append(token.text)
            raise
