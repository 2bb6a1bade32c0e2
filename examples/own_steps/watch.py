"""Check the rates regularly, beside the jobs, and send a job about them."""

import logging

import trio

from celery5.examples.own_steps.rates import note

PAUSE = 1.0
"""Seconds between two checks."""


class RateWatch:
    """A service. The parameters of its constructor name what it needs: the result of step `rates`, and a logger."""

    def __init__(self, *, rates: dict[str, float], logger: logging.Logger) -> None:
        self._rates = rates
        self._logger = logger

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Check until the worker stops. The service is up when it has called `started`."""
        task_status.started()
        while True:
            job = await note.adelay(len(self._rates))
            self._logger.info("told of in job %s", job.id)
            await trio.sleep(PAUSE)
