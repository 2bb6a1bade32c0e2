"""Log Again: what could not be logged goes to the process' own inbox, to be logged again.

At most three times for a message, one second apart or more; what has no place here, cannot be posted, or has come back
too often is lost and counted. Nothing here writes to the log: it would be about itself for ever.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import trio

from celery5.errors import CommandRefused
from celery5.logs.lines import Message
from celery5.logs.log import LEVELS, MAX_RETRIES, Level, Log
from celery5.protocol.commands.definitions import LOG_AGAIN, SET_LOG_LEVEL
from celery5.services.commands.dispatcher import CommandHandler, SelfCommandSender

MAX_WAITING_MESSAGES = 1000
"""Messages that wait here to be posted."""
BATCH = 100
"""Messages in one command."""
MAX_MESSAGE_SIZE = 48 * 1024
"""Bytes of messages in one command, so that the inbox takes it."""
PAUSES = (1.0, 5.0, 20.0)
"""Seconds before a message is posted for the first, the second and the third time: what broke may mend."""
LAST_LIMIT = 1.0
"""Seconds in which what is left is posted when the worker stops."""


class LogRetry:
    """Brings messages back that the log could not write. Without a journal it has nothing to do."""

    def __init__(self, *, log: Log, self_commands: SelfCommandSender) -> None:
        self._log = log
        self._posts = self_commands
        self._waiting: deque[Message] = deque()
        self._wake = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Post what comes until cancelled; then what is left, for a second at most."""
        token = trio.lowlevel.current_trio_token()

        def bring(messages: list[Message]) -> int:
            """Called in the log's thread. Gives how many are taken."""
            taken = messages[: MAX_WAITING_MESSAGES - len(self._waiting)]
            self._waiting.extend(taken)
            try:
                token.run_sync_soon(self._look, idempotent=True)
            except trio.RunFinishedError:
                self._waiting.clear()
                return 0
            return len(taken)

        if self._log.writer is not None:
            self._log.writer.set_retry_hook(bring)
        task_status.started()
        try:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._waiting:
                    await trio.sleep(PAUSES[min(_times(self._waiting[0]), MAX_RETRIES - 1)])
                    await self._post()
        finally:
            if self._log.writer is not None:
                self._log.writer.set_retry_hook(None)
            with trio.CancelScope(shield=True), trio.move_on_after(LAST_LIMIT):
                while self._waiting:
                    await self._post(last=True)
            self._lose(len(self._waiting))
            self._waiting.clear()

    def _look(self) -> None:
        self._wake.set()

    async def _post(self, *, last: bool = False) -> None:
        """Post the oldest messages. What the inbox does not take has been tried once more, all the same."""
        texts, batch = self._batch()
        if not batch:
            return
        try:
            await self._posts.send(LOG_AGAIN.name, {"messages": texts})
        except trio.Cancelled:
            self._waiting.extendleft(reversed(batch))
            raise
        except Exception:  # Redis is away, or the inbox will not: whoever has no way to say so keeps it
            again = [] if last else [each for each in map(_once_more, batch) if _times(each) < MAX_RETRIES]
            self._waiting.extend(again)
            self._lose(len(batch) - len(again))

    def _batch(self) -> tuple[list[Any], list[Message]]:
        """The next messages, as they travel and as they are. What cannot travel is lost."""
        texts: list[Any] = []
        batch: list[Message] = []
        size = 0
        while self._waiting and len(batch) < BATCH:
            message = self._waiting[0]
            try:
                raw = msgspec.json.encode(_once_more(message), enc_hook=str)
            except Exception:  # values of user code, with methods of their own
                raw = b""
            if size + len(raw) > MAX_MESSAGE_SIZE and batch:
                break
            self._waiting.popleft()
            if not 0 < len(raw) <= MAX_MESSAGE_SIZE:
                self._lose(1)
                continue
            size += len(raw)
            texts.append(msgspec.json.decode(raw))
            batch.append(message)
        return texts, batch

    def _lose(self, count: int) -> None:
        if count and self._log.writer is not None:
            self._log.writer.report_lost(count, "they could not be brought again")


def log_handlers(log: Log) -> dict[str, CommandHandler]:
    """The commands about the log: `set-log-level` with a `level`, and `log-again`, which a process sends to itself."""

    async def set_log_level(parameters: Mapping[str, Any]) -> object:
        level = parameters.get("level")
        if level not in LEVELS:
            raise CommandRefused(f"level is {level!r}: give one of {', '.join(LEVELS)}")
        if log.writer is None:
            raise CommandRefused("this process does not write its log itself: its level is its host's to set")
        before: Level = log.writer.level
        log.writer.set_level(level)
        log.event("log:level-changed", now=level, before=before)
        return {"level": level, "before": before}

    async def log_again(parameters: Mapping[str, Any]) -> object:
        try:
            messages = msgspec.convert(parameters.get("messages"), list[dict[str, Any]])
        except msgspec.ValidationError as error:
            raise CommandRefused(
                f"log-again wants messages, which a process sends to itself: {error}"
            ) from None
        if log.writer is None:
            return {"taken": 0}
        return {"taken": log.writer.requeue(messages)}

    return {SET_LOG_LEVEL.name: set_log_level, LOG_AGAIN.name: log_again}


def _times(message: Message) -> int:
    """How often it has been brought again."""
    times = message.get("again", 0)
    return times if isinstance(times, int) else MAX_RETRIES


def _once_more(message: Message) -> Message:
    return {**message, "again": _times(message) + 1}
