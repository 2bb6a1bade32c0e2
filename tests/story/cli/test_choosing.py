"""Choosing: each flag that says which dead jobs are meant leaves some out, by itself."""

import time
from typing import Any

import click

from celery5.cli.terminal.filters import is_narrowed, parse_selection, selection_flags
from tests.redis.dead_letters.many_dead_letters import add_dead_letters
from tests.story.conftest import Desk

LONG_AGO = f"{int((time.time() - 7200) * 1000)}-1"
"""The entry of a job that died two hours ago."""

FLAGS = {
    "--queue": ("slow", ["old"]),
    "--task": ("bank.*", ["old"]),
    "--error": ("OS*", ["old"]),
    "--message": ("of bank", ["old"]),
    "--reason": ("poisoned", ["old"]),
    "--sink": ("table", ["sunk"]),
    "--older-than": ("1h", ["old"]),
    "--newer-than": ("1h", ["new", "sunk"]),
    "--id": ("new", ["new"]),
    "--error-group": ("", ["old"]),  # the id of a group that the test finds
}


@selection_flags
@click.command()
def command(**_said: Any) -> None:
    """Any command with these flags."""


def meant(desk: Desk, *words: str) -> list[str]:
    """The dead jobs that these words mean."""
    choice = parse_selection(command.make_context("any", list(words)).params)
    assert is_narrowed(choice) is (bool(words) and words[0] != "--queue")
    return sorted(job.id for job in desk.app.dlq.read(**choice))


def test_each_flag_alone_leaves_some_out(desk: Desk, redis_client: Any) -> None:
    old = {"queue": "slow", "task": "bank.pay", "error": "OSError", "reason": "poisoned"}
    add_dead_letters(desk.app, redis_client, "old", at=LONG_AGO, **old)
    add_dead_letters(desk.app, redis_client, "new")
    document = b'{"v":1,"id":"sunk","task":"t","state":"SUCCESS"}'
    redis_client.xadd(
        desk.app.queue("default").dead, {"sink": "table", "document": document, "failure": b"{"}
    )
    assert {flag for param in command.params for flag in param.opts} == set(FLAGS), (
        "a flag that is not tried here"
    )
    assert meant(desk) == ["new", "old", "sunk"]
    (group,) = desk.app.dlq.groups(error="OS*").groups
    flags = {**FLAGS, "--error-group": (group.id, ["old"])}
    assert {flag: meant(desk, flag, word) for flag, (word, _) in flags.items()} == {
        flag: left for flag, (_, left) in flags.items()
    }
