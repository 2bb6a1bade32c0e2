"""Link events: what happens to a connection, as values that others may log or count.

Floor: broker. Reads: nothing. Writes: nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkConnected:
    """The handshake succeeded. `client_id` is the server's handle for this connection."""

    link: str
    where: str
    server: str
    version: str
    client_id: int


@dataclass(frozen=True, slots=True)
class LinkConnectFailed:
    """An attempt to connect failed; the next one comes after `pause` seconds."""

    link: str
    where: str
    reason: str
    pause: float


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A working connection ended.

    `failed` calls may or may not have run, `kept` calls wait for the next connection.
    """

    link: str
    where: str
    reason: str
    failed: int
    requeued: int


@dataclass(frozen=True, slots=True)
class BreakerOpened:
    """Too many failures in a row: calls are refused at once. A probe goes out after `period` seconds. `is_error`: that
    happens too often (C41)."""

    link: str
    where: str
    reason: str
    probe_in: float
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class BreakerClosed:
    """The probe succeeded: calls flow again."""

    link: str
    where: str


LinkEvent = LinkConnected | LinkConnectFailed | LinkLost | BreakerOpened | BreakerClosed


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """Counters of one link: commands sent, writes they took, successful handshakes, and what is under way now."""

    commands: int
    batches: int
    connects: int
    unsent: int
    inflight: int


def ignore_event(_event: LinkEvent) -> None:
    """Watch nothing."""
