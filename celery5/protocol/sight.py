"""Sight: which of several brokers are not seen by who decides for all of them.

Floor: protocol. Reads: nothing. Writes: nothing.

One that has just come back counts as unseen a little longer: its jobs are there at once, but its workers have to find
it and to report before anybody can say that fewer of them would do.
"""

import math
from collections.abc import Collection, Mapping

import msgspec


class BrokerVisibility(msgspec.Struct, frozen=True):
    """The brokers that are not seen, by name, and until when: infinity while one does not answer."""

    until: Mapping[str, float] = {}

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.until)


def update_visibility(
    before: BrokerVisibility, unreachable: Collection[str], now: float, *, settle_seconds: float
) -> BrokerVisibility:
    """One look, at the time `now`, at which those that are `away` gave no answer. Who answers again is seen `settles`
    seconds later."""
    until = {
        name: now + settle_seconds if math.isinf(at) else at
        for name, at in before.until.items()
        if name not in unreachable
    }
    until = {name: at for name, at in until.items() if now < at}
    return BrokerVisibility({**until, **dict.fromkeys(unreachable, math.inf)})
