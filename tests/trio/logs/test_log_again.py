"""Log Again: messages that could not be written come again, three times at most, and then are counted (C16)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import trio

from celery5.errors import BrokerUnavailable, CommandRefused
from celery5.logs.lines import Message
from celery5.logs.log import MAX_RETRIES, MAX_UNWRITTEN, Level, Log, LogWriter
from celery5.services.commands import log_retry
from celery5.services.commands.dispatcher import CommandRegistry, ImmediateCommands
from celery5.services.commands.log_retry import MAX_MESSAGE_SIZE, LogRetry, log_handlers


class Outlet:
    """An outlet that is broken so many times."""

    def __init__(self) -> None:
        self.broken = 0
        self.tries = 0
        self.messages: list[Message] = []

    def write(self, messages: Sequence[Message]) -> int:
        if any(message.get("message_type") == "celery5:x" for message in messages):
            self.tries += 1
        if self.broken > 0:
            self.broken -= 1
            raise OSError("broken")
        self.messages += messages
        return len(messages)


class Post:
    """An inbox that keeps what it gets, or has nobody who takes it."""

    def __init__(self, commands: CommandRegistry) -> None:
        self.works = True
        self.sizes: list[int] = []
        self._direct = ImmediateCommands(commands=commands)

    async def send(self, command: str, parameters: Mapping[str, Any], /) -> None:
        await trio.lowlevel.checkpoint()
        if not self.works:
            raise BrokerUnavailable("away")
        self.sizes.append(len(parameters["messages"]))
        await self._direct.send(command, parameters)


class Desk:
    """A process that writes its log to `outlet`, and brings again what it could not write."""

    def __init__(self, nursery: trio.Nursery, *, level: Level = "info") -> None:
        self.outlet = Outlet()
        self.journal = LogWriter(self.outlet, level=level)
        self.log = Log(worker="w", app="a", writer=self.journal)
        self.commands = CommandRegistry(handlers=log_handlers(self.log))
        self.post = Post(self.commands)
        self.service = LogRetry(log=self.log, self_commands=self.post)
        self.nursery = nursery

    def say(self, **fields: Any) -> None:
        """One message."""
        self.journal({"message_type": "celery5:x", "level": "info", "worker": "w", **fields})

    @property
    def said(self) -> list[Any]:
        """The numbers of the messages that were written."""
        return [
            message["n"] for message in self.outlet.messages if message.get("message_type") == "celery5:x"
        ]

    async def until(self, condition: Any) -> None:
        """Wait for the log's thread."""
        with trio.fail_after(30):
            while not condition():
                await trio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_retry, "RETRY_DELAYS", (0.02, 0.02, 0.02))
    monkeypatch.setattr(log_retry, "POLL_INTERVAL", 0.005)


@pytest.fixture
def desk(nursery: trio.Nursery) -> Iterator[Desk]:
    one = Desk(nursery)
    with one.journal:
        one.journal._buffer.clear()
        yield one


async def test_log_lines_that_were_not_written_come_back_through_the_inbox(desk: Desk) -> None:
    await desk.nursery.start(desk.service.run)
    desk.outlet.broken = 2
    desk.say(n=1)
    desk.say(n=2)
    await desk.until(lambda: desk.said == [1, 2])
    assert desk.post.sizes == [2, 2]
    assert {message["again"] for message in desk.outlet.messages if "n" in message} == {2}
    assert (desk.journal.counts.lost, desk.journal.counts.retried) == (0, 4)


async def test_a_message_comes_again_three_times_and_then_is_counted_as_lost(desk: Desk) -> None:
    await desk.nursery.start(desk.service.run)
    desk.outlet.broken = 1000
    desk.say(n=1)
    await desk.until(lambda: desk.journal.counts.lost == 1)
    assert desk.outlet.tries == 1 + MAX_RETRIES
    assert desk.post.sizes == [1] * MAX_RETRIES
    desk.outlet.broken = 0
    await desk.until(
        lambda: any(message["message_type"] == "celery5:log:dropped" for message in desk.outlet.messages)
    )
    assert desk.said == []


async def test_log_line_is_lost_after_three_tries_without_an_inbox(desk: Desk) -> None:
    await desk.nursery.start(desk.service.run)
    desk.post.works = False
    desk.outlet.broken = 1
    desk.say(n=1)
    await desk.until(lambda: desk.journal.counts.lost == 1)
    desk.outlet.broken, desk.post.works = 1, True
    desk.say(n=2)
    await desk.until(lambda: desk.said == [2])


async def test_what_the_inbox_says_never_comes_through_the_inbox(desk: Desk) -> None:
    await desk.nursery.start(desk.service.run)
    desk.outlet.broken = 1
    desk.say(message_type="celery5:inbox:command-refused")
    await desk.until(lambda: desk.journal.counts.lost == 1)
    assert desk.post.sizes == []


async def test_waiting_log_lines_are_bounded_and_fit_the_inbox(desk: Desk) -> None:
    await desk.nursery.start(desk.service.run)
    text = "x" * 2000
    many: list[Message] = [
        {"message_type": "celery5:x", "worker": "w", "n": n, "text": text} for n in range(1500)
    ]
    desk.journal._retry(many, OSError("broken"))
    assert (desk.journal.counts.retried, desk.journal.counts.lost) == (MAX_UNWRITTEN, 1500 - MAX_UNWRITTEN)
    await desk.until(lambda: len(desk.said) == MAX_UNWRITTEN)
    assert max(desk.post.sizes) * len(text) <= MAX_MESSAGE_SIZE
    desk.journal._retry(
        [{"message_type": "celery5:x", "n": 0, "text": "x" * MAX_MESSAGE_SIZE}], OSError("broken")
    )
    await desk.until(lambda: desk.journal.counts.lost == 1500 - MAX_UNWRITTEN + 1)


async def test_a_worker_that_stops_posts_what_is_left_and_waits_for_nothing_else(desk: Desk) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(desk.service.run)
            desk.journal._retry([{"message_type": "celery5:x", "worker": "w", "n": 1}], OSError("broken"))
            scope.cancel()
    assert desk.post.sizes == [1]
    await desk.until(lambda: desk.said == [1])
    desk.journal._retry([{"message_type": "celery5:x", "worker": "w", "n": 2}], OSError("broken"))
    assert desk.journal.counts.lost == 1, "nobody would take it any more"


async def test_messages_are_kept_until_the_last_service_that_retries_them_has_ended(desk: Desk) -> None:
    message: Message = {"message_type": "celery5:x", "worker": "w", "n": 1}
    desk.journal.start_retries()
    desk.journal.start_retries()
    assert desk.journal.stop_retries() == []
    desk.journal._retry([message], OSError("broken"))
    assert (desk.journal.stop_retries(), desk.journal.counts.lost) == ([message], 0)


async def test_the_level_is_set_while_it_runs_and_a_bad_one_is_refused(desk: Desk) -> None:
    desk.say(n=1, level="debug")
    answer = await desk.commands.perform("set-log-level", {"level": "debug"})
    assert answer == {"level": "debug", "before": "info"}
    desk.say(n=2, level="debug")
    await desk.until(lambda: desk.said == [2])
    for bad in ("loud", None, 10, ["debug"]):
        with pytest.raises(CommandRefused, match="give one of debug, info, warning, error"):
            await desk.commands.perform("set-log-level", {"level": bad})
    with pytest.raises(CommandRefused, match="log-again: messages is 'all': give a list of log messages"):
        await desk.commands.perform("log-again", {"messages": "all"})


async def test_a_process_that_does_not_write_its_log_refuses_to_set_its_level() -> None:
    commands = CommandRegistry(handlers=log_handlers(Log(worker="w", app="a")))
    with pytest.raises(CommandRefused, match="does not write its log itself"):
        await commands.perform("set-log-level", {"level": "debug"})
    assert await commands.perform("log-again", {"messages": []}) == {"taken": 0}
