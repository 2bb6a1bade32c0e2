"""Systemd bus: one D-Bus connection to systemd's manager, with calls and ordered signals.

jeepney provides the messages; it is imported when a bus is first needed. Its router drops signals that nobody
has taken yet, and a lost signal could be the death of a worker. So this module handles each signal as it is
read.
"""

import os
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from celery5.errors import PlatformError

if TYPE_CHECKING:
    from jeepney import Message
    from jeepney.io.trio import DBusConnection

BUS = "org.freedesktop.DBus"
SYSTEMD = "org.freedesktop.systemd1"
MANAGER = "org.freedesktop.systemd1.Manager"
MANAGER_PATH = "/org/freedesktop/systemd1"
PROPERTIES = "org.freedesktop.DBus.Properties"
REPLY_LIMIT = 10.0
"""Seconds that a reply may take."""
MAX_PENDING_CALLS = 1000
"""The most calls without a reply."""
_GONE = (trio.BrokenResourceError, trio.EndOfChannel, trio.ClosedResourceError)

SignalHandler = Callable[[str, str, tuple[Any, ...]], None]
"""Handles one signal: its path, its name, its values. Must not wait."""


class SystemdDisconnected(PlatformError):
    """The connection to systemd is lost or could not be made."""


class SystemdError(PlatformError):
    """systemd replied with an error; `name` is its D-Bus name."""

    def __init__(self, message: str, *, name: str) -> None:
        self.name = name
        super().__init__(message)


class SystemdBus:
    """A connection to the bus at `path`: a unix socket, abstract if it begins with a zero byte."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: DBusConnection | None = None
        self._serials = count(10)
        self._answers: dict[int, tuple[trio.MemorySendChannel[Message], Callable[[], None] | None]] = {}
        self._manager = ""

    async def run(self, on_signal: SignalHandler, *, task_status: trio.TaskStatus[None]) -> None:
        """Stay connected, and call `on_signal` for the signals of systemd's manager and units, until cancelled.

        Raises SystemdDisconnected when the connection is lost, and when systemd itself leaves the bus, as it
        does to re-execute.
        """
        stream = await _connected(self._path)
        from jeepney.io.trio import DBusConnection

        try:
            self._connection = DBusConnection(stream.socket)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, on_signal)
                await self._introduce()
                task_status.started()
        except BaseExceptionGroup as group:
            why, others = group.split((*_GONE, PlatformError))
            if why is None or others is not None:
                raise
            raise SystemdDisconnected(f"the bus at {self.address} is gone: {_first_of(why)}") from None
        finally:
            self._connection = None
            self._answers.clear()
            stream.socket.close()

    @property
    def address(self) -> str:
        """Return the path of the socket, for people."""
        return self._path.replace("\0", "@", 1)

    async def call_manager(
        self, method: str, signature: str = "", *body: Any, on_done: Callable[[], None] | None = None
    ) -> tuple[Any, ...]:
        """Call a method of systemd's manager.

        `on_done` is called with the reply, before later signals are handled.

        Raises SystemdDisconnected and SystemdError.
        """
        return await self._call(SYSTEMD, MANAGER_PATH, MANAGER, method, signature, body, on_done)

    async def get_property(self, path: str, interface: str, name: str) -> Any:
        """Return one property of a unit. Raises SystemdDisconnected and SystemdError."""
        answer = await self._call(SYSTEMD, path, PROPERTIES, "Get", "ss", (interface, name))
        return answer[0][1]

    async def get_properties(self, path: str, interface: str) -> Mapping[str, Any]:
        """Return all properties of a unit. Raises SystemdDisconnected and SystemdError."""
        answer = await self._call(SYSTEMD, path, PROPERTIES, "GetAll", "s", (interface,))
        return strip_types(answer[0])

    async def _introduce(self) -> None:
        """Say hello and subscribe to the signals.

        The owner of systemd's name is asked for last, so that no change is missed.
        """
        await self._of_the_bus("Hello")
        for rule in (
            f"type='signal',sender='{SYSTEMD}',interface='{MANAGER}'",
            f"type='signal',sender='{SYSTEMD}',interface='{PROPERTIES}',path_namespace='{MANAGER_PATH}/unit'",
            f"type='signal',sender='{BUS}',member='NameOwnerChanged',arg0='{SYSTEMD}'",
        ):
            await self._of_the_bus("AddMatch", "s", rule)
        (self._manager,) = await self._of_the_bus("GetNameOwner", "s", SYSTEMD)
        await self.call_manager("Subscribe")

    async def _of_the_bus(self, method: str, signature: str = "", *body: Any) -> tuple[Any, ...]:
        return await self._call(BUS, "/org/freedesktop/DBus", BUS, method, signature, body)

    async def _call(
        self,
        to: str,
        path: str,
        interface: str,
        method: str,
        signature: str,
        body: tuple[Any, ...],
        then: Callable[[], None] | None = None,
    ) -> tuple[Any, ...]:
        from jeepney import DBusAddress, HeaderFields, MessageType, new_method_call

        if self._connection is None or len(self._answers) >= MAX_PENDING_CALLS:
            raise SystemdDisconnected(f"not connected to systemd at {self.address}")
        call = new_method_call(DBusAddress(path, to, interface), method, signature or None, body)
        with self._answer(then) as (serial, answer):
            try:
                with trio.fail_after(REPLY_LIMIT):
                    await self._connection.send(call, serial=serial)
                    reply = await answer.receive()
            except trio.TooSlowError:
                raise SystemdDisconnected(
                    f"systemd has not answered to {method} for {REPLY_LIMIT:g} s"
                ) from None
            except _GONE:
                raise SystemdDisconnected(f"the bus at {self.address} is gone") from None
        if reply.header.message_type is MessageType.error:
            name = str(reply.header.fields.get(HeaderFields.error_name, ""))
            text = str(reply.body[0]) if reply.body else name
            raise SystemdError(f"systemd refuses {method}: {text}", name=name)
        return reply.body

    @contextmanager
    def _answer(
        self, then: Callable[[], None] | None
    ) -> "Generator[tuple[int, trio.MemoryReceiveChannel[Message]]]":
        serial = next(self._serials)
        say, answer = trio.open_memory_channel["Message"](1)
        self._answers[serial] = (say, then)
        try:
            yield serial, answer
        finally:
            self._answers.pop(serial, None)

    async def _read(self, hear: SignalHandler) -> None:
        """Read until the connection is lost, then fail the calls that still wait for a reply."""
        from jeepney import HeaderFields, MessageType

        connection = self._connection
        assert connection is not None
        try:
            while True:
                message = await connection.receive()
                fields = message.header.fields
                if message.header.message_type is MessageType.signal:
                    self._hear(fields, HeaderFields, message.body, hear)
                    continue
                say, then = self._answers.pop(int(fields.get(HeaderFields.reply_serial, -1)), (None, None))
                if then is not None and message.header.message_type is MessageType.method_return:
                    then()
                if say is not None:
                    say.send_nowait(message)
        finally:
            for say, _ in self._answers.values():
                say.close()

    def _hear(
        self, fields: Mapping[Any, Any], names: Any, body: tuple[Any, ...], hear: SignalHandler
    ) -> None:
        sender, name = str(fields.get(names.sender, "")), str(fields.get(names.member, ""))
        if sender == BUS and name == "NameOwnerChanged":
            if self._manager:
                raise trio.BrokenResourceError("systemd begins again")
        elif sender == self._manager or not self._manager:  # anybody may send a signal to anybody
            hear(str(fields.get(names.path, "")), name, body)


def _first_of(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups."""
    inner: Any = getattr(error, "exceptions", None)
    return error if inner is None else _first_of(inner[0])


def strip_types(properties: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return properties without the D-Bus type of each."""
    return {name: value for name, (_, value) in properties.items()}


async def _connected(path: str) -> trio.SocketStream:
    """Connect and return a stream on which messages may be sent. Raises SystemdDisconnected."""
    from jeepney.auth import AuthenticationError, Authenticator

    shown = path.replace("\0", "@", 1)
    try:
        with trio.fail_after(REPLY_LIMIT):
            stream = await trio.open_unix_socket(path)
            try:
                await _introduced(stream, Authenticator(inc_null_byte=False))
            except BaseException:
                stream.socket.close()
                raise
    except (OSError, trio.TooSlowError, trio.BrokenResourceError, AuthenticationError) as error:
        why = f"no answer within {REPLY_LIMIT:g} s" if isinstance(error, trio.TooSlowError) else str(error)
        raise SystemdDisconnected(f"cannot connect to systemd's bus at {shown}: {why}") from None
    return stream


async def _introduced(stream: trio.SocketStream, login: Any) -> None:
    """Authenticate to the bus, which learns the user of this process from the kernel."""
    from jeepney.auth import BEGIN

    await stream.send_all(b"\0")
    for line in login:
        await stream.send_all(line)
        answer = await stream.receive_some()
        if not answer:
            raise trio.BrokenResourceError("it hung up")
        login.feed(bytes(answer))
    await stream.send_all(BEGIN)


SYSTEM_BUS = "/run/dbus/system_bus_socket"


def is_service(environ: Mapping[str, str], pid: int) -> bool:
    """Return whether the process `pid` is itself a service of systemd, not a child that inherited the
    variables.
    """
    ours = environ.get("SYSTEMD_EXEC_PID", str(pid)) == str(pid)  # systemd 248
    return ours and bool(environ.get("INVOCATION_ID")) and bool(environ.get("NOTIFY_SOCKET"))


def should_use_systemd(environ: Mapping[str, str], pid: int) -> bool:
    """Return whether a Controller should start its members by systemd when no platform is configured.

    It should when it is a service itself and may control the systemd that started it. A system service that
    runs as an ordinary user may not.
    """
    if not is_service(environ, pid) or (os.geteuid() != 0 and "MANAGERPID" not in environ):
        return False
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1.0)
            line.connect(find_bus(environ))
    except (OSError, PlatformError):
        return False
    return True


def find_bus(environ: Mapping[str, str]) -> str:
    """Return the socket of the bus of our systemd.

    That is the system's for root, else the user's; also the user's for root in its own service user
    manager. Raises PlatformError for an address that is no unix socket.
    """
    if os.geteuid() == 0 and "MANAGERPID" not in environ:
        return _socket_of(environ.get("DBUS_SYSTEM_BUS_ADDRESS", "")) or SYSTEM_BUS
    return _socket_of(environ.get("DBUS_SESSION_BUS_ADDRESS", "")) or f"{_runtime(environ)}/bus"


def get_runtime_folder(environ: Mapping[str, str]) -> Path:
    """Return a folder that a reboot empties: systemd's for this service, else one below the user's."""
    runtime_folder = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if runtime_folder:
        return Path(runtime_folder)
    system = os.geteuid() == 0 and "MANAGERPID" not in environ
    return Path("/run" if system else _runtime(environ)) / "celery5"


def _runtime(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"


def _socket_of(address: str) -> str:
    """Return the path in a D-Bus address; '' for none."""
    if not address:
        return ""
    from jeepney.bus import get_connectable_addresses

    try:
        return str(next(iter(get_connectable_addresses(address))))
    except (RuntimeError, ValueError, StopIteration):
        raise PlatformError(f"D-Bus at {address!r}: only unix sockets will do") from None
