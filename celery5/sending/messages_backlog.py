"""Where a Publisher keeps messages that are not published yet: in memory, in SQLite, or in a backlog of your own.

A backlog of your own implements `MessagesBacklog`; the setting `publisher_backlog` names the function that makes
it.
"""

import fcntl
import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import msgspec
import trio

from celery5.broker.servers.kept_folder import make_private
from celery5.errors import AlreadyInUse, Misconfigured
from celery5.protocol.publisher.frames import JobMessage, decode_job_message, encode_job_message
from celery5.sending.bounded_queue import BacklogCapacity, BoundedQueue

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")

MAX_READ_MESSAGES = 200
"""Messages in one read."""
MAX_READ_BYTES = 4 * 1024 * 1024
"""Bytes of messages in one read, unless one message alone has more."""


LOCK_TIMEOUT = 5.0
"""Seconds that another process may lock the file, as a backup does."""
MESSAGES_PER_TRANSACTION = 5000
"""Messages in one transaction."""
_OPENING = (
    "PRAGMA auto_vacuum=INCREMENTAL",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    """CREATE TABLE IF NOT EXISTS messages (
        number INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT NOT NULL, id TEXT NOT NULL, due INTEGER,
        size INTEGER NOT NULL, parcel BLOB NOT NULL, UNIQUE (queue, id))""",
    "CREATE INDEX IF NOT EXISTS in_order ON messages (queue, number)",
)


MessageWithDue = tuple[JobMessage, int | None]
"""A message, and when it falls due, in ms since 1970, if it was sent with a countdown: that runs on while it waits."""


class StoredMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that waits."""

    # Grows in the order in which messages were put, and is never used again.
    number: int
    job: JobMessage
    # As in MessageWithDue.
    due: int | None = None


class MessagesBacklog(Protocol):
    """The messages that wait for one broker, those of each queue in the order in which they were put.

    It is called from one Trio run, with several calls at a time. Blocking code must run in a thread.
    """

    @property
    def size(self) -> int:
        """The number of messages that wait."""
        ...

    async def run(self, *, task_status: "trio.TaskStatus[None]") -> None:
        """Open it, call `task_status.started()`, and run until cancelled; then close it. It may be run again.

        Raises:
            Misconfigured: It cannot be opened.
        """
        ...

    async def queues(self) -> Collection[str]:
        """Return the queues of which messages wait. Called once, after it was opened."""
        ...

    async def put(self, kept: Sequence[MessageWithDue]) -> None:
        """Store all of these messages (each with its `due`) or none; return when they are stored safely.

        A message whose id waits on the same queue already is left alone.

        Raises:
            BacklogFull: There is no space.
            Exception: They cannot be written.
        """
        ...

    async def first(self, queue: str, after: int) -> Sequence[StoredMessage]:
        """Return the first messages of a queue whose numbers are above `after`, in order.

        At most MAX_READ_MESSAGES and MAX_READ_BYTES, but at least one if there is any.
        """
        ...

    async def gone(self, numbers: Sequence[int]) -> None:
        """Delete messages, which are published. May be called twice for the same."""
        ...


class MemoryBacklog:
    """A backlog in memory. Its messages are lost when the process dies."""

    def __init__(self, *, capacity: BacklogCapacity) -> None:
        self._waiting = BoundedQueue[MessageWithDue](capacity)

    @property
    def size(self) -> int:
        """How many messages wait."""
        return len(self._waiting)

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Do nothing: there is nothing to open."""
        task_status.started()
        await trio.sleep_forever()

    async def queues(self) -> Collection[str]:
        """Return the queues that were used by an earlier run in the same process."""
        return self._waiting.queues

    async def put(self, kept: Sequence[MessageWithDue]) -> None:
        """Keep all of them, or none when they do not fit."""
        self._waiting.capacity.check(len(kept), get_total_size(kept))
        for message, due in kept:
            self._waiting.add(message.queue, message.id, len(message.message), (message, due))

    async def first(self, queue: str, after: int) -> Sequence[StoredMessage]:
        """Return the first messages of a queue."""
        items = self._waiting.first(queue, limit=MAX_READ_MESSAGES, max_bytes=MAX_READ_BYTES, after=after)
        return [StoredMessage(item.number, *item.value) for item in items]

    async def gone(self, numbers: Sequence[int]) -> None:
        """Delete messages."""
        self._waiting.remove(numbers)


def get_total_size(kept: Sequence[MessageWithDue]) -> int:
    """Return the bytes of these messages in all."""
    return sum(len(message.message) for message, _ in kept)


class _Put:
    """The messages of one caller, and whether they are stored."""

    __slots__ = ("done", "error", "kept")

    def __init__(self, kept: Sequence[MessageWithDue]) -> None:
        self.kept = kept
        self.done = trio.Event()
        self.error: Exception | None = None


class SQLiteBacklog:
    """A backlog in the SQLite file `path`, limited by `capacity`."""

    def __init__(self, *, path: Path, capacity: BacklogCapacity) -> None:
        self._path = path
        self._capacity = capacity
        self._file: sqlite3.Connection | None = None
        self._puts: list[_Put] = []
        self._came = trio.Event()
        self._thread = trio.CapacityLimiter(1)

    def __repr__(self) -> str:
        return f"<SQLiteBacklog {self._path}>"

    @property
    def size(self) -> int:
        """How many messages wait."""
        return self._capacity.used_messages

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Open the file and write messages until cancelled; then write those that are left."""
        with self._locked():
            try:
                await self._in_thread(self._open)
                task_status.started()
                while True:
                    await self._came.wait()
                    await self._write_all()
            finally:
                await self._write_all()
                with trio.CancelScope(shield=True):
                    await self._in_thread(self._close)

    async def queues(self) -> Collection[str]:
        """Return the queues that messages wait for."""
        return await self._in_thread(self._queues)

    async def put(self, kept: Sequence[MessageWithDue]) -> None:
        """Return when these messages are on the disk."""
        self._open_file  # noqa: B018  raises, rather than wait for nobody
        put = _Put(kept)
        self._puts.append(put)
        self._came.set()
        try:
            await put.done.wait()
        except trio.Cancelled:
            if put in self._puts:  # it is not being written yet
                self._puts.remove(put)
            raise
        if put.error is not None:
            raise put.error

    async def first(self, queue: str, after: int) -> Sequence[StoredMessage]:
        """Return the first messages of a queue."""
        return await self._in_thread(lambda: self._first(queue, after))

    async def gone(self, numbers: Sequence[int]) -> None:
        """Delete messages."""
        await self._in_thread(lambda: self._gone(numbers))

    async def _write_all(self) -> None:
        self._came = trio.Event()
        while self._puts:
            puts, self._puts = self._puts, []
            with trio.CancelScope(shield=True):  # finish the write, and report its outcome
                await self._in_thread(partial(self._write, puts))
            for put in puts:
                put.done.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._thread)

    # ---- in the thread

    @property
    def _open_file(self) -> "sqlite3.Connection":
        if self._file is None:
            raise OSError(f"the backlog {self._path} is closed")
        return self._file

    @contextmanager
    def _locked(self) -> Generator[None, None, None]:
        """Lock the file: two processes with the same file would both publish its messages."""
        try:
            make_private(self._path.parent)
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Misconfigured(f"no backlog at {self._path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise AlreadyInUse(
                f"another Publisher has the backlog {self._path}: one for an application is enough for a host; "
                "else give each its own, --backlog FOLDER"
            ) from None
        try:
            yield
        finally:
            os.close(lock)

    def _open(self) -> None:
        import sqlite3  # loaded only when used

        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._file = file = sqlite3.connect(
                self._path, timeout=LOCK_TIMEOUT, isolation_level=None, check_same_thread=False
            )
            for statement in _OPENING:
                file.execute(statement)
            count, total_size = file.execute("SELECT count(*), total(size) FROM messages").fetchone()
        except (sqlite3.Error, OSError) as error:
            self._close()
            raise Misconfigured(
                f"the backlog {self._path} cannot be opened: {error}; if it is broken, move it away: this "
                "Publisher will then go without what it has"
            ) from error
        self._capacity.used_messages, self._capacity.used_bytes = int(count), int(total_size)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _queues(self) -> list[str]:
        return [queue for (queue,) in self._open_file.execute("SELECT DISTINCT queue FROM messages")]

    def _first(self, queue: str, after: int) -> list[StoredMessage]:
        rows = self._open_file.execute(
            "SELECT number, parcel, due FROM messages WHERE queue = ? AND number > ? ORDER BY number LIMIT ?",
            (queue, after, MAX_READ_MESSAGES),
        )
        return _limit_bytes(
            [StoredMessage(number, decode_job_message(raw), due) for number, raw, due in rows]
        )

    def _gone(self, numbers: Sequence[int]) -> None:
        count = size = 0
        with self._transaction() as file:
            for number in numbers:
                row = file.execute("SELECT size FROM messages WHERE number = ?", (number,)).fetchone()
                if row is not None:
                    file.execute("DELETE FROM messages WHERE number = ?", (number,))
                    count, size = count + 1, size + int(row[0])
        self._capacity.adjust_usage(-count, -size)
        if count and not self._capacity.used_messages:
            self._open_file.execute("PRAGMA incremental_vacuum").fetchall()

    def _write(self, puts: Sequence[_Put]) -> None:
        """Write all in as few transactions as possible. If one fails, write the messages of each caller alone."""
        part, count = list[_Put](), 0
        for put in puts:
            if part and count + len(put.kept) > MESSAGES_PER_TRANSACTION:
                self._write_together(part)
                part, count = [], 0
            part.append(put)
            count += len(put.kept)
        self._write_together(part)

    def _write_together(self, puts: Sequence[_Put]) -> None:
        try:
            self._insert([message for put in puts for message in put.kept])
        except Exception as error:
            if len(puts) == 1:
                puts[0].error = error
                return
            for put in puts:
                self._write_together([put])

    def _insert(self, kept: Sequence[MessageWithDue]) -> None:
        self._capacity.check(len(kept), get_total_size(kept))
        count = total_size = 0
        with self._transaction() as file:
            for message, due in kept:
                size = len(message.message)
                cursor = file.execute(
                    "INSERT OR IGNORE INTO messages (queue, id, due, size, parcel) VALUES (?, ?, ?, ?, ?)",
                    (message.queue, message.id, due, size, encode_job_message(message)),
                )
                if cursor.rowcount > 0:
                    count, total_size = count + 1, total_size + size
        self._capacity.adjust_usage(count, total_size)

    @contextmanager
    def _transaction(self) -> Generator["sqlite3.Connection", None, None]:
        """Commit the block to the disk when it ends, or roll it back."""
        file = self._open_file
        file.execute("BEGIN IMMEDIATE")
        try:
            yield file
            file.execute("COMMIT")
        except BaseException:
            with suppress(Exception):  # a full disk has rolled it back already
                file.execute("ROLLBACK")
            raise


def _limit_bytes(messages: Sequence[StoredMessage]) -> list[StoredMessage]:
    """Return as many of the first messages as go in one trip."""
    size, result = 0, list[StoredMessage]()
    for message in messages:
        size += len(message.job.message)
        if result and size > MAX_READ_BYTES:
            break
        result.append(message)
    return result


def get_state_folder(app: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of an application's backlogs, unless another is set.

    Raises:
        Misconfigured: This user has no home folder.
    """
    state = environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise Misconfigured(
            "this user has no home folder to keep a backlog in: set CELERY5_PUBLISHER_BACKLOG"
        ) from None
    return root / "celery5" / "publisher" / app.replace("/", "_")


def make_backlog(setting: str, *, app: str, broker: str, capacity: BacklogCapacity) -> MessagesBacklog:
    """Return the backlog for the broker of this name.

    Args:
        setting: `sqlite`, `memory`, a folder for SQLite's files, or `module:name` of a function that returns a backlog
            and is called with `app`, `broker` and `capacity`.
    """
    if setting == "memory":
        return MemoryBacklog(capacity=capacity)
    if setting == "sqlite" or "/" in setting:
        folder = get_state_folder(app, os.environ) if setting == "sqlite" else Path(setting).expanduser()
        return SQLiteBacklog(path=folder / f"{broker.replace('/', '_')}.sqlite3", capacity=capacity)
    module, colon, name = setting.partition(":")
    if not colon:
        raise Misconfigured(
            f"publisher_backlog is {setting!r}: give sqlite, memory, a folder (with a / in it), or module:name"
        )
    try:
        backlog: Any = getattr(import_module(module), name)(app=app, broker=broker, capacity=capacity)
    except Exception as error:  # the user's code
        raise Misconfigured(f"publisher_backlog {setting!r}: {type(error).__name__}: {error}") from error
    missing = [
        attribute
        for attribute in ("size", "run", "queues", "put", "first", "gone")
        if not hasattr(backlog, attribute)
    ]
    if missing:
        raise Misconfigured(f"publisher_backlog {setting!r}: {backlog!r} has no {missing[0]}")
    return cast("MessagesBacklog", backlog)
