"""The event loop of an application: what declares none of its own runs there, in workers, Routers and Schedulers."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import trio

import celery5
from celery5 import App, BootStep, Misconfigured, service
from celery5.broker.colour import current_colour
from celery5.errors import CommandRefused
from celery5.events import SourceDocument
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.events.documents import ResultDocument
from celery5.streams import StreamEvents
from celery5.testing import running_steps
from tests.redis.worker.workers import Lines, until, working

NOTES: defaultdict[str, list[str]] = defaultdict(list)
"""The event loops in which code has run, by its name; "thread" for none."""


def note(name: str) -> None:
    """Note where the caller runs."""
    NOTES[name].append(current_colour() or "thread")


@pytest.fixture(autouse=True)
def no_notes() -> None:
    NOTES.clear()


class Kept:
    """A sink that notes where it runs."""

    name = "kept"
    batch = 1

    async def write(self, documents: Sequence[ResultDocument]) -> None:
        """Write."""
        note("sink")

    async def close(self) -> None:
        """Close."""
        note("sink closed")


class KeptOnTrio(Kept):
    """A sink that is declared for Trio."""

    name = "kept-on-trio"
    loop = "trio"

    async def write(self, documents: Sequence[ResultDocument]) -> None:
        """Write."""
        await trio.lowlevel.checkpoint()
        note("sink on Trio")

    async def close(self) -> None:
        """Close."""
        await trio.lowlevel.checkpoint()
        note("close on Trio")


class Watch:
    """A source that is a class."""

    async def run(self, emit: Any) -> None:
        """Emit one document."""
        note("source class")
        await emit("one", id="1")
        await asyncio.sleep(3600)


async def watch_once() -> AsyncIterator[str]:
    """A source that yields."""
    try:
        note("source generator")
        yield "one"
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0)
        note("source generator closed")


async def watch_on_trio(emit: Any) -> None:
    """A source that is declared for Trio."""
    note("source on Trio")
    await trio.sleep_forever()


async def step() -> None:
    """A boot step."""
    await asyncio.sleep(0)
    note("step")


async def serve() -> None:
    """A service."""
    note("service")
    await asyncio.sleep(3600)


async def step_on_trio() -> None:
    """A boot step that is declared for Trio."""
    await trio.lowlevel.checkpoint()
    note("step on Trio")


KINDS = ("worker", "router", "scheduler")
STEPS = [
    BootStep("one", step, process_kinds=KINDS),
    BootStep("on-trio", step_on_trio, loop="trio", process_kinds=KINDS),
]


def on_asyncio(url: str, app_name: str, **options: Any) -> App:
    return App(app_name, broker=url, loop="asyncio", **options)


async def test_tasks_run_on_the_applications_loop(url: str, app_name: str) -> None:
    app = on_asyncio(url, app_name)

    @app.task
    async def plain() -> None:
        await asyncio.sleep(0)
        note("task")

    @app.task(loop="trio")
    async def on_trio() -> None:
        await trio.lowlevel.checkpoint()
        note("task on Trio")

    @app.task
    def blocking() -> None:
        note("def")

    @app.task(boxed=True)
    async def boxed() -> None: ...

    @celery5.task
    async def free() -> None:
        note("free task")

    free.adopt(app)
    app.tasks.add(free)
    assert (boxed.kind, boxed.loop) == ("boxed", "asyncio")
    assert free.copy_for(App(f"{app_name}-2")).kind == "trio"
    async with working(app):
        await app.asend_many([plain.s(), on_trio.s(), blocking.s(), free.s()])
        await until(lambda: len(NOTES) == 4)
    assert dict(NOTES) == {
        "task": ["asyncio"],
        "task on Trio": ["trio"],
        "def": ["thread"],
        "free task": ["asyncio"],
    }
    app.close()


async def test_timers_steps_and_processors_run_on_the_applications_loop(url: str, app_name: str) -> None:
    app = on_asyncio(url, app_name, bootsteps=STEPS, services=[service(serve, process_kinds=KINDS)])
    clicks = app.stream("clicks", str)

    @app.timer(0.01)
    async def tick() -> None:
        note("timer")

    @app.on_start
    async def begin() -> None:
        note("start")

    @app.processor(clicks)
    async def count(events: StreamEvents[str]) -> None:
        async for _ in events.records():
            note("processor")

    @app.processor(clicks)
    def count_in_thread(events: Any) -> None:
        for _ in events.records():
            note("processor in a thread")

    async with working(app):
        await clicks.asend("one")
        names = ("timer", "start", "step", "step on Trio", "service", "processor", "processor in a thread")
        await until(lambda: all(NOTES[name] for name in names))
    expected = dict.fromkeys(names, "asyncio") | {"step on Trio": "trio", "processor in a thread": "thread"}
    assert {name: NOTES[name][0] for name in names} == expected
    app.close()


async def test_sources_and_sinks_run_on_the_applications_loop(url: str, app_name: str) -> None:
    app = on_asyncio(url, app_name, bootsteps=STEPS)
    sources = [app.source(Watch), app.source(watch_once), app.source(watch_on_trio, loop="trio")]
    clicks = app.stream("clicks", str)
    clicks.subscribe(Kept())

    @app.task(source=sources, sinks=[Kept(), KeptOnTrio()])
    async def take(document: SourceDocument) -> None:
        note("document")

    async with working(app, page=ROUTER), working(app):
        names = (
            *("source class", "source generator", "source on Trio", "document", "sink", "sink on Trio"),
            *("step", "step on Trio"),
        )
        await until(lambda: all(NOTES[name] for name in names))
        del NOTES["sink"]
        await clicks.asend("one")
        await until(lambda: bool(NOTES["sink"]))
    closing = ("source generator closed", "sink closed", "close on Trio")
    expected = {name: "trio" if name.endswith("Trio") else "asyncio" for name in (*names, *closing)}
    assert {name: (NOTES[name] or ["never"])[0] for name in expected} == expected
    app.close()


async def test_steps_of_a_scheduler_run_on_the_applications_loop(url: str, app_name: str) -> None:
    app = on_asyncio(url, app_name, bootsteps=STEPS, services=[service(serve, process_kinds=KINDS)])
    async with working(app, page=SCHEDULER):
        await until(lambda: bool(NOTES["service"]))
    assert dict(NOTES) == {"step": ["asyncio"], "step on Trio": ["trio"], "service": ["asyncio"]}
    app.close()


async def use_library(name: str) -> None:
    """Do what needs asyncio, and note where the caller runs."""
    await asyncio.sleep(0)
    await asyncio.to_thread(note, f"thread of {name}")
    note(name)


async def use_trio(name: str) -> None:
    """The same for Trio."""
    await trio.lowlevel.checkpoint()
    note(f"{name} on Trio")


def declare_checks(app: App) -> None:
    """Declare checks on both loops, and tasks that are checks."""

    @app.health_check
    async def check() -> None:
        await use_library("check")

    @app.health_check(loop="trio")
    async def check_on_trio() -> None:
        await use_trio("check")

    @app.task
    async def ping() -> None:
        await use_library("task as a check")

    @app.task(loop="trio")
    async def ping_on_trio() -> None:
        await use_trio("task as a check")

    check.subscribe(ping)
    check.subscribe(ping_on_trio)


def declare_commands_and_rules(app: App) -> None:
    """Declare commands and limit rules on both loops."""

    @app.command
    async def count(to: int) -> int:
        await use_library("command")
        return to + 1

    @app.command(loop="trio")
    async def count_on_trio() -> None:
        await use_trio("command")

    @app.limit_rule
    async def rule(_snapshot: object) -> None:
        await use_library("rule")

    @app.limit_rule(loop="trio")
    async def rule_on_trio(_snapshot: object) -> None:
        await use_trio("rule")


async def test_checks_commands_and_limit_rules_run_on_the_applications_loop(url: str, app_name: str) -> None:
    app = on_asyncio(url, app_name)
    declare_checks(app)
    declare_commands_and_rules(app)
    async with working(app, name="one"), working(app, page=SCHEDULER, name="two"):
        (reply,) = await app.control.asend("count", {"to": 6}, to="one")
        assert reply.answer == 7
        await app.control.asend("count-on-trio", to="one")
        names = ("check", "task as a check", "command", "rule")
        names_on_trio = ("check on Trio", "task as a check on Trio", "command on Trio", "rule on Trio")
        await until(lambda: all(NOTES[name] for name in (*names, *names_on_trio)))
    found = {name: where[0] for name, where in NOTES.items()}
    assert found == {
        **dict.fromkeys(names, "asyncio"),
        **dict.fromkeys(names_on_trio, "trio"),
        **{f"thread of {name}": "thread" for name in names},
    }
    app.close()


async def test_errors_and_timeouts_of_checks_and_commands_on_asyncio_are_reported(
    url: str, app_name: str
) -> None:
    app = on_asyncio(url, app_name)

    @app.health_check(period=1, timeout=0.05)
    async def slow() -> None:
        await asyncio.sleep(3600)

    @app.health_check
    async def broken() -> None:
        raise ConnectionError("no bank")

    @app.command
    async def refuse() -> None:
        raise CommandRefused("not today")

    @app.command
    async def stop() -> None:
        raise SystemExit

    with Lines() as lines:
        async with working(app):
            await until(lambda: len(lines.of("health:check-failed")) == 2)
            (refused,) = await app.control.asend("refuse")
            (stopped,) = await app.control.asend("stop")
    why = {line["check"]: line["why"] for line in lines.of("health:check-failed")}
    assert why == {"slow": "took longer than its 0.05 s", "broken": "ConnectionError: no bank"}
    assert "not today" in str(refused)
    assert "it was stopped before it returned" in str(stopped)
    app.close()


def test_a_loop_that_a_check_a_command_or_a_rule_cannot_have_is_refused(app_name: str) -> None:
    app = App(app_name)
    declares: dict[str, Any] = {
        "health check": app.health_check,
        "command": app.command,
        "limit rule": app.limit_rule,
    }
    for what, declare in declares.items():
        with pytest.raises(Misconfigured, match=f"{what} .*loop is 'curio': give 'trio' or 'asyncio'"):
            declare(loop="curio", name="one")(watch_on_trio)
    for what, declare in declares.items():
        with pytest.raises(
            Misconfigured, match=f"{what} .*two.* is not async: loop='asyncio' is for async def"
        ):
            declare(loop="asyncio", name="two")(lambda *_snapshot: None)
    with pytest.raises(
        Misconfigured, match="health check bank: loop='asyncio': a Publisher has no asyncio loop"
    ):
        app.publisher_check(loop="asyncio", name="bank")(step)


def test_steps_on_asyncio_run_without_a_worker_in_tests(url: str, app_name: str) -> None:
    app = on_asyncio(url, app_name, bootsteps=STEPS)
    with running_steps(app):
        assert dict(NOTES) == {"step": ["asyncio"], "step on Trio": ["trio"]}
    app.close()


def test_an_event_loop_that_does_not_exist_is_refused(app_name: str) -> None:
    with pytest.raises(Misconfigured, match="loop is 'curio': give 'trio' or 'asyncio'"):
        App(app_name, loop="curio")  # type: ignore[arg-type]
    app = App(app_name)
    with pytest.raises(Misconfigured, match="source 'watch': loop is 'curio': give 'trio' or 'asyncio'"):
        app.source(Watch, loop="curio")  # type: ignore[call-overload]
    with pytest.raises(Misconfigured, match="source 'list-bodies' is not async: loop='asyncio'"):
        app.source(list_bodies, every=1.0, loop="asyncio")


def list_bodies() -> list[str]:
    """A source in a thread."""
    return []
