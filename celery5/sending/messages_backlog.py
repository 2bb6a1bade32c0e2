"""Messages Backlog: where a Publisher keeps what is not published yet: what there is, and what users write (C77).

There are two: this one in memory, bounded, and the one in SQLite, which outlives the process and the machine's power.
A backlog of one's own has the shape of `MessagesBacklog`; the setting `publisher_backlog` names what makes it.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import trio

from celery5.errors import BacklogFull, Misconfigured
from celery5.protocol.publisher.frames import JobMessage

MAX_READ_MESSAGES = 200
"""Messages that are taken at a time."""
MAX_READ_BYTES = 4 * 1024 * 1024
"""Bytes of the messages that are taken at a time, unless one alone has more."""


class StoredMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that waits. `number` grows in the order in which messages were put, and is never used again. `due` is
    when it falls due, in ms since 1970, if it was sent with a countdown: that runs on while it waits."""

    number: int
    job: JobMessage
    due: int | None = None


class MessagesBacklog(Protocol):
    """What waits for one broker, each queue's messages in the order in which they were put (C77).

    All of it is called from one Trio run, several calls at a time. What blocks goes into a thread.
    """

    @property
    def size(self) -> int:
        """How many messages wait."""
        ...

    async def run(self, *, task_status: "trio.TaskStatus[None]") -> None:
        """Open it, say `task_status.started()`, and live until cancelled; then close it. It may be run again. Raises
        Misconfigured when it cannot be opened."""
        ...

    async def queues(self) -> Collection[str]:
        """The queues of which messages wait: asked once, after it was opened."""
        ...

    async def put(self, kept: Sequence[tuple[JobMessage, int | None]]) -> None:
        """Return when all of these (each with its `due`) are as safe as they will be; one whose id waits on the same
        queue already is left alone. All or none. Raises BacklogFull when there is no room, and anything else when it
        cannot write."""
        ...

    async def first(self, queue: str, after: int) -> Sequence[StoredMessage]:
        """The first messages of a queue whose numbers are above `after`, in order: at most MOST of them and MOST_BYTES,
        but one at least if there is any."""
        ...

    async def gone(self, numbers: Sequence[int]) -> None:
        """These are published: forget them. May be told twice."""
        ...


class BacklogCapacity(msgspec.Struct):
    """How much a backlog takes: `messages`, and `bytes` of them; and what is in it."""

    max_messages: int
    max_bytes: int
    used_messages: int = 0
    used_bytes: int = 0

    def check(self, kept: Sequence[tuple[JobMessage, int | None]]) -> None:
        """Raises BacklogFull when there is no room for so many more."""
        more = sum(len(parcel.message) for parcel, _ in kept)
        if self.used_messages + len(kept) > self.max_messages or self.used_bytes + more > self.max_bytes:
            raise BacklogFull(
                f"no room for {len(kept)} more: the backlog has {self.used_messages} of at most "
                f"{self.max_messages} messages, and "
                f"{self.used_bytes} of at most {self.max_bytes} bytes; none of these was kept, send them later"
            )

    def adjust_usage(self, count: int, size: int) -> None:
        """So much more is in it, or less."""
        self.used_messages += count
        self.used_bytes += size


class MemoryBacklog:
    """A backlog in memory. What is in it when its process dies is lost."""

    def __init__(self, *, capacity: BacklogCapacity) -> None:
        self._room = capacity
        self._number = 0
        self._queues: dict[str, dict[int, StoredMessage]] = {}
        self._where: dict[int, str] = {}
        self._ids: set[tuple[str, str]] = set()

    @property
    def size(self) -> int:
        """How many messages wait."""
        return self._room.used_messages

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Nothing is to be opened."""
        task_status.started()
        await trio.sleep_forever()

    async def queues(self) -> Collection[str]:
        """Those of an incarnation before this one, in the same process."""
        return list(self._queues)

    async def put(self, kept: Sequence[tuple[JobMessage, int | None]]) -> None:
        """Keep them, if there is room."""
        self._room.check(kept)
        for parcel, due in kept:
            if (parcel.queue, parcel.id) in self._ids:
                continue
            self._number += 1
            self._ids.add((parcel.queue, parcel.id))
            self._where[self._number] = parcel.queue
            self._queues.setdefault(parcel.queue, {})[self._number] = StoredMessage(self._number, parcel, due)
            self._room.adjust_usage(1, len(parcel.message))

    async def first(self, queue: str, after: int) -> Sequence[StoredMessage]:
        """The first ones."""
        waiting = self._queues.get(queue, {})
        return limit_read(
            list(islice((each for number, each in waiting.items() if number > after), MAX_READ_MESSAGES))
        )

    async def gone(self, numbers: Sequence[int]) -> None:
        """Forget them."""
        for number in numbers:
            queue = self._where.pop(number, None)
            if queue is None:
                continue
            each = self._queues[queue].pop(number)
            self._ids.discard((queue, each.job.id))
            self._room.adjust_usage(-1, -len(each.job.message))
            if not self._queues[queue]:
                del self._queues[queue]


def limit_read(found: Sequence[StoredMessage]) -> list[StoredMessage]:
    """As many of the first as go in one trip."""
    size, taken = 0, list[StoredMessage]()
    for each in found[:MAX_READ_MESSAGES]:
        size += len(each.job.message)
        if taken and size > MAX_READ_BYTES:
            break
        taken.append(each)
    return taken


def get_state_folder(app: str, environ: Mapping[str, str]) -> Path:
    """Where the backlogs of an application are unless said otherwise. Raises Misconfigured for a user without a
    home."""
    state = environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise Misconfigured(
            "this user has no home folder to keep a backlog in: set CELERY5_PUBLISHER_BACKLOG"
        ) from None
    return root / "celery5" / "publisher" / app.replace("/", "_")


def make_backlog(setting: str, *, app: str, broker: str, capacity: BacklogCapacity) -> MessagesBacklog:
    """The backlog that the setting `publisher_backlog` means, for the broker of that name: `sqlite`, `memory`, a folder
    for SQLite's files, or `module:name` of what makes one, called with `app`, `broker` and `room`. Raises
    Misconfigured."""
    if setting == "memory":
        return MemoryBacklog(capacity=capacity)
    if setting == "sqlite" or "/" in setting:
        from celery5.sending.sqlite_backlog import SQLiteBacklog

        folder = get_state_folder(app, os.environ) if setting == "sqlite" else Path(setting).expanduser()
        return SQLiteBacklog(path=folder / f"{broker.replace('/', '_')}.sqlite3", capacity=capacity)
    module, colon, name = setting.partition(":")
    if not colon:
        raise Misconfigured(
            f"publisher_backlog is {setting!r}: give sqlite, memory, a folder (with a / in it), or module:name"
        )
    try:
        made: Any = getattr(import_module(module), name)(app=app, broker=broker, capacity=capacity)
    except Exception as error:  # the user's code
        raise Misconfigured(f"publisher_backlog {setting!r}: {type(error).__name__}: {error}") from error
    missing = [each for each in ("size", "run", "queues", "put", "first", "gone") if not hasattr(made, each)]
    if missing:
        raise Misconfigured(f"publisher_backlog {setting!r}: {made!r} has no {missing[0]}")
    return cast("MessagesBacklog", made)
