"""Connection Parts: how a process' connections to Redis are made that take more than a constructor."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol

from celery5.bootsteps.worker_steps import ChannelHandler
from celery5.broker.connection.link import (
    BreakerClosed,
    BreakerOpened,
    LinkConnected,
    LinkConnectFailed,
    LinkEvent,
    LinkLost,
)
from celery5.broker.connection.parked import ParkedRedis
from celery5.broker.connection.push import PushRedis
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.logs.log import Level, Log

_SAID: dict[type, tuple[str, Level]] = {
    LinkConnected: ("redis:connected", "info"),
    LinkConnectFailed: ("redis:connect-failed", "debug"),
    LinkLost: ("redis:lost", "warning"),
    BreakerOpened: ("redis:breaker-opened", "warning"),
    BreakerClosed: ("redis:breaker-closed", "info"),
}


class ConnectionLog:
    """Writes each link event as one log message."""

    def __init__(self, *, log: Log) -> None:
        self._log = log

    def __call__(self, event: LinkEvent) -> None:
        """One event."""
        name, level = _SAID[type(event)]
        fields = asdict(event)
        if fields.pop("is_error", False):
            level = "error"
        self._log.event(name, level, **fields)


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
