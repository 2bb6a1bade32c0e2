"""Own commands: an application's workers do what it has declared when they are told to, and nothing of it ends them."""

from typing import Any

import pytest
import trio

from celery5 import App, Misconfigured
from celery5.commands.declaration import RESERVED_COMMANDS
from celery5.errors import CommandRefused
from tests.redis.worker.workers import working


async def test_workers_do_what_the_application_has_declared_and_answer(app: App) -> None:
    levels: list[int] = []

    @app.command
    async def set_level(level: int, *, quick: bool = False) -> dict[str, Any]:
        levels.append(level)
        await trio.lowlevel.checkpoint()
        return {"level": level, "quick": quick}

    @app.command(name="drop-cache")
    def drop() -> str:
        return "dropped"

    async with working(app, name="w1"):
        (reply,) = await app.control.asend("set-level", {"level": 3, "quick": True})
        assert (reply.ok, reply.answer) == (True, {"level": 3, "quick": True})
        (reply,) = await app.control.asend("drop-cache")
        assert (reply.ok, reply.answer) == (True, "dropped")
    assert levels == [3]


async def test_what_goes_wrong_is_answered_and_the_worker_lives(app: App) -> None:
    @app.command
    async def choosy(n: int) -> None:
        raise CommandRefused("not today")

    @app.command
    def broken() -> None:
        raise SystemExit(3)

    @app.command
    async def odd() -> object:
        return object()

    async with working(app, name="w1"):
        for command, parameters, reason, why in (
            ("choosy", {"n": 1}, "refused", "not today"),
            ("choosy", {"m": 1}, "refused", "choosy: "),
            ("broken", {}, "failed", "SystemExit(3)"),
            ("odd", {}, "failed", "TypeError"),
            ("chosy", {}, "refused", "did you mean 'choosy'?"),
        ):
            (reply,) = await app.control.asend(command, parameters)
            assert (reply.ok, reply.reason, why in reply.why) == (False, reason, True), reply
        (reply,) = await app.control.aping()
        assert reply.ok


async def test_none_can_take_the_name_of_one_of_ours(app: App) -> None:
    async with working(app, name="w1"):
        (reply,) = await app.control.asend("zzzzzzzz")
    known = reply.why.partition("; known: ")[2].split(", ")
    assert sorted(known) == sorted(RESERVED_COMMANDS)
    with pytest.raises(Misconfigured, match="all workers have one of that name"):
        app.command(name="ping")(lambda: None)
    with pytest.raises(Misconfigured, match="small letters"):
        app.command(lambda: None)
    app.command(name="mine")(lambda: 1)
    with pytest.raises(Misconfigured, match="two commands are named 'mine'"):
        app.command(name="mine")(lambda: 2)
    with pytest.raises(Misconfigured, match="takes a function"):
        app.command(name="x")(3)  # type: ignore[type-var]
