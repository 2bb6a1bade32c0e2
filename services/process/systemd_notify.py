"""Systemd Notify: tells systemd that the process is ready, alive and stopping.

The protocol is sd_notify(3): one datagram of `NAME=value` lines to the socket named in NOTIFY_SOCKET. The watchdog is
fed from the event loop, so a loop that hangs for longer than `WatchdogSec` gets the process restarted.
"""

import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import TypedDict

import trio

from celery5.protocol.process.liveness import get_beat_interval

SEND_TIMEOUT = 1.0
"""Seconds for which a message that matters is offered again to a systemd that is too busy to read."""


class NotifySettings(TypedDict):
    """What systemd wants to hear: the `address` of its socket and the `interval` of the watchdog's food in seconds."""

    address: str | None
    interval: float | None


def read_notify_settings(environ: Mapping[str, str], pid: int) -> NotifySettings:
    """What systemd asks of the process `pid` through its environment; nothing when it was not started by systemd.

    The interval is a small part of WATCHDOG_USEC: what is killed for its silence has hung nearly as long as that, and
    the status is fresh. Variables that were meant for another process (WATCHDOG_PID), that make no sense, or that name
    no unix socket are as good as absent.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if len(address) < 2 or address[0] not in "/@":
        return {"address": None, "interval": None}
    limit = environ.get("WATCHDOG_USEC", "")
    ours = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
    watched = ours and limit.isascii() and limit.isdigit() and int(limit) > 0
    return {"address": address, "interval": get_beat_interval(int(limit) / 1e6) if watched else None}


def take_notify_settings(environ: MutableMapping[str, str], pid: int) -> NotifySettings:
    """As `from_environment`, and takes it out, so that no child speaks for its parent: systemd listens to one."""
    wanted = read_notify_settings(environ, pid)
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        environ.pop(name, None)
    return wanted


def notify(address: str | None, *lines: str) -> bool:
    """Send one datagram without ever waiting. False when systemd's socket is full.

    A socket that is gone is no reason to stop working: systemd itself acts on what it does not hear.
    """
    if address is None:
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.setblocking(False)
        try:
            line.sendto("\n".join(lines).encode(), f"\0{address[1:]}" if address.startswith("@") else address)
        except BlockingIOError:
            return False
        except OSError:
            return True
    return True


def notify_with_retry(address: str | None, *lines: str) -> None:
    """Send one datagram that matters, in blocking code: again while the socket is full, for a second at most."""
    limit = time.monotonic() + SEND_TIMEOUT
    while not notify(address, *lines) and time.monotonic() < limit:
        time.sleep(0.01)


def _always() -> bool:
    return True


class SystemdNotify:
    """Keeps systemd informed. Without an `address` it does nothing, so every process may have one.

    Start it last: READY=1 is what `systemctl start` waits for. `interval` is in seconds, None for no watchdog; `status`
    is the line that `systemctl status` shows, asked for at every beat. When it ends it says STOPPING=1, if `leaving()`
    says that the process ends too: after STOPPING=1 there is no way back, so a worker that only begins again must not
    say it.
    """

    def __init__(
        self,
        *,
        address: str | None,
        interval: float | None = None,
        status: Callable[[], str] | None = None,
        is_exiting: Callable[[], bool] = _always,
    ) -> None:
        self._address = address
        self._interval = interval
        self._status = status
        self._leaving = is_exiting

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Say READY=1, feed the watchdog until cancelled, then say STOPPING=1."""
        try:
            await self._insist("READY=1", *self._shown())
            task_status.started()
            if self._address is None or self._interval is None:
                await trio.sleep_forever()
            while True:
                await trio.sleep(self._interval)
                notify(self._address, "WATCHDOG=1", *self._shown())
        finally:
            if self._leaving():
                with trio.CancelScope(shield=True):
                    await self._insist("STOPPING=1")

    def _shown(self) -> tuple[str, ...]:
        if self._status is None:
            return ()
        # One line, whatever it is: a newline would begin a field.
        return (f"STATUS={' '.join(self._status().split())}",)

    async def _insist(self, *lines: str) -> None:
        """Say it again while systemd's socket is full, for a second at most: we must not hang with it."""
        with trio.move_on_after(SEND_TIMEOUT):
            while not notify(self._address, *lines):  # noqa: ASYNC110  only looking again tells that there is room
                await trio.sleep(0.01)
