"""The slots of a worker by kind, and how many of them are taken, as people see them."""

from collections.abc import Mapping

import msgspec


class SlotUse(msgspec.Struct, frozen=True):
    """The slots of one kind of tasks in a worker."""

    # Jobs of the kind that run.
    used: int
    # How many may run at once now.
    current: int
    # To how many that may grow.
    most: int

    def describe(self) -> str:
        """Return them in words: `1 of 2 (up to 8)`, or `1 of 2` where there cannot be more."""
        growth = f" (up to {self.most})" if self.most > self.current else ""
        return f"{self.used} of {self.current}{growth}"


def format_slots(slots: Mapping[str, SlotUse]) -> str:
    """Return the slots of all kinds: `trio 3 of 100, thread 1 of 2 (up to 8)`. '' for none.

    The kinds are not added up: a slot for I/O-bound tasks cannot run a CPU-bound one.
    """
    return ", ".join(f"{kind} {use.describe()}" for kind, use in slots.items())


def read_slots(answer: object) -> dict[str, SlotUse]:
    """Return the slots by kind, from `slots` in the answer of a worker to `stats`; none when it cannot be read."""
    try:
        counts = msgspec.convert(answer or {}, dict[str, dict[str, int]])
    except msgspec.ValidationError:  # an earlier version, or a later one
        return {}
    return {
        kind: SlotUse(count.get("executing", 0), count["current"], count.get("maximum", 0))
        for kind, count in counts.items()
        if count.get("current")
    }
