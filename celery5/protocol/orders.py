"""Orders: what a worker answers to a command, on the wire.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from typing import Literal

import msgspec
from msgspec import Raw

LARGEST_ANSWER = 1024 * 1024
"""Bytes of an answer."""
NULL = Raw(b"null")


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a command: who did it, or did not; its `answer`, or the `reason` in a word and `why` it was not."""

    v: Literal[1] = 1
    worker: str
    ok: bool
    answer: Raw = NULL
    reason: str = ""
    why: str = ""


def inbox_of(worker: str) -> str:
    """The name of a worker's inbox: its own without the word that each of its incarnations adds, so that a process that
    begins again, or another one of the same name, is commanded at the same place."""
    return worker.rpartition(":")[0] or worker
