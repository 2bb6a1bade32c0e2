"""Connection Parts: how a process' connections to Redis are made that take more than a constructor.

Floor: processes. Reads: nothing. Writes: nothing.
"""

from collections.abc import Sequence
from typing import Protocol

from celery5.bootsteps.listen import ChannelHandler
from celery5.broker.endpoint import Endpoint
from celery5.broker.on_trio import ParkedRedis, PushRedis, Timing, TrioRedis
from celery5.processes.link_log import ConnectionLog


class ReconnectObserver(Protocol):
    """A part that looks again when something may have been missed."""

    def recheck(self) -> None: ...


def make_reader(
    endpoint: Endpoint, redis: TrioRedis, timing: Timing, name: str, watch: ConnectionLog
) -> ParkedRedis:
    """The connection for blocking reads; the shared one ends its waits."""
    return ParkedRedis(endpoint=endpoint, control=redis, timing=timing, name=name, watch=watch)


def make_push(
    endpoint: Endpoint,
    channel_handlers: dict[bytes, ChannelHandler],
    reconnect_observers: Sequence[ReconnectObserver],
    timing: Timing,
    name: str,
    watch: ConnectionLog,
) -> PushRedis:
    """The connection that listens. While it was down, anything may have been said."""

    def heard(channel: bytes, payload: bytes) -> None:
        channel_handlers[channel](channel, payload)

    def again() -> None:
        for each in reconnect_observers:
            each.recheck()

    return PushRedis(
        endpoint=endpoint, on_message=heard, on_connected=again, timing=timing, name=name, watch=watch
    )
