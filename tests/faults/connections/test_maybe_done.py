"""Maybe done: an error that comes after a command was sent says so, whatever ended the next attempt.

A reply is lost and nobody listens any more; then the second attempt cannot even connect. That error must not look as if
nothing had been sent: a caller would send the job once more, as a second job.
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis as blocking
import trio

from celery5 import App, Event, every
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.connections import long_operations
from celery5.errors import BacklogFull, BrokerError, BrokerUnavailable, NotReplicated
from celery5.protocol.job.job import new_id
from celery5.protocol.publisher.frames import (
    FRAME_OVERHEAD_BYTES,
    DaemonMessage,
    FrameReader,
    GroupReply,
    PublishReply,
    PublishRequest,
    Welcome,
    decode_client_message,
    encode_frame,
)
from tests.faults.connections.proxy import FaultyProxy
from tests.redis.connections.colours import COLOURS, POOLED, Here, live, raw

MOST_COMMANDS = 30
"""No call here makes more commands than this."""


class Baked(Event):
    """A loaf is ready."""

    number: int


def application(name: str, url: str, **settings: Any) -> App:
    """An application with one task for each way in which a job is sent."""
    app = App(name, broker=url, **{"backlog": 0, **settings})

    @app.task(name="plain")
    async def plain(number: int) -> int:
        return number

    @app.task(name="fair", fair_key="number")
    async def fair(number: int) -> int:
        return number

    app.event(name="bread.Baked")(Baked)
    return app


Twins = tuple[Callable[[App], Any], Callable[[App], Awaitable[Any]]]


def _sends(**options: Any) -> Twins:
    """Send one job with these options."""
    return (
        lambda app: app.tasks["plain"].options(**options).delay(1),
        lambda app: app.tasks["plain"].options(**options).adelay(1),
    )


def _job(app: App) -> Any:
    return app.result("some-job", queue="default")


CALLS: dict[str, Twins] = {
    "publish": _sends(),
    "publish with a priority": _sends(priority="high"),
    "schedule": _sends(countdown=600),
    "claim a key": _sends(key="one"),
    "take turns": (lambda app: app.tasks["fair"].delay(1), lambda app: app.tasks["fair"].adelay(1)),
    "publish many": (
        lambda app: app.send_many([app.tasks["plain"].s(n) for n in range(450)]),
        lambda app: app.asend_many([app.tasks["plain"].s(n) for n in range(450)]),
    ),
    "send events": (
        lambda app: app.events.send([Baked(number=1)]),
        lambda app: app.events.asend([Baked(number=1)]),
    ),
    "revoke": (lambda app: _job(app).revoke(), lambda app: _job(app).arevoke()),
    "forget a result": (lambda app: _job(app).forget(), lambda app: _job(app).aforget()),
    "read a status": (lambda app: _job(app).status(), lambda app: _job(app).astatus()),
    "command": (
        lambda app: app.control.ping(to="nobody", timeout=0.1),
        lambda app: app.control.aping(to="nobody", timeout=0.1),
    ),
    "lift a limit": (
        lambda app: app.limits.lift("fair"),
        lambda app: app.limits.alift("fair"),
    ),
    "add a schedule": (
        lambda app: app.schedule.add(app.tasks["plain"].s(1), every(600), name=new_id()),
        lambda app: app.schedule.aadd(app.tasks["plain"].s(1), every(600), name=new_id()),
    ),
    "purge dead letters": (lambda app: app.dlq.purge(), lambda app: app.dlq.apurge()),
}


def in_colour(
    colour: str, story: Callable[[Callable[[Twins], Awaitable[Any]]], Awaitable[Any]], app: App
) -> Any:
    """Tell a story in one colour; it is given what makes a call there. Blocks."""

    async def plainly(twins: Twins) -> Any:
        return twins[0](app)

    async def awaiting(twins: Twins) -> Any:
        return await twins[1](app)

    if colour == "trio":
        return trio.run(story, awaiting)
    if colour == "asyncio":
        return asyncio.run(story(awaiting))  # type: ignore[arg-type]
    try:
        story(plainly).__await__().send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("plain Python waited for an event loop")


async def one_round(
    proxy: FaultyProxy, app: App, colour: str, call: Twins, passing: int
) -> BrokerError | None:
    """Make a call twice, of which the second one loses the reply to a command; gives what it raised."""

    async def story(make: Callable[[Twins], Awaitable[Any]]) -> BrokerError | None:
        await make(call)  # connects, loads the scripts
        proxy.lose_reply(passing=passing)
        try:
            await make(call)
        except BrokerError as error:
            return error
        return None

    try:
        return await trio.to_thread.run_sync(partial(in_colour, colour, story, app))
    finally:
        app.close()
        proxy.accept()


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long operations, such as a purge, wait for an outage to end: here the first error is looked at."""
    monkeypatch.setattr(long_operations, "MAX_OUTAGE", 0.0)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("name", CALLS)
async def test_error_after_any_lost_reply_says_that_the_call_may_have_run(
    proxy: FaultyProxy, app_name: str, colour: str, name: str
) -> None:
    raised = 0
    for passing in range(MOST_COMMANDS):
        app = application(app_name, proxy.url)
        error = await one_round(proxy, app, colour, CALLS[name], passing)
        if proxy.loss is not None:
            break  # the call makes no more commands than that
        if error is not None:
            raised += 1
            assert error.maybe_done, f"command {passing + 1}: {error!r}"
    else:
        raise AssertionError("the call makes more commands than this test expects")
    proxy.loss = None
    assert raised


@pytest.mark.parametrize("colour", COLOURS)
async def test_a_job_whose_reply_was_lost_is_there_and_the_error_admits_it(
    proxy: FaultyProxy, app_name: str, colour: str, redis_client: blocking.Redis
) -> None:
    app = application(app_name, proxy.url)
    error = await one_round(proxy, app, colour, CALLS["publish"], 0)
    assert isinstance(error, BrokerUnavailable)
    assert error.maybe_done
    assert redis_client.xlen(app.queue("default").stream) == 2


@pytest.mark.parametrize("colour", COLOURS)
async def test_what_was_never_sent_is_not_said_to_have_run(
    proxy: FaultyProxy, app_name: str, colour: str
) -> None:
    app = application(app_name, proxy.url)
    proxy.refuse()

    async def story(make: Callable[[Twins], Awaitable[Any]]) -> BrokerError:
        with pytest.raises(BrokerUnavailable) as caught:
            await make(CALLS["publish"])
        return caught.value

    error = await trio.to_thread.run_sync(partial(in_colour, colour, story, app))
    assert not error.maybe_done
    app.close()
    proxy.accept()


REFUSALS = (
    "LOADING Redis is loading",
    "OOM command not allowed",
    "READONLY a replica",
    "BUSY a script runs",
    "NOPERM no",
)


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("colour", COLOURS)
async def test_a_second_attempt_that_is_refused_says_nothing_about_the_first(
    proxy: FaultyProxy, app_name: str, colour: str, refusal: str
) -> None:
    async def story(here: Here) -> bool:
        await here.redis.perform(raw("PING"))
        proxy.cut_reply("INCR", after=0)
        proxy.answer("INCR", refusal)
        with pytest.raises(BrokerError) as caught:
            await here.redis.perform(raw("INCR", app_name, repeatable=True))
        assert await here.redis.perform(raw("DEL", app_name)) == 1
        return caught.value.maybe_done

    assert await trio.to_thread.run_sync(live, colour, proxy.url, story)


@pytest.mark.parametrize("colour", POOLED)
async def test_refused_handshake_leaves_the_lost_attempt_undecided(
    proxy: FaultyProxy, app_name: str, colour: str
) -> None:
    async def story(here: Here) -> bool:
        await here.redis.perform(raw("PING"))
        proxy.cut_reply("INCR", after=0)
        proxy.answer("HELLO", "WRONGPASS invalid username-password pair")
        with pytest.raises(BrokerError) as caught:
            await here.redis.perform(raw("INCR", app_name, repeatable=True))
        await here.redis.perform(raw("DEL", app_name))
        return caught.value.maybe_done

    assert await trio.to_thread.run_sync(live, colour, proxy.url, story)


@pytest.mark.parametrize("colour", COLOURS)
async def test_refused_command_does_not_hide_that_others_ran(
    proxy: FaultyProxy, app_name: str, colour: str
) -> None:
    async def story(here: Here) -> list[bool]:
        found: list[bool] = []
        for others in ([raw("INCR", app_name)], []):
            proxy.answer("SET", "OOM command not allowed")
            with pytest.raises(BrokerError, match="OOM") as caught:
                await here.redis.perform_all([*others, raw("SET", app_name, "1")])
            found.append(caught.value.maybe_done)
        await here.redis.perform(raw("DEL", app_name))
        return found

    assert await trio.to_thread.run_sync(live, colour, proxy.url, story) == [True, False]


@pytest.mark.parametrize("colour", COLOURS)
async def test_unreachable_broker_does_not_hide_jobs_of_another(
    proxy: FaultyProxy, server: EmbeddedServer, nursery: trio.Nursery, app_name: str, colour: str
) -> None:
    second = FaultyProxy(str(server.socket))
    await nursery.start(second.run)
    second.refuse()

    def on_both(first: str, other: str) -> App:
        app = application(app_name, first, brokers={"other": other}, routes={"far": "other"})

        @app.task(name="far", queue="far")
        async def far(number: int) -> int:
            return number

        return app

    both: Twins = (
        lambda app: app.send_many([app.tasks["plain"].s(1), app.tasks["far"].s(1)]),
        lambda app: app.asend_many([app.tasks["plain"].s(1), app.tasks["far"].s(1)]),
    )
    everywhere: Twins = (
        lambda app: app.limits.lift("fair"),
        lambda app: app.limits.alift("fair"),
    )
    for app, call in ((on_both(proxy.url, second.url), both), (on_both(second.url, proxy.url), both),
                      (on_both(proxy.url, second.url), everywhere)):  # fmt: skip

        async def story(make: Callable[[Twins], Awaitable[Any]], call: Twins = call) -> BrokerError:
            with pytest.raises(BrokerUnavailable) as caught:
                await make(call)
            return caught.value

        error = await trio.to_thread.run_sync(partial(in_colour, colour, story, app))
        assert error.maybe_done
        app.close()
    second.accept()


async def test_full_backlog_says_that_a_job_in_flight_may_be_published(
    proxy: FaultyProxy, app_name: str
) -> None:
    # Fewer than the last of three commands has: the replies to the first two may have come or not.
    app = application(app_name, proxy.url, backlog=10)
    error = await one_round(proxy, app, "blocking", CALLS["publish many"], 2)
    assert isinstance(error, BacklogFull)
    assert error.maybe_done


class Forgetful:
    """A Publisher daemon that takes jobs and ends the connection instead of answering; the next time it is full."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(10)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def close(self) -> None:
        """Wait until it has said all that it has to say."""
        self._thread.join(20)
        self._listener.close()

    def _work(self) -> None:
        for answers in ([GroupReply(), None], [GroupReply("full", "no room")]):
            line, _ = self._listener.accept()
            with line:
                line.settimeout(10)
                frames = FrameReader(FRAME_OVERHEAD_BYTES)
                _heard(line, frames)
                line.sendall(encode_frame(Welcome()))
                for answer in answers:
                    hand = _heard(line, frames)
                    assert isinstance(hand, PublishRequest)
                    if answer is not None:
                        word: DaemonMessage = PublishReply((answer,) * len(hand.groups))
                        line.sendall(encode_frame(word))


def _heard(line: socket.socket, frames: FrameReader) -> Any:
    while (body := frames.next_frame()) is None:
        frames.feed(line.recv(65536))
    return decode_client_message(body)


@pytest.fixture
def forgetful(short_path: Path) -> Iterator[Path]:
    """The socket of such a daemon."""
    path = short_path / "publisher.sock"
    daemon = Forgetful(path)
    yield path
    daemon.close()


def test_full_daemon_leaves_unanswered_messages_undecided(forgetful: Path, url: str, app_name: str) -> None:
    app = application(app_name, url, publisher=f"unix://{forgetful}")
    app.tasks["plain"].delay(1)
    with pytest.raises(BacklogFull) as caught:
        app.tasks["plain"].delay(2)
    app.close()
    assert caught.value.maybe_done


def test_jobs_that_too_few_replicas_have_are_published() -> None:
    assert NotReplicated("", ids=("a",), replicas=0, wanted=1).maybe_done
