"""Notify systemd that the process is ready, alive or stopping.

The protocol is sd_notify(3): one datagram of `NAME=value` lines to the socket named in NOTIFY_SOCKET. The event loop
notifies the watchdog, so systemd restarts a process whose loop hangs for longer than `WatchdogSec`.
"""

import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import ClassVar, TypedDict

import trio

from celery5.logs.fence import FENCE
from celery5.protocol.process.liveness import get_beat_interval

SEND_TIMEOUT = 1.0
"""Seconds for which an important message is sent again while systemd's socket is full."""

CODE_FIELD = "X_CELERY5_CODE"
"""The field of a datagram that has the file of the application's module."""
INCARNATION_FIELD = "X_CELERY5_INCARNATION"
"""The field of a datagram that has the whole name of the process in Redis."""


class NotifySettings(TypedDict):
    """What systemd requests: the `address` of its socket, and the seconds between notifications of its watchdog."""

    address: str | None
    interval: float | None


def read_notify_settings(environ: Mapping[str, str], pid: int) -> NotifySettings:
    """Return what systemd requests of the process `pid` through its environment; nothing without systemd.

    The interval is a small part of WATCHDOG_USEC, so that a process is killed only after it has hung for nearly that
    long, and the status is fresh. Variables for another process (WATCHDOG_PID) and invalid ones are ignored.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if len(address) < 2 or address[0] not in "/@":
        return {"address": None, "interval": None}
    limit = environ.get("WATCHDOG_USEC", "")
    ours = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
    watched = ours and limit.isascii() and limit.isdigit() and int(limit) > 0
    return {"address": address, "interval": get_beat_interval(int(limit) / 1e6) if watched else None}


def take_notify_settings(environ: MutableMapping[str, str], pid: int) -> NotifySettings:
    """Like `read_notify_settings`, and remove the variables, so that no child process notifies systemd too."""
    settings = read_notify_settings(environ, pid)
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        environ.pop(name, None)
    return settings


def notify(address: str | None, *lines: str) -> bool:
    """Send one datagram without waiting. Return False when systemd's socket is full.

    An error of the socket is ignored: systemd itself acts when notifications are missing.
    """
    if address is None:
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(
                "\n".join(lines).encode(), f"\0{address[1:]}" if address.startswith("@") else address
            )
        except BlockingIOError:
            return False
        except OSError:
            return True
    return True


def format_code(file: str) -> tuple[str, ...]:
    """Return the field that tells a Controller which file the application was loaded from; systemd ignores it."""
    return _format_field(CODE_FIELD, file)


def _format_field(name: str, value: str) -> tuple[str, ...]:
    return (f"{name}={' '.join(value.split())}",) if value else ()


def notify_with_retry(address: str | None, *lines: str) -> None:
    """Send one important datagram in blocking code: again while the socket is full, for a second at most."""
    limit = time.monotonic() + SEND_TIMEOUT
    while not notify(address, *lines) and time.monotonic() < limit:
        time.sleep(0.01)


async def notify_watchdog(settings: NotifySettings, ready: trio.Event) -> None:
    """Notify the watchdog from the moment the process is ready until cancelled, also between two incarnations.

    `SystemdNotify` is the first service of an incarnation that stops. The next incarnation begins when the running jobs
    have ended and the broker can be reached. That may take longer than the limit of the watchdog.
    """
    address, interval = settings["address"], settings["interval"]
    if address is None or interval is None:
        return
    await ready.wait()
    while True:
        with FENCE("systemd"):
            notify(address, "WATCHDOG=1")
        await trio.sleep(interval)


def _always() -> bool:
    return True


class SystemdNotify:
    """Notifies systemd for one process. Start it last: `systemctl start` waits for READY=1.

    Args:
        address: Of systemd's socket; None to do nothing.
        interval: Seconds between notifications of the watchdog; None for no watchdog.
        status: Returns the line that `systemctl status` shows. Called for each notification.
        code: The file of the application's module, for a Controller; "" for none.
        incarnation: The whole name of this incarnation, for a Controller; "" for none.
        is_exiting: Returns whether the process ends with this service. Only then STOPPING=1 is sent, which cannot be
            undone: a worker that goes on as another incarnation must not send it.
    """

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        address: str | None,
        interval: float | None = None,
        status: Callable[[], str] | None = None,
        code: str = "",
        incarnation: str = "",
        is_exiting: Callable[[], bool] = _always,
    ) -> None:
        self._address = address
        self._interval = interval
        self._status = status
        self._for_controller = (*format_code(code), *_format_field(INCARNATION_FIELD, incarnation))
        self._is_exiting = is_exiting

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send READY=1, notify the watchdog until cancelled, then send STOPPING=1, with the last status."""
        try:
            await self._send("READY=1", *self._for_controller, *self._format_status())
            task_status.started()
            if self._address is None or self._interval is None:
                await trio.sleep_forever()
            while True:
                await trio.sleep(self._interval)
                notify(self._address, "WATCHDOG=1", *self._format_status())
        except trio.Cancelled:  # after an error this begins again
            if self._is_exiting():
                with trio.CancelScope(shield=True):
                    await self._send("STOPPING=1", *self._format_status())
            raise

    def send_status(self) -> None:
        """Send the status, which has changed and should be known at once."""
        with FENCE("systemd"):
            notify(self._address, *self._format_status())

    def _format_status(self) -> tuple[str, ...]:
        if self._status is None:
            return ()
        with FENCE("systemd"):  # the watchdog must be notified whatever the line is
            # One line, whatever it is: a newline would begin a field.
            return (f"STATUS={' '.join(self._status().split())}",)
        return ()

    async def _send(self, *lines: str) -> None:
        """Send a message, again while systemd's socket is full, for a second at most: this process must not hang."""
        with trio.move_on_after(SEND_TIMEOUT):
            while not notify(self._address, *lines):  # noqa: ASYNC110  there is no event for it
                await trio.sleep(0.01)
