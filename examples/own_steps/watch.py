"""Watch: looks at the rates now and then, beside the jobs, and sends a job about them."""

import logging

import trio

from celery5.examples.own_steps.rates import note

PAUSE = 1.0
"""Seconds between two looks."""


class RateWatch:
    """The service. Its constructor says by name what it needs: what the step `rates` gave, and a logger."""

    def __init__(self, *, rates: dict[str, float], logger: logging.Logger) -> None:
        self._rates = rates
        self._logger = logger

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Look until the worker stops. It is up when it has said so."""
        task_status.started()
        while True:
            job = await note.adelay(len(self._rates))
            self._logger.info("told of in job %s", job.id)
            await trio.sleep(PAUSE)
