"""Messages Store: what a Publisher has taken for one broker and not published yet: its backlog, and what that would not
take (C77, C78).

Floor: services. Reads and writes: the backlog.

When the backlog cannot be written, what came goes on a list in memory, which is bounded, and is published first: before
the process can go down with it. Whoever sent it is told. So the order of a queue is kept but for such messages, which
overtake what was written before.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import trio

from celery5.errors import BacklogFull
from celery5.log import Log
from celery5.messages_backlog import Kept, MemoryBacklog, MessagesBacklog, portion
from celery5.protocol.metrics import Family, counter, gauge
from celery5.protocol.parcels import Parcel, due_at

FALLBACK = 1000
"""Messages on the list in memory, at most."""
FALLBACK_BYTES = 64 * 1024 * 1024
AGAIN = 1.0
"""Seconds between attempts to forget what is published, while the backlog cannot be written."""
LAST_LIMIT = 5.0
"""Seconds that forgetting may take at the end. What is not forgotten is published again, which does no harm."""
TOGETHER = 5000
"""Messages that are forgotten in one step."""

Pair = tuple[Parcel, int | None]


class MessagesStore:
    """What waits for the broker named `broker`. `waiting` has the queues that may have messages, the one that has
    waited longest first."""

    def __init__(self, *, broker: str, backlog: MessagesBacklog, log: Log) -> None:
        self.broker = broker
        self.waiting: OrderedDict[str, None] = OrderedDict()
        self.taken = 0
        self.published = 0
        self._backlog = backlog
        self._log = log
        self._first: dict[str, dict[int, Kept]] = {}
        self._first_ids: set[tuple[str, str]] = set()
        self._first_bytes = 0
        self._number = 0
        self._done: dict[str, int] = {}
        self._gone: list[int] = []
        self._news = trio.Event()
        self._to_forget = trio.Event()
        self._trouble = ""

    @property
    def size(self) -> int:
        """How many messages wait, or are not forgotten yet."""
        return self._backlog.size + len(self._first_ids)

    @property
    def is_safe(self) -> bool:
        """Whether what waits is there when the process is not."""
        return not self._first_ids and not isinstance(self._backlog, MemoryBacklog)

    @property
    def in_memory(self) -> int:
        """How many of them are on the list in memory."""
        return len(self._first_ids)

    @property
    def trouble(self) -> str:
        """Why the backlog could not be written the last time; '' when it could."""
        return self._trouble

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the backlog open until cancelled."""
        async with trio.open_nursery() as nursery:
            backlog = trio.CancelScope()
            await nursery.start(self._keep_open, backlog)
            await trio.lowlevel.checkpoint_if_cancelled()  # see Boot
            backlog.shield = True  # it is closed when all that is published is forgotten
            try:
                for queue in await self._backlog.queues():
                    self.ready(queue)
                task_status.started()
                await self._forget_for_ever()
            finally:
                with trio.move_on_after(LAST_LIMIT, shield=True):
                    await self._forget()
                backlog.cancel()

    async def _keep_open(self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await self._backlog.run(task_status=task_status)

    # ---- what comes

    async def put(self, parcels: Sequence[Parcel]) -> bool:
        """Return when they are stored; gives whether firmly, which is not so when they had to go on the list in memory.
        All or none. Raises BacklogFull."""
        now = int(time.time() * 1000)
        pairs = [(each, due_at(each, now)) for each in parcels]
        firmly = True
        try:
            await self._backlog.put(pairs)
        except BacklogFull:
            raise
        except trio.Cancelled:  # it may be written after all: whoever looks waits for that
            for queue in dict.fromkeys(each.queue for each in parcels):
                self.ready(queue)
            raise
        except Exception as error:  # the disk's trouble, or a backlog of the user's own
            self._failed(error)
            self._put_first(pairs, error)
            firmly = False
        else:
            if self._trouble:
                self._log.event("backlog:written", broker=self.broker, hint="it can be written again")
            self._trouble = ""
        self.taken += len(parcels)
        for queue in dict.fromkeys(each.queue for each in parcels):
            self.ready(queue)
        return firmly

    def _put_first(self, pairs: Sequence[Pair], error: Exception) -> None:
        new = [each for each in pairs if (each[0].queue, each[0].id) not in self._first_ids]
        size = sum(len(parcel.message) for parcel, _ in new)
        if len(self._first_ids) + len(new) > FALLBACK or self._first_bytes + size > FALLBACK_BYTES:
            raise BacklogFull(
                f"the backlog cannot be written ({error}), and there is no room in memory for {len(new)} more: "
                f"{len(self._first_ids)} of at most {FALLBACK} wait there; none of these was kept"
            ) from error
        for parcel, due in new:
            self._number -= 1
            self._first_ids.add((parcel.queue, parcel.id))
            self._first.setdefault(parcel.queue, {})[self._number] = Kept(self._number, parcel, due)
        self._first_bytes += size

    def _failed(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        if why != self._trouble:
            self._log.event(
                "backlog:failed",
                "error",
                broker=self.broker,
                why=why,
                hint="what comes is kept in memory meanwhile",
            )
        self._trouble = why

    def ready(self, queue: str) -> None:
        """A queue may have messages."""
        self.waiting.setdefault(queue)
        self.look_again()

    def look_again(self) -> None:
        """Have whoever waits for queues look again."""
        news, self._news = self._news, trio.Event()
        news.set()

    async def came(self) -> None:
        """Return when it is time to look at what waits."""
        await self._news.wait()

    # ---- what goes

    async def first(self, queue: str) -> Sequence[Kept]:
        """The first messages of a queue, those in memory before all others; they stay until they are `gone`."""
        overtaking = self._first.get(queue)
        if overtaking:
            return portion(list(overtaking.values()))
        return await self._backlog.first(queue, self._done.get(queue, 0))

    def gone(self, queue: str, kept: Sequence[Kept]) -> None:
        """These are published: they are not given again, and will be forgotten."""
        self.published += len(kept)
        for each in kept:
            if each.number > 0:
                continue
            self._first_ids.discard((queue, each.parcel.id))
            self._first_bytes -= len(each.parcel.message)
            self._first[queue].pop(each.number)
        if not self._first.get(queue, True):
            del self._first[queue]
        numbers = [each.number for each in kept if each.number > 0]
        if numbers:
            self._done[queue] = numbers[-1]
            self._gone += numbers
            self._to_forget.set()

    async def _forget_for_ever(self) -> None:
        while True:
            await self._to_forget.wait()
            self._to_forget = trio.Event()
            if not await self._forget():
                await trio.sleep(AGAIN)
                self._to_forget.set()

    async def _forget(self) -> bool:
        while self._gone:
            part = self._gone[:TOGETHER]
            try:
                await self._backlog.gone(part)
            except Exception as error:  # it would be published again after a restart, which does no harm
                self._failed(error)
                return False
            del self._gone[: len(part)]
        return True

    # ---- how it does

    def conditions(self) -> Mapping[str, str]:
        """The backlog can be written."""
        return {f"backlog {self.broker}": self._trouble}

    def families(self) -> Iterable[Family]:
        """How many messages came, went and wait."""
        of = {"broker": self.broker}
        yield counter(
            "celery5_publisher_taken_total", "Messages taken from producers.", (float(self.taken), of)
        )
        yield counter("celery5_publisher_published_total", "Messages published.", (float(self.published), of))
        yield gauge("celery5_publisher_waiting", "Messages in the backlog.", (float(self.size), of))
        yield gauge(
            "celery5_publisher_in_memory",
            "Messages in memory, because the backlog could not be written.",
            (float(self.in_memory), of),
        )
