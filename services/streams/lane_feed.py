"""The records of one lane, for whoever runs the function of a processor on them."""

from collections.abc import Sequence
from typing import Protocol

import trio

from celery5.broker.calls.streams import RawEntry
from celery5.streams.feed import RecordFeed


class LaneFeed(RecordFeed, Protocol):
    """A `RecordFeed`, and what becomes of the records when a function has ended: a `Lane`, or what surrounds one."""

    @property
    def taken(self) -> Sequence[RawEntry]:
        """The records that the function has taken last."""
        ...

    @property
    def stop_requested(self) -> trio.Event:
        """Set when the processor is to end."""
        ...

    def give_back(self) -> None:
        """Put what was taken in front again, and forget what it has produced."""
        ...

    def bury(self, dead: Sequence[Sequence[str | bytes]]) -> None:
        """Give up what was taken."""
        ...

    # for a function in another thread: it takes records in portions, and is done with one after the other

    async def wait_portion(self, most: int, seconds: float | None, /) -> Sequence[RawEntry]:
        """Return the next records when some are here, beside those that were taken; none when the function is to end.

        Args:
            most: At most so many.
            seconds: At most for so long; None for no limit.
        """
        ...

    def settle_first(self, count: int, outputs: list[bytes], state: dict[str, bytes | None], /) -> None:
        """Acknowledge the first of what was taken, with what it has produced."""
        ...

    def return_behind(self, count: int, /) -> None:
        """Put what was taken in front again, but for the first `count`."""
        ...

    def take_over(self, count: int, outputs: list[bytes], state: dict[str, bytes | None], /) -> None:
        """Continue where a function has ended: with so many records in hand, and what it has produced for them."""
        ...
