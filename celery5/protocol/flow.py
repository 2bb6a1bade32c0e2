"""Flow: how many documents a Data Sink is given at once, and how long it is left alone when it fails.

Floor: protocol. Pure: no clock, and chance is passed in. Reads: nothing. Writes: nothing.

A batch that fails says little: one document in it may be bad, or the sink may be away. So it is halved until one stands
alone, and only one that fails alone is to blame. A sink that goes on failing then is left alone for longer and longer,
which in an outage uses up the tries of few documents only. What succeeds doubles the next batch again, as TCP's slow
start does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from celery5.protocol.backoff import full_jitter

FIRST_DELIVERY_DELAY = 0.2
"""Seconds that a sink is left alone at most after its first failure."""
MAX_DELIVERY_DELAY = 30.0
"""Seconds that it is at most."""


@dataclass(frozen=True, slots=True)
class DeliveryPacing:
    """`most` is how many documents a batch may have, `size` how many the next one has; `failures` counts how many
    documents in a row have failed alone."""

    max_batch_size: int
    batch_size: int
    failures: int = 0

    @classmethod
    def start(cls, most: int) -> "DeliveryPacing":
        """Before anything is known."""
        return cls(most, most)

    def after_success(self) -> "DeliveryPacing":
        """A batch was written."""
        return replace(self, batch_size=min(self.max_batch_size, self.batch_size * 2), failures=0)

    def after_failure(self, number: int) -> "DeliveryPacing":
        """A batch of so many was not."""
        if number > 1:
            return replace(self, batch_size=max(1, number // 2))
        return replace(self, batch_size=1, failures=self.failures + 1)

    def get_delay(self, random: Callable[[], float]) -> float:
        """Seconds until the next batch. `random` gives numbers in [0, 1)."""
        if not self.failures:
            return 0.0
        return full_jitter(
            self.failures - 1, start=FIRST_DELIVERY_DELAY, cap=MAX_DELIVERY_DELAY, random=random
        )
