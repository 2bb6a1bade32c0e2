"""Log messages again that could not be written: the process sends them to its own inbox.

Each message is retried three times at most, after a second or more. It is lost, and counted, if there is no space for
it, if it cannot be sent, or after the last retry. This module itself logs nothing, to prevent an endless loop.
"""

from collections import deque
from typing import Any, ClassVar

import msgspec
import trio

from celery5.errors import CommandRefused
from celery5.logs.lines import Message
from celery5.logs.log import MAX_RETRIES, Level, Log
from celery5.protocol.commands.definitions import (
    LOG_AGAIN,
    SET_LOG_LEVEL,
    LogAgainParameters,
    LogLevelParameters,
)
from celery5.services.commands.dispatcher import CommandHandler, SelfCommandSender, handle

POLL_INTERVAL = 1.0
"""Seconds between two looks at the log while nothing is to be retried."""
BATCH = 100
"""The most messages in one command."""
MAX_MESSAGE_SIZE = 48 * 1024
"""The most bytes of messages in one command, so that the inbox accepts it."""
RETRY_DELAYS = (1.0, 5.0, 20.0)
"""Seconds before the first, the second and the third retry of a message."""
FINAL_SEND_TIMEOUT = 1.0
"""Seconds in which the remaining messages are sent when the process stops."""


class LogRetry:
    """Retries the messages that the log could not write. Without a log writer it has nothing to do."""

    only_observes: ClassVar = True

    def __init__(self, *, log: Log, self_commands: SelfCommandSender) -> None:
        self._log = log
        self._self_commands = self_commands
        self._waiting: deque[Message] = deque()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send messages until cancelled; then what is left, for a second at most."""
        task_status.started()
        writer = self._log.writer
        if writer is None:
            await trio.sleep_forever()
        writer.start_retries()
        try:
            while True:
                if not self._waiting:
                    self._waiting.extend(writer.take_unwritten(BATCH))
                if self._waiting:
                    await trio.sleep(RETRY_DELAYS[min(_count_retries(self._waiting[0]), MAX_RETRIES - 1)])
                    await self._send_batch()
                else:
                    await trio.sleep(POLL_INTERVAL)
        finally:
            self._waiting.extend(writer.stop_retries())
            with trio.CancelScope(shield=True), trio.move_on_after(FINAL_SEND_TIMEOUT):
                while self._waiting:
                    await self._send_batch(last=True)
            self._count_lost(len(self._waiting))
            self._waiting.clear()

    async def _send_batch(self, *, last: bool = False) -> None:
        """Send the oldest messages. A message that the inbox does not accept has used up one retry."""
        encoded, batch = self._take_batch()
        if not batch:
            return
        try:
            await self._self_commands.send(LOG_AGAIN.name, {"messages": encoded})
        except trio.Cancelled:
            self._waiting.extendleft(reversed(batch))
            raise
        except Exception:  # Redis is unreachable, or the inbox refuses; logging that would repeat the problem
            retries = [_with_retry_counted(message) for message in batch]
            kept = [] if last else [message for message in retries if _count_retries(message) < MAX_RETRIES]
            self._waiting.extend(kept)
            self._count_lost(len(batch) - len(kept))

    def _take_batch(self) -> tuple[list[Any], list[Message]]:
        """Return the next messages, in their JSON form and as they are. Those without a JSON form are lost."""
        encoded: list[Any] = []
        batch: list[Message] = []
        size = 0
        while self._waiting and len(batch) < BATCH:
            message = self._waiting[0]
            try:
                raw = msgspec.json.encode(_with_retry_counted(message), enc_hook=str)
            except Exception:  # values of user code, with methods of their own
                raw = b""
            if size + len(raw) > MAX_MESSAGE_SIZE and batch:
                break
            self._waiting.popleft()
            if not 0 < len(raw) <= MAX_MESSAGE_SIZE:
                self._count_lost(1)
                continue
            size += len(raw)
            encoded.append(msgspec.json.decode(raw))
            batch.append(message)
        return encoded, batch

    def _count_lost(self, count: int) -> None:
        if count and self._log.writer is not None:
            self._log.writer.report_lost(count, "they could not be brought again")


def log_handlers(log: Log) -> dict[str, CommandHandler]:
    """Return the handlers of the log commands: `set-log-level`, and `log-again`, which a process sends to itself."""

    async def set_log_level(parameters: LogLevelParameters) -> object:
        if log.writer is None:
            raise CommandRefused("this process does not write its log itself: its level is its host's to set")
        before: Level = log.writer.level
        log.writer.set_level(parameters.level)
        log.event("log:level-changed", now=parameters.level, before=before)
        return {"level": parameters.level, "before": before}

    async def log_again(parameters: LogAgainParameters) -> object:
        if log.writer is None:
            return {"taken": 0}
        return {"taken": log.writer.requeue(parameters.messages)}

    return {**handle(SET_LOG_LEVEL, set_log_level), **handle(LOG_AGAIN, log_again)}


def _count_retries(message: Message) -> int:
    """Return how often a message was retried."""
    retries = message.get("again", 0)
    return retries if isinstance(retries, int) else MAX_RETRIES


def _with_retry_counted(message: Message) -> Message:
    return {**message, "again": _count_retries(message) + 1}
