"""Reach: how far this worker reads ahead, when it is told to read further than usual (C104).

Floor: services. Reads: nothing. Writes: the horizon of each kind of task; log messages.
"""

import math
from collections.abc import Mapping
from typing import Any

import trio

from celery5.errors import CommandRefused
from celery5.log import Log
from celery5.protocol.autoscale_words import MAX_PREFETCH_FACTOR
from celery5.protocol.prefetch import DurationEstimate
from celery5.services.ledger import InFlightJobs

MAX_DURATION = 3600.0
"""Seconds for which it can be told to."""


class PrefetchFactor:
    """The factor on how far ahead one worker reads, 1 unless it was told otherwise not long ago."""

    def __init__(
        self, *, duration_estimates: Mapping[str, DurationEstimate], in_flight: InFlightJobs, log: Log
    ) -> None:
        self._paces = duration_estimates
        self._ledger = in_flight
        self._log = log
        self._ends = math.inf
        self._news = trio.Event()
        self.factor: float = 1.0

    async def run_expiry(self) -> None:
        """See to it that it ends in time, until cancelled. The Reporter has this done."""
        while True:
            news = self._news = trio.Event()
            with trio.move_on_at(self._ends):
                await news.wait()
            if trio.current_time() >= self._ends:
                self._set(1.0, math.inf)

    async def handle_command(self, parameters: Mapping[str, Any]) -> object:
        """The command `prefetch`: read `factor` times as far ahead as usual, 1 to 16, for so many `seconds`, or for as
        long as this worker lives. Gives the factor. Raises CommandRefused."""
        strange = sorted(parameters.keys() - {"factor", "seconds"})
        if strange:
            raise CommandRefused(f"prefetch does not take {strange[0]!r}: it takes factor and seconds")
        if "factor" in parameters:
            factor = _number("factor", parameters["factor"], 1.0, MAX_PREFETCH_FACTOR)
            seconds = parameters.get("seconds")
            limit = math.inf if seconds is None else _number("seconds", seconds, 0.01, MAX_DURATION)
            self._set(factor, trio.current_time() + limit)
        return {"factor": self.factor}

    def _set(self, factor: float, ends: float) -> None:
        if factor != self.factor:
            self._log.event("prefetch:set", "info", factor=factor, before=self.factor)
        self.factor, self._ends = factor, math.inf if factor == 1 else ends
        for pace in self._paces.values():
            pace.set_factor(factor)
        self._ledger.notify()
        self._news.set()


def _number(name: str, value: object, least: float, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise CommandRefused(f"{name} is {value!r}: give a number from {least:g} to {most:g}")
    return float(value)
