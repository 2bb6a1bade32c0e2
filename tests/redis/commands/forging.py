"""Forging: commands as nobody honest would write them, and what a worker makes of them."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import redis
import trio

from celery5 import App
from celery5.commands.keyring import Keyring
from celery5.protocol.commands.definitions import CommandReply
from celery5.protocol.commands.signing import ControlCommand, Signer, format_audience, sign_command
from celery5.protocol.job.job import new_id

INBOX = "w1"
"""The name of the worker that is written to."""


def order(app: App, command: str = "tick", /, **changes: Any) -> ControlCommand:
    """A command as it should be, but for the `changes`: made when there are keys, as every sender does."""
    if app.settings.inbox_signatures:
        app.control.keyring.get_signer()
    now = time.time()
    usual: dict[str, Any] = {
        "id": new_id(),
        "audience": format_audience(app.name, INBOX),
        "issued": now,
        "expires": now + 30,
        "command": command,
        "sender": "the test",
    }
    return ControlCommand(**{**usual, **changes})


def signed(app: App, one: ControlCommand) -> bytes:
    """The command, signed with the application's own key."""
    return sign_command(one, app.control.keyring.get_signer())


def stranger(folder: Path) -> Signer:
    """Somebody whom no worker knows."""
    return Keyring(folder / "stranger", owner="stranger").get_signer()


def put(client: "redis.Redis", app: App, one: ControlCommand, sealed: bytes) -> None:
    """Write a command to the inbox by hand, past everything that our own side checks."""
    fields: dict[Any, Any] = {"id": one.id, "command": sealed}
    client.xadd(app.keys.inbox(INBOX), fields)
    client.pexpire(app.keys.inbox(INBOX), 90_000)
    client.publish(app.keys.inbox(INBOX), one.id)


async def answer(client: "redis.Redis", app: App, one: ControlCommand) -> CommandReply:
    """What was answered; the answer is gone then, so that the same command may be answered again."""
    key = app.keys.reply(one.id)
    with trio.fail_after(30):
        while (raw := client.getdel(key)) is None:
            await trio.sleep(0.005)
    assert isinstance(raw, bytes)
    return msgspec.json.decode(raw, type=CommandReply)


def newer(file: Path) -> None:
    """Files that change within one tick of a file system's clock look the same: this one is newer."""
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
