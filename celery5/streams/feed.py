"""The feed of a processor: the Protocol by which its records come, and its outputs and its state go."""

from collections.abc import Sequence
from typing import Protocol

from celery5.broker.calls.streams import RawEntry


class RecordFeed(Protocol):
    """Where the records of one processor and partition come from, and where its outputs go."""

    @property
    def group(self) -> str:
        """The name of the processor."""
        ...

    @property
    def partition(self) -> int:
        """The partition."""
        ...

    @property
    def grace_period(self) -> float:
        """Seconds that a processor has to end."""
        ...

    @property
    def concurrency(self) -> int:
        """How many feeds the partition has."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether the processor is to end."""
        ...

    def now(self) -> float:
        """Return the time of a clock that never goes back, in seconds."""
        ...

    def take_next(self) -> RawEntry | None:
        """Acknowledge what was taken before, and return the next record if it is here."""
        ...

    async def wait_next(self) -> RawEntry | None:
        """Return the next record when it is here; None when the processor is to end."""
        ...

    async def wait_next_within(self, seconds: float) -> RawEntry | None:
        """Return the next record; None when none has come in this time, or the processor is to end."""
        ...

    async def wait_batch(self, count: int, within: float) -> Sequence[RawEntry]:
        """Acknowledge what was taken before, and return the next batch; an empty one when the processor is to end."""
        ...

    def add_output(self, output: bytes) -> None:
        """Add an output to what is committed with the records that were taken last."""
        ...

    async def get_state(self, name: str) -> bytes | None:
        """Return a value of the keyed state."""
        ...

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state."""
        ...

    def set_state(self, name: str, value: bytes | None) -> None:
        """Set a value of the keyed state, with the records that were taken last; None removes it."""
        ...

    def settle(self) -> None:
        """Acknowledge what was taken, and have it committed soon with its outputs and changes of state.

        What has come without records, as time went by, is committed, too.
        """
        ...

    async def flush(self) -> None:
        """`settle`, and wait until the commit of that is under way."""
        ...
