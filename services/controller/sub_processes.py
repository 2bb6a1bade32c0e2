"""Sub-processes: the platform that runs members as children of this process.

Each child gets a socket like systemd's (NOTIFY_SOCKET), and reports by sd_notify(3) that it is ready, alive or
stopping. So members need not know what started them. Only datagrams from the child itself count, not from its
own children. The kernel ends the children when this process dies, for whatever reason.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.members import (
    LAST_FAILURE_VARIABLE,
    PARENT_VARIABLE,
    Beat,
    Ended,
    Member,
    MemberEvent,
    Ready,
    State,
    Stopping,
    format_end_reason,
    parse_failure_reason,
)
from celery5.services.process.own_folder import temporary_folder
from celery5.services.process.systemd_notify import CODE_FIELD, INCARNATION_FIELD

EXCLUDED_VARIABLES = frozenset(
    {
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
        "LISTEN_FDS",
        "LISTEN_PID",
        "LISTEN_FDNAMES",
        PARENT_VARIABLE,
    }
)
"""Environment variables that are meant for this process alone."""
MAX_DATAGRAM_BYTES = 4096
"""The most bytes of one notification."""
DATAGRAMS_PER_TURN = 100
"""Datagrams of one socket that are read before others have their turn: jobs know its address, and may flood it."""
END_LIMIT = 3.0
"""Seconds that the remaining children have to end before they are killed."""
_CREDENTIALS = struct.Struct("3i")
_ASKS_WHO = getattr(socket, "SO_PASSCRED", None)


@dataclass(slots=True)
class _Child:
    """A running child and what is known of it."""

    member: Member
    process: "subprocess.Popen[bytes]"
    notify_socket: socket.socket
    path: str
    state: State = "starting"
    reason: str = ""
    watching: trio.CancelScope = field(default_factory=lambda: trio.CancelScope(shield=True))


class SubProcesses(Platform):
    """Runs members as children of this process. Their sockets are in a folder that only this user can enter."""

    def __init__(self, *, cluster: Cluster, app: str = "") -> None:
        self._watch = cluster.hung_after
        self._app = app
        self._children: dict[str, _Child] = {}
        # The error that ended the last start of a member, until it is up.
        self._failures: dict[str, str] = {}
        self._folder = ""
        self._count = 0
        self._nursery: trio.Nursery | None = None
        self._report: Callable[[MemberEvent], None] = _nobody

    async def live(
        self,
        report: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Watch the children until cancelled, then end those that remain."""
        self._report = report
        with temporary_folder("celery5-controller") as self._folder:
            try:
                async with trio.open_nursery() as self._nursery:
                    task_status.started()
                    try:
                        await trio.sleep_forever()
                    finally:
                        with trio.CancelScope(shield=True):
                            await self._end()
            finally:
                self._nursery = None

    async def start(self, member: Member) -> None:
        """Start a child. Raises PlatformError."""
        if self._nursery is None or member.name in self._children:
            raise PlatformError(f"{member.name} runs already, or nobody would watch it")
        if member.host:
            raise PlatformError(f"{member.name} is for host {member.host!r}: sub-processes are here only")
        self._count += 1
        path = os.path.join(self._folder, str(self._count))
        try:
            notify_socket = _listening(path)
            try:
                process = self._begun(member, path)
            except OSError:
                notify_socket.close()
                raise
        except OSError as error:
            raise PlatformError(f"{member.name} cannot be started: {error}") from None
        child = self._children[member.name] = _Child(member, process, notify_socket, path)
        self._nursery.start_soon(self._attend, child)

    async def stop(self, name: str) -> None:
        """Send SIGTERM to the member."""
        self._signal(name, signal.SIGTERM)

    async def kill(self, name: str) -> None:
        """Send SIGKILL to the member. Its sidecar puts its jobs back."""
        self._signal(name, signal.SIGKILL)

    async def reload(self, name: str) -> None:
        """Send SIGHUP to the member."""
        self._signal(name, signal.SIGHUP)

    async def living(self) -> Mapping[str, State]:
        """Return nothing: children do not outlive their parent, so none runs that this process did not start."""
        return {name: child.state for name, child in self._children.items()}

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a member while it runs, else None."""
        child = self._children.get(name)
        return None if child is None else child.process.pid

    def _begun(self, member: Member, path: str) -> "subprocess.Popen[bytes]":
        """Start the process from this thread: the kernel ends a child when the thread ends that started it."""
        surroundings = {name: value for name, value in os.environ.items() if name not in EXCLUDED_VARIABLES}
        watched = {"WATCHDOG_USEC": str(int(self._watch * 1e6))} if self._watch else {}
        failure = self._failures.get(member.name)
        failed = {LAST_FAILURE_VARIABLE: failure} if failure else {}
        return subprocess.Popen(
            [sys.executable, "-m", "celery5", *member.arguments],
            stdin=subprocess.DEVNULL,
            env={
                **surroundings,
                **member.environment,
                "NOTIFY_SOCKET": path,
                **watched,
                **failed,
                PARENT_VARIABLE: str(os.getpid()),
            },
            process_group=0,  # Ctrl-C reaches it by way of this process, once
        )

    def _signal(self, name: str, number: signal.Signals) -> None:
        child = self._children.get(name)
        if child is not None:
            child.process.send_signal(number)  # checks first whether it has ended

    async def _attend(self, child: _Child) -> None:
        """Report the events of a child until it has ended, then its end.

        A child that ends with this process is watched, too.
        """
        with child.watching, trio.socket.from_stdlib_socket(child.notify_socket) as notify_socket:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, child, notify_socket)
                await _ended(child.process)
                nursery.cancel_scope.cancel()
            self._read_notifications(child, child.notify_socket)
        del self._children[child.member.name]
        self._failures[child.member.name] = child.reason if child.state == "starting" else ""
        with suppress(OSError):
            os.unlink(child.path)
        code = child.process.returncode
        if code is not None:
            how = describe_exit(code) if code == 0 else format_end_reason(describe_exit(code), child.reason)
            self._report(Ended(child.member.name, how, code))

    async def _listen(self, child: _Child, notify_socket: trio.socket.SocketType) -> None:
        while True:
            await trio.lowlevel.wait_readable(notify_socket)
            self._read_notifications(child, child.notify_socket)

    def _read_notifications(self, child: _Child, notify_socket: socket.socket) -> None:
        """Read notifications that have arrived, DATAGRAMS_PER_TURN at most."""
        for _ in range(DATAGRAMS_PER_TURN):
            try:
                message, creds, _flags, _who = notify_socket.recvmsg(
                    MAX_DATAGRAM_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except (BlockingIOError, InterruptedError):
                return
            if _ASKS_WHO is None or _speaker(creds) == child.process.pid:
                child.reason = parse_error(message) or child.reason
                for word in parse_notification(child.member.name, message):
                    child.state = _STATES.get(type(word), child.state)
                    self._report(word)

    async def _end(self) -> None:
        """End the remaining children."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name in list(self._children):
                self._signal(name, number)
            with trio.move_on_after(END_LIMIT):
                while self._children:  # noqa: ASYNC110  processes have no common event to wait for
                    await trio.sleep(0.02)
        for child in self._children.values():  # not even SIGKILL ends these: the kernel is busy with them
            child.watching.cancel()


def parse_notification(name: str, message: bytes) -> Iterator[MemberEvent]:
    """Yield the events in a datagram of sd_notify(3) from the member `name`; ignore unknown fields.

    A status alone is no heartbeat: a thread also sends it while the event loop is blocked.
    """
    lines = message.decode(errors="replace").splitlines()
    turns = "WATCHDOG=1" in lines or "READY=1" in lines
    fields = {field: value for field, _, value in (line.partition("=") for line in lines)}
    code, incarnation = fields.get(CODE_FIELD, "")[:500], fields.get(INCARNATION_FIELD, "")[:500]
    for line in lines:
        variable, _, value = line.partition("=")
        if (variable, value) == ("READY", "1"):
            yield Ready(name, code, incarnation)
        elif (variable, value) == ("STOPPING", "1"):
            yield Stopping(name)
        elif variable == "STATUS" and not parse_failure_reason(value):
            yield Beat(name, value[:500], turns)
        elif (variable, value) == ("WATCHDOG", "1"):
            yield Beat(name)


def parse_error(message: bytes) -> str:
    """Return the error with which the sender of a datagram ends; '' for none."""
    lines = message.decode(errors="replace").splitlines()
    return next(
        (parse_failure_reason(line.removeprefix("STATUS=")) for line in lines if line.startswith("STATUS=")),
        "",
    )


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _listening(path: str) -> socket.socket:
    notify_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        notify_socket.setblocking(False)
        if _ASKS_WHO is not None:
            notify_socket.setsockopt(socket.SOL_SOCKET, _ASKS_WHO, 1)
        notify_socket.bind(path)
    except OSError:
        notify_socket.close()
        raise
    return notify_socket


def _speaker(creds: list[tuple[int, int, bytes]]) -> int:
    for level, kind, value in creds:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(value) >= _CREDENTIALS.size:
            pid: int = _CREDENTIALS.unpack_from(value)[0]
            return pid
    return 0


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process has ended and record its exit code."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # an old kernel, or it has ended
            pidfd = os.pidfd_open(process.pid)
            try:
                await trio.lowlevel.wait_readable(pidfd)
            finally:
                os.close(pidfd)
            process.wait()
            return
    while process.poll() is None:  # noqa: ASYNC110  there is no other way to learn it
        await trio.sleep(0.1)


def _nobody(_word: MemberEvent) -> None:
    """Ignore an event: nothing listens yet."""


_STATES: Mapping[type[MemberEvent], State] = {Ready: "up", Beat: "up", Stopping: "stopping"}
