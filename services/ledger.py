"""Ledger: the jobs that this worker holds, from the read to the settlement.

Floor: services. Reads: nothing. Writes: nothing.

It is what bounds everything in a worker: the Consumer reads no more than the ledger has room for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import trio

from celery5.protocol.delivery import Delivery


class InFlightJobs:
    """What is held, by queue and stream entry; how many were settled in `total`. One task may wait for it to change."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, bytes], Delivery] = {}
        self._kinds: defaultdict[str, int] = defaultdict(int)
        self._changed = trio.Event()
        self._watching: list[Callable[[], None]] = []
        self.settled_count = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, place: tuple[str, bytes]) -> bool:
        return place in self._held

    def __iter__(self) -> Iterator[Delivery]:
        return iter(list(self._held.values()))

    def find(self, place: tuple[str, bytes]) -> Delivery | None:
        """What is held of this queue and stream entry."""
        return self._held.get(place)

    def get_oldest(self) -> Delivery | None:
        """What has been held for longest."""
        return next(iter(self._held.values()), None)

    def count(self, kind: str) -> int:
        """How many jobs of one kind are held."""
        return self._kinds.get(kind, 0)

    def add(self, delivery: Delivery) -> None:
        """This worker holds `delivery` now."""
        self._held[delivery.queue, delivery.entry] = delivery
        self._kinds[delivery.kind] += 1

    def change_kind(self, delivery: Delivery, kind: str) -> None:
        """`delivery`, which is held, counts for another kind from now on."""
        self._kinds[delivery.kind] -= 1
        self._kinds[kind] += 1
        delivery.kind = kind

    def remove(self, deliveries: Iterable[Delivery]) -> None:
        """These are settled: there is room for others."""
        before = len(self._held)
        for delivery in deliveries:
            if self._held.pop((delivery.queue, delivery.entry), None) is not None:
                self._kinds[delivery.kind] -= 1
        self.settled_count += before - len(self._held)
        self._changed.set()
        for each in self._watching:
            each()

    def add_listener(self, look: Callable[[], None]) -> None:
        """Call `look` whenever something was settled."""
        self._watching.append(look)

    def notify(self) -> None:
        """Nothing was settled, but there may be room for others all the same."""
        self._changed.set()

    async def wait_changed(self) -> None:
        """Wait until something was settled since this was last waited for."""
        await self._changed.wait()
        self._changed = trio.Event()
