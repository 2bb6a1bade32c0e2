"""How far ahead a worker reads, compared with the usual: a command sets it for a while."""

import math
from collections.abc import Mapping

import trio

from celery5.logs.log import Log
from celery5.protocol.commands.definitions import PrefetchParameters
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.services.job.in_flight import InFlightJobs


class PrefetchFactor:
    """The factor on how far ahead one worker reads: 1, unless a command has set another for a while."""

    def __init__(
        self, *, duration_estimates: Mapping[str, DurationEstimate], in_flight: InFlightJobs, log: Log
    ) -> None:
        self._duration_estimates = duration_estimates
        self._in_flight = in_flight
        self._log = log
        self._ends_at = math.inf
        self._changed = trio.Event()
        self.factor: float = 1.0

    async def run_expiry(self) -> None:
        """Reset the factor when its time is over, until cancelled. The Reporter runs this."""
        while True:
            changed = self._changed = trio.Event()
            with trio.move_on_at(self._ends_at):
                await changed.wait()
            if trio.current_time() >= self._ends_at:
                self._set(1.0, math.inf)

    async def handle_command(self, parameters: PrefetchParameters) -> object:
        """Perform the command `prefetch`: read `factor` times as far ahead as usual, and return the factor.

        It holds for `seconds`, else until this worker ends.
        """
        if parameters.factor is not None:
            seconds = math.inf if parameters.seconds is None else parameters.seconds
            self._set(parameters.factor, trio.current_time() + seconds)
        return {"factor": self.factor}

    def _set(self, factor: float, ends: float) -> None:
        if factor != self.factor:
            self._log.event("prefetch:set", "info", factor=factor, before=self.factor)
        self.factor, self._ends_at = factor, math.inf if factor == 1 else ends
        for estimate in self._duration_estimates.values():
            estimate.set_factor(factor)
        self._in_flight.notify()
        self._changed.set()
