"""The server in memory: a thread that answers on a unix socket."""

import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import quote

from celery5.broker.connection.exchange import NEED_DATA, ProtocolError, ReplyParser
from celery5.testing.memory_server import collection_commands, sorted_set_commands, string_commands
from celery5.testing.memory_server.command_table import SYNTAX_ERROR, parse_integer, run_command
from celery5.testing.memory_server.keyspace import Keyspace
from celery5.testing.memory_server.replies import OK, CommandError, Push, Status, encode
from celery5.testing.memory_server.scripts import ScriptEngine, UnknownScript
from celery5.testing.memory_server.stream_commands import StreamRead

CHUNK = 65536
VERSION = b"7.2.4"
COMMAND_MODULES = (collection_commands, sorted_set_commands, string_commands)
"""They have entered their commands into the table."""
NO_SCRIPT = "NOSCRIPT No matching script. Please use EVAL."
INFO = {
    "redis_version": "7.2.4",
    "redis_mode": "standalone",
    "maxclients": "10000",
    "used_memory": "1000000",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "loading": "0",
    "aof_enabled": "0",
    "evicted_keys": "0",
    "role": "master",
    "connected_slaves": "0",
    "cluster_enabled": "0",
}
"""What INFO says, besides what changes."""


class MemorySession:
    """One connection, and what it has sent and not yet been answered."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.connection = connection
        self.number = number
        self.parser: ReplyParser = ReplyParser()
        self.requests: deque[list[bytes]] = deque()
        self.output: bytearray = bytearray()
        self.resp = 2
        self.database = 0
        self.name = b""
        self.channels: set[bytes] = set()
        # The commands of a transaction that is being collected; None outside of one.
        self.queued: list[list[bytes]] | None = None
        # A read that waits for entries, and the time, by time.monotonic(), until which it does.
        self.blocked_read: StreamRead | None = None
        self.blocked_until: float = 0.0

    def reply(self, value: Any) -> None:
        """Write a reply."""
        self.output += encode(value, self.resp)


class MemoryServer:
    """A server in this process. It works while the `with` block lasts.

    `url` is what a broker's URL is for a real one. Commands are performed one after another, in the server's thread.
    """

    def __init__(self) -> None:
        self.folder: Path = Path(tempfile.mkdtemp(prefix="celery5-"))
        self.socket: Path = self.folder / "redis.sock"
        self._databases: dict[int, Keyspace] = {}
        self._is_held = False
        self._current: MemorySession | None = None
        self._scripts = ScriptEngine(self._run_scripted)
        self._sessions: dict[socket.socket, MemorySession] = {}
        self._last_number = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._wake_end, self._stop_end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="celery5 memory server", daemon=True)

    def hold(self) -> None:
        """Give new entries of streams to no group, so that no worker takes a job from a queue, until `release`.

        A script that adds an entry and reads it gets it all the same: nobody would read it later. So a worker that is
        told of a limit that was raised takes jobs that have waited at it.
        """
        self._is_held = True
        for keys in self._databases.values():
            keys.is_held = True

    def release(self) -> None:
        """Give entries to groups again."""
        self._is_held = False
        for keys in list(self._databases.values()):
            keys.is_held = False
        self._stop_end.send(b"w")

    @property
    def url(self) -> str:
        """The broker URL of this server, database 0."""
        return f"unix://{quote(str(self.socket))}?db=0"

    def __enter__(self) -> Self:
        self._listener.bind(str(self.socket))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_end.close()
        self._thread.join()
        for session in self._sessions.values():
            session.connection.close()
        self._selector.close()
        self._listener.close()
        self._wake_end.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select(self._find_timeout()):
                if key.fileobj is self._wake_end:
                    if not self._wake_end.recv(CHUNK):
                        return
                    continue
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._serve(self._sessions[key.fileobj], events)  # type: ignore[index]
            self._answer_blocked()
            for session in list(self._sessions.values()):
                if session.output:
                    self._flush(session)

    def _find_timeout(self) -> float | None:
        ends = [session.blocked_until for session in self._sessions.values() if session.blocked_read]
        return max(min(ends) - time.monotonic(), 0.0) if ends and min(ends) < float("inf") else None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._last_number += 1
        self._sessions[connection] = MemorySession(connection, self._last_number)
        self._selector.register(connection, selectors.EVENT_READ)

    def _close(self, session: MemorySession) -> None:
        if self._sessions.pop(session.connection, None) is not None:
            self._selector.unregister(session.connection)
            session.connection.close()

    def _serve(self, session: MemorySession, events: int) -> None:
        if events & selectors.EVENT_READ:
            try:
                data = session.connection.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close(session)
                return
            try:
                session.parser.feed(data)
                while (request := session.parser.next()) is not NEED_DATA:
                    session.requests.append(request)
            except ProtocolError:
                self._close(session)
                return
        self._perform_requests(session)

    def _perform_requests(self, session: MemorySession) -> None:
        while session.requests and session.blocked_read is None:
            name, *args = session.requests.popleft()
            try:
                self._perform(session, name.upper(), args)
            except CommandError as error:
                session.reply(error)
            except Exception as error:  # a fault of this server, which must go on for the others
                session.reply(CommandError(f"ERR the server in memory has failed at {name!r}: {error!r}"))

    def _answer_blocked(self) -> None:
        """Look again for what blocked reads wait for, until none of them finds any."""
        found = True
        while found:
            found = False
            for session in list(self._sessions.values()):
                read = session.blocked_read
                if read is None:
                    continue
                try:
                    reply: Any = read.read(self._get_keys(session))
                except CommandError as error:
                    reply = error
                if reply is not None or session.blocked_until <= time.monotonic():
                    session.blocked_read, found = None, True
                    session.reply(reply)
                    self._perform_requests(session)

    def _flush(self, session: MemorySession) -> None:
        try:
            sent = session.connection.send(session.output)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(session)
            return
        del session.output[:sent]
        waits = selectors.EVENT_WRITE if session.output else 0
        self._selector.modify(session.connection, selectors.EVENT_READ | waits)

    def _get_keys(self, session: MemorySession) -> Keyspace:
        keys = self._databases.get(session.database)
        if keys is None:
            keys = self._databases[session.database] = Keyspace(is_held=self._is_held)
        return keys

    def _perform(self, session: MemorySession, name: bytes, args: list[bytes]) -> None:
        """Perform a request and write its reply. Raises CommandError."""
        if session.queued is not None and name not in {b"EXEC", b"DISCARD", b"MULTI"}:
            session.queued.append([name, *args])
            session.reply(Status("QUEUED"))
        elif name in {b"SUBSCRIBE", b"UNSUBSCRIBE"}:
            self._subscribe(session, name, args)
        elif name in {b"XREAD", b"XREADGROUP"}:
            self._read(session, name, args)
        else:
            session.reply(self._run_any(session, name, args))

    def _run_any(self, session: MemorySession, name: bytes, args: list[bytes]) -> Any:
        self._current = session
        own = self.COMMANDS.get(name)
        if own is not None:
            try:
                return own(self, session, args)
            except IndexError:
                raise CommandError(SYNTAX_ERROR) from None
        if name == b"PUBLISH":
            return self._publish(args[0], args[1])
        return run_command(self._get_keys(session), name, args)

    def _run_scripted(self, name: bytes, args: list[bytes]) -> Any:
        """Perform a command of a script."""
        assert self._current is not None
        if name == b"PUBLISH":
            return self._publish(args[0], args[1])
        return run_command(self._get_keys(self._current), name, args)

    def _read(self, session: MemorySession, name: bytes, args: list[bytes]) -> None:
        keys = self._get_keys(session)
        read = StreamRead(keys, args, by_group=name == b"XREADGROUP")
        reply = read.read(keys)
        if reply is None and read.block is not None:
            session.blocked_read = read
            session.blocked_until = time.monotonic() + read.block / 1000 if read.block else float("inf")
        else:
            session.reply(reply)

    def _subscribe(self, session: MemorySession, name: bytes, channels: list[bytes]) -> None:
        for channel in channels or (sorted(session.channels) if name == b"UNSUBSCRIBE" else ()):
            if name == b"SUBSCRIBE":
                session.channels.add(channel)
            else:
                session.channels.discard(channel)
            session.reply(Push([name.lower(), channel, len(session.channels)]))

    def _publish(self, channel: bytes, payload: bytes) -> int:
        listeners = [session for session in self._sessions.values() if channel in session.channels]
        for session in listeners:
            session.reply(Push([b"message", channel, payload]))
        return len(listeners)

    def _hello(self, session: MemorySession, args: list[bytes]) -> Any:
        if args:
            if args[0] not in {b"2", b"3"}:
                raise CommandError("NOPROTO unsupported protocol version")
            session.resp = int(args[0])
        words = [word.upper() for word in args]
        if b"SETNAME" in words:
            session.name = args[words.index(b"SETNAME") + 1]
        return {
            b"server": b"redis",
            b"version": VERSION,
            b"proto": session.resp,
            b"id": session.number,
            b"mode": b"standalone",
            b"role": b"master",
            b"modules": [],
        }

    def _select(self, session: MemorySession, args: list[bytes]) -> Any:
        session.database = parse_integer(args[0])
        return OK

    def _eval(self, session: MemorySession, args: list[bytes]) -> Any:
        return self._evalsha(session, [self._scripts.load(args[0]), *args[1:]])

    def _evalsha(self, session: MemorySession, args: list[bytes]) -> Any:
        count, keys = parse_integer(args[1]), self._get_keys(session)
        keys.added = set()
        try:
            return self._scripts.run(args[0], args[2 : 2 + count], args[2 + count :])
        except UnknownScript:
            raise CommandError(NO_SCRIPT) from None
        finally:
            keys.added = None

    def _script(self, session: MemorySession, args: list[bytes]) -> Any:
        subcommand = args[0].upper()
        if subcommand == b"LOAD":
            return self._scripts.load(args[1])
        if subcommand == b"EXISTS":
            return [int(self._scripts.has(name)) for name in args[1:]]
        if subcommand == b"FLUSH":
            self._scripts.forget_all()
            return OK
        raise CommandError(SYNTAX_ERROR)

    def _client(self, session: MemorySession, args: list[bytes]) -> Any:
        subcommand = args[0].upper()
        if subcommand == b"ID":
            return session.number
        if subcommand == b"GETNAME":
            return session.name or None
        if subcommand == b"SETNAME":
            session.name = args[1]
        elif subcommand == b"UNBLOCK":
            return self._unblock(parse_integer(args[1]))
        elif subcommand == b"LIST":
            lines = [f"id={known.number} name={known.name.decode()}\n" for known in self._sessions.values()]
            return "".join(lines).encode()
        elif subcommand != b"SETINFO":
            raise CommandError(SYNTAX_ERROR)
        return OK

    def _unblock(self, number: int) -> int:
        for session in self._sessions.values():
            if session.number == number and session.blocked_read is not None:
                session.blocked_until = 0.0
                return 1
        return 0

    def _multi(self, session: MemorySession, args: list[bytes]) -> Any:
        if session.queued is not None:
            raise CommandError("ERR MULTI calls can not be nested")
        session.queued = []
        return OK

    def _exec(self, session: MemorySession, args: list[bytes]) -> Any:
        queued, session.queued = session.queued, None
        if queued is None:
            raise CommandError("ERR EXEC without MULTI")
        replies: list[Any] = []
        for name, *words in queued:
            try:
                replies.append(self._run_any(session, name, words))
            except CommandError as error:
                replies.append(error)
        return replies

    def _discard(self, session: MemorySession, args: list[bytes]) -> Any:
        session.queued = None
        return OK

    def _info(self, session: MemorySession, args: list[bytes]) -> Any:
        blocked = [known for known in self._sessions.values() if known.blocked_read is not None]
        facts = {
            **INFO,
            "uptime_in_seconds": int(time.monotonic() - self._started),
            "connected_clients": len(self._sessions),
            "blocked_clients": len(blocked),
        }
        return "".join(name + ":" + str(value) + "\r\n" for name, value in facts.items()).encode()

    def _config(self, session: MemorySession, args: list[bytes]) -> Any:
        if args[0].upper() == b"GET":
            settings = {b"maxmemory": b"0", b"maxmemory-policy": b"noeviction", b"appendonly": b"no"}
            return {name: settings[name] for name in args[1:] if name in settings}
        return OK

    def _pubsub(self, session: MemorySession, args: list[bytes]) -> Any:
        subscribed = [channel for known in self._sessions.values() for channel in known.channels]
        if args[0].upper() == b"NUMSUB":
            return [item for channel in args[1:] for item in (channel, subscribed.count(channel))]
        return sorted(set(subscribed))

    def _ping(self, session: MemorySession, args: list[bytes]) -> Any:
        return args[0] if args else Status("PONG")

    def _accept_any(self, session: MemorySession, args: list[bytes]) -> Any:
        return OK

    def _count_replicas(self, session: MemorySession, args: list[bytes]) -> Any:
        return 0

    def _measure_key(self, session: MemorySession, args: list[bytes]) -> Any:
        return 64 if self._get_keys(session).exists(args[1]) else None

    def _echo(self, session: MemorySession, args: list[bytes]) -> Any:
        return args[0]

    COMMANDS: ClassVar[Mapping[bytes, Any]] = {
        b"AUTH": _accept_any,
        b"CLIENT": _client,
        b"CONFIG": _config,
        b"DISCARD": _discard,
        b"ECHO": _echo,
        b"EVAL": _eval,
        b"EVALSHA": _evalsha,
        b"EXEC": _exec,
        b"HELLO": _hello,
        b"INFO": _info,
        b"MEMORY": _measure_key,
        b"MULTI": _multi,
        b"PING": _ping,
        b"PUBSUB": _pubsub,
        b"SCRIPT": _script,
        b"SELECT": _select,
        b"WAIT": _count_replicas,
    }
    """Commands that are about the connection, the scripts or the server."""
