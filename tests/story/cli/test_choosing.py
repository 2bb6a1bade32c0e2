"""Choosing: each flag that says which dead jobs are meant leaves some out, by itself."""

import time
from typing import Any

from celery5 import App
from celery5.cli.terminal.operation_commands import CommandView, make_command
from celery5.cli.terminal.target import Target
from celery5.operations.dead_letters import DeadFilter
from celery5.operations.operation import Operation
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


async def choose(app: App, _: DeadFilter) -> None:
    """Choose."""


def meant(desk: Desk, *words: str) -> list[str]:
    """The dead jobs that these words mean."""
    asked: list[DeadFilter] = []
    view = CommandView(run=lambda started: asked.append(started.asked))
    make_command(CHOOSE, view).main(list(words), obj=Target("shop"), standalone_mode=False)
    return sorted(job.id for job in desk.app.dlq.read(**asked[0].to_filter()))


CHOOSE = Operation("dlq:choose", choose)


def test_each_flag_alone_leaves_some_out(desk: Desk, redis_client: Any) -> None:
    old = {"queue": "slow", "task": "bank.pay", "error": "OSError", "reason": "poisoned"}
    add_dead_letters(desk.app, redis_client, "old", at=LONG_AGO, **old)
    add_dead_letters(desk.app, redis_client, "new")
    document = b'{"v":1,"id":"sunk","task":"t","state":"SUCCESS"}'
    redis_client.xadd(
        desk.app.queue("default").dead, {"sink": "table", "document": document, "failure": b"{"}
    )
    command = make_command(CHOOSE, CommandView())
    flags = {flag for param in command.params for flag in param.opts}
    assert flags - {"--json"} == set(FLAGS), "a flag that is not tried here"
    assert meant(desk) == ["new", "old", "sunk"]
    (group,) = desk.app.dlq.groups(error="OS*").groups
    words = {**FLAGS, "--error-group": (group.id, ["old"])}
    assert {flag: meant(desk, flag, word) for flag, (word, _) in words.items()} == {
        flag: left for flag, (_, left) in words.items()
    }


def test_a_span_of_no_time_and_an_empty_text_are_no_reason_to_choose_all(
    desk: Desk, redis_client: Any
) -> None:
    """A variable of a shell that is empty selects nothing, or is no condition at all."""
    add_dead_letters(desk.app, redis_client, "old", at=LONG_AGO)
    assert meant(desk, "--newer-than", "0") == []
    assert meant(desk, "--older-than", "0") == ["old"]
    assert DeadFilter(message="").to_filter()["message"] is None
