"""Build the calls that send commands to inboxes, take them and reply to them, and pause queues."""

from collections.abc import Iterable
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, script_call, to_ms
from celery5.broker.keys import Keys

SEND_COMMAND = Script.load("commands/send_command")
READ_COMMANDS = Script.load("commands/read_commands")
TAKE_COMMAND = Script.load("commands/take_command")
REPLY_TO_COMMAND = Script.load("commands/reply_to_command")

MAX_COMMANDS = 1000
"""The most commands in one inbox."""
COMMAND_TTL = 90.0
"""Seconds that inboxes, nonces and answers are kept: longer than any command lives."""

TAKEN_BY_OTHER = -1
"""What `take_command` returns for a command that another process with the same inbox has."""


class QueuedCommand(msgspec.Struct, frozen=True):
    """One command as it came: its entry, its id as it says itself, its bytes (none when there are too many of them),
    and how many there are."""

    entry: bytes
    id: str
    sealed: bytes
    size: int


def send_command(keys: Keys, inbox: str, command_id: str, sealed: bytes) -> Call[bool]:
    """Put a command into an inbox. Return False when that is full. Safe to repeat."""
    words = (command_id, sealed, MAX_COMMANDS, to_ms(COMMAND_TTL))
    named = (keys.inbox(inbox), keys.nonce(command_id))
    return script_call(SEND_COMMAND, named, words, bool, repeatable=True)


def read_commands(keys: Keys, inbox: str, *, count: int, max_bytes: int) -> Call[list[QueuedCommand]]:
    """Return the oldest commands in an inbox, without the bytes of those that have more than `max_bytes`."""
    return script_call(
        READ_COMMANDS, (keys.inbox(inbox),), (count, max_bytes), _queued_commands, repeatable=True
    )


def take_command(keys: Keys, inbox: str, command_id: str, entry: bytes, *, worker: str) -> Call[int]:
    """Take a command out of the inbox. Return 1 when it may be done, 0 when it came before, or TAKEN_BY_OTHER."""
    words = (entry, worker, to_ms(COMMAND_TTL))
    return script_call(TAKE_COMMAND, (keys.inbox(inbox), keys.nonce(command_id)), words, int, repeatable=True)


def reply_to_command(
    keys: Keys,
    inbox: str,
    command_id: str,
    document: bytes,
    *,
    refused_entry: bytes = b"",
    keep_first: bool = False,
) -> Call[bool]:
    """Answer a command. Return False when it was refused already.

    Args:
        refused_entry: The entry of a command that was not taken.
        keep_first: Leave alone an answer that is there.
    """
    words = (refused_entry, document, to_ms(COMMAND_TTL), int(keep_first))
    return script_call(
        REPLY_TO_COMMAND, (keys.inbox(inbox), keys.reply(command_id)), words, bool, repeatable=True
    )


def _queued_commands(raw: Iterable[Any]) -> list[QueuedCommand]:
    return [
        QueuedCommand(entry, name.decode(errors="replace"), sealed, size) for entry, name, sealed, size in raw
    ]


def pause_queue(keys: Keys, queue: str) -> Call[bool]:
    """Pause this queue for all workers. Return False when it was paused already."""
    return Call(("SADD", keys.paused, queue), bool, repeatable=True)


def resume_queue(keys: Keys, queue: str) -> Call[bool]:
    """Resume this queue for all workers. Return False when it was not paused."""
    return Call(("SREM", keys.paused, queue), bool, repeatable=True)


def list_paused_queues(keys: Keys) -> Call[set[str]]:
    """Return the queues that are paused."""
    return Call(
        ("SMEMBERS", keys.paused), _names, repeatable=True, merge=lambda replies: set[str]().union(*replies)
    )


def _names(raw: Iterable[bytes]) -> set[str]:
    return {word.decode(errors="replace") for word in raw}
