"""A connection on which the server pushes messages that are published on channels.

Messages that are published while the connection is down are lost. So subscriptions are renewed after each reconnect,
and then `on_connected` is called: subscribers must read again what the messages would have announced.

A SUBSCRIBE has no reply of its own, only pushed frames or an error. It is sent together with a PING, whose reply comes
after the frames and so confirms them. An error is one more reply, which the request allows.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from celery5.broker.call import Word
from celery5.broker.connection.exchange import ReplyError, pack_commands
from celery5.broker.connection.link import Link, LinkEvent, SingleConnection, ignore_event
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.connection.transport import Connect, connect
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_reply
from celery5.errors import BrokerError, BrokerUnavailable


class PushRedis(SingleConnection):
    """One connection that listens to channels.

    `on_message(channel, payload)` is called for each message, in order, from the reader: it must be quick and
    must not block. No message is queued, so no queue can grow. `on_connected` is called after each handshake, when
    the current subscriptions are confirmed. The other arguments are those of `TrioRedis`.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        on_message: Callable[[bytes, bytes], None],
        on_connected: Callable[[], None] = lambda: None,
        timing: Timing = Timing(),  # noqa: B008  frozen
        name: str = "celery5-push",
        watch: Callable[[LinkEvent], None] = ignore_event,
        connect: Connect = connect,
    ) -> None:
        link = Link(
            endpoint=endpoint,
            timing=timing,
            name=name,
            watch=watch,
            resp=3,
            on_connected=self._renew,
            on_push=self._pushed,
            connect=connect,
        )
        super().__init__(link)
        self._on_message = on_message
        self._on_connected = on_connected
        self._channels: set[bytes] = set()
        self._up = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connected and subscribed until cancelled; as `TrioRedis.run`."""
        await self._run_beside(self._keep_subscribed, task_status)

    async def subscribe(self, *channels: str | bytes) -> None:
        """Listen to these channels from now on, over reconnects too; returns when the server has confirmed.

        What is published after the return is heard. Raises BrokerUnavailable when there is no confirmation
        within `timing.reply` (the channels stay wanted and are subscribed when the connection is back), and
        BrokerDenied when the ACL forbids it (they do not).
        """
        names = [name_channel(channel) for channel in channels]
        if not names:
            return
        # Kept only when the outcome is known: a renewal in between must not send a channel that may be
        # forbidden.
        try:
            await self._send("SUBSCRIBE", names)
        except BrokerUnavailable:
            self._channels.update(names)
            raise
        self._channels.update(names)

    async def unsubscribe(self, *channels: str | bytes) -> None:
        """Unsubscribe from these channels. Nothing is sent if the connection is down: they will not be renewed."""
        names = [name_channel(channel) for channel in channels]
        self._channels.difference_update(names)
        if names and self._link.connected:
            with suppress(BrokerUnavailable):
                await self._send("UNSUBSCRIBE", names)

    async def _send(self, command: str, names: list[bytes]) -> None:
        commands = [*self._make_commands(command, names), ("PING",)]
        request = PendingRequest(pack_commands(commands), self._link.deadline(), repeatable=False)
        request.allow_error_replies()
        await self._link.perform(request)
        for reply in request.replies or ():
            if type(reply) is ReplyError:
                raise translate_reply(str(reply), where=self._where)

    def _make_commands(self, command: str, names: list[bytes]) -> list[tuple[Word, ...]]:
        return [(command, *names)]

    def _renew(self) -> None:
        self._up.set()

    async def _keep_subscribed(self) -> None:
        while True:
            await self._up.wait()
            self._up = trio.Event()
            try:
                if self._channels:
                    await self._send("SUBSCRIBE", sorted(self._channels))
            except BrokerUnavailable:
                continue  # lost again: the next handshake renews them
            except BrokerError as error:  # a permission that was taken away may be given back
                self._link.reconnect(str(error))
                continue
            self._on_connected()

    def _pushed(self, frame: list[Any]) -> None:
        if frame[0] == b"message":
            self._on_message(frame[1], frame[2])

    @property
    def channels(self) -> frozenset[bytes]:
        """The channels that are subscribed."""
        return frozenset(self._channels)


def name_channel(channel: str | bytes) -> bytes:
    """Return the name of a channel as bytes."""
    return channel.encode() if isinstance(channel, str) else channel
