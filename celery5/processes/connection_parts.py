"""Connection Parts: how a process' connections to Redis are made that take more than a constructor.

Floor: processes. Reads: nothing. Writes: nothing.
"""

from collections.abc import Sequence
from typing import Protocol

from celery5.bootsteps.listen import Hears
from celery5.broker.endpoint import Endpoint
from celery5.broker.on_trio import ParkedRedis, PushRedis, Timing, TrioRedis
from celery5.processes.link_log import LinkLog


class LooksAgain(Protocol):
    """A part that looks again when something may have been missed."""

    def look_again(self) -> None: ...


def make_reader(
    endpoint: Endpoint, redis: TrioRedis, timing: Timing, name: str, watch: LinkLog
) -> ParkedRedis:
    """The connection for blocking reads; the shared one ends its waits."""
    return ParkedRedis(endpoint=endpoint, control=redis, timing=timing, name=name, watch=watch)


def make_push(
    endpoint: Endpoint,
    hearers: dict[bytes, Hears],
    lookers: Sequence[LooksAgain],
    timing: Timing,
    name: str,
    watch: LinkLog,
) -> PushRedis:
    """The connection that listens. While it was down, anything may have been said."""

    def heard(channel: bytes, payload: bytes) -> None:
        hearers[channel](channel, payload)

    def again() -> None:
        for each in lookers:
            each.look_again()

    return PushRedis(
        endpoint=endpoint, on_message=heard, on_connected=again, timing=timing, name=name, watch=watch
    )
