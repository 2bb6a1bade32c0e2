"""Reach: how far this worker reads ahead, when it is told to read further than usual (C104).

Floor: services. Reads: nothing. Writes: the horizon of each kind of task; log messages.
"""

import math
from collections.abc import Mapping
from typing import Any

import trio

from celery5.errors import CommandRefused
from celery5.log import Log
from celery5.protocol.autoscale_words import FURTHEST
from celery5.protocol.prefetch import Pace
from celery5.services.ledger import Ledger

LONGEST = 3600.0
"""Seconds for which it can be told to."""


class Reach:
    """The factor on how far ahead one worker reads, 1 unless it was told otherwise not long ago."""

    def __init__(self, *, paces: Mapping[str, Pace], ledger: Ledger, log: Log) -> None:
        self._paces = paces
        self._ledger = ledger
        self._log = log
        self._ends = math.inf
        self._news = trio.Event()
        self.factor: float = 1.0

    async def expire(self) -> None:
        """See to it that it ends in time, until cancelled. The Reporter has this done."""
        while True:
            news = self._news = trio.Event()
            with trio.move_on_at(self._ends):
                await news.wait()
            if trio.current_time() >= self._ends:
                self._set(1.0, math.inf)

    async def order(self, parameters: Mapping[str, Any]) -> object:
        """The command `prefetch`: read `factor` times as far ahead as usual, 1 to 16, for so many `seconds`, or for as
        long as this worker lives. Gives the factor. Raises CommandRefused."""
        strange = sorted(parameters.keys() - {"factor", "seconds"})
        if strange:
            raise CommandRefused(f"prefetch does not take {strange[0]!r}: it takes factor and seconds")
        if "factor" in parameters:
            factor = _number("factor", parameters["factor"], 1.0, FURTHEST)
            seconds = parameters.get("seconds")
            limit = math.inf if seconds is None else _number("seconds", seconds, 0.01, LONGEST)
            self._set(factor, trio.current_time() + limit)
        return {"factor": self.factor}

    def _set(self, factor: float, ends: float) -> None:
        if factor != self.factor:
            self._log.event("prefetch:set", "info", factor=factor, before=self.factor)
        self.factor, self._ends = factor, math.inf if factor == 1 else ends
        for pace in self._paces.values():
            pace.reach(factor)
        self._ledger.nudge()
        self._news.set()


def _number(name: str, value: object, least: float, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise CommandRefused(f"{name} is {value!r}: give a number from {least:g} to {most:g}")
    return float(value)
