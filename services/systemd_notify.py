"""Systemd Notify: tells systemd that the process is ready, alive and stopping.

Floor: services. Reads: nothing. Writes: datagrams to systemd's notification socket, when there is one.

The protocol is sd_notify(3): one datagram of `NAME=value` lines to the socket named in NOTIFY_SOCKET. The watchdog is
fed from the event loop, so a loop that hangs for longer than `WatchdogSec` gets the process restarted.
"""

import socket
from collections.abc import Callable, Mapping
from typing import TypedDict

import trio

PATIENCE = 1.0
"""Seconds for which a message that matters is offered again to a systemd that is too busy to read."""


class Notification(TypedDict):
    """What systemd wants to hear: the `address` of its socket and the `interval` of the watchdog's food in seconds."""

    address: str | None
    interval: float | None


def from_environment(environ: Mapping[str, str], pid: int) -> Notification:
    """What systemd asks of the process `pid` through its environment; nothing when it was not started by systemd.

    The interval is half of WATCHDOG_USEC, as sd_watchdog_enabled(3) advises. Variables that were meant for another
    process (WATCHDOG_PID), that make no sense, or that name no unix socket are as good as absent.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if len(address) < 2 or address[0] not in "/@":
        return {"address": None, "interval": None}
    limit = environ.get("WATCHDOG_USEC", "")
    ours = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
    watched = ours and limit.isascii() and limit.isdigit() and int(limit) > 0
    return {"address": address, "interval": int(limit) / 2_000_000 if watched else None}


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
        leaving: Callable[[], bool] = _always,
    ) -> None:
        self._address = address
        self._interval = interval
        self._status = status
        self._leaving = leaving

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Say READY=1, feed the watchdog until cancelled, then say STOPPING=1."""
        try:
            await self._insist("READY=1", *self._shown())
            task_status.started()
            if self._address is None or self._interval is None:
                await trio.sleep_forever()
            while True:
                await trio.sleep(self._interval)
                self._say("WATCHDOG=1", *self._shown())
        finally:
            if self._leaving():
                with trio.CancelScope(shield=True):
                    await self._insist("STOPPING=1")

    def _shown(self) -> tuple[str, ...]:
        if self._status is None:
            return ()
        return (
            f"STATUS={' '.join(self._status().split())}",
        )  # one line, whatever it is: a newline would begin a field

    async def _insist(self, *lines: str) -> None:
        """Say it again while systemd's socket is full, for a second at most: we must not hang with it."""
        with trio.move_on_after(PATIENCE):
            while not self._say(*lines):  # noqa: ASYNC110  only looking again tells that there is room
                await trio.sleep(0.01)

    def _say(self, *lines: str) -> bool:
        """Send one datagram without ever waiting. False when the socket is full.

        A socket that is gone is no reason to stop working: systemd itself acts on what it does not hear.
        """
        if self._address is None:
            return True
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            try:
                line.sendto("\n".join(lines).encode(), address)
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True
