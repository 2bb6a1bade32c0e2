"""Keep the status of each boot step of this process, and pass on requests to retry one.

The boot graph records what becomes of its steps. The command `retry-boot-step` (the CEP's Retry Failed Boot Step)
requests a retry.
"""

from typing import Any

import trio

from celery5.errors import CommandRefused
from celery5.protocol.commands.definitions import BootStepParameters
from celery5.protocol.process.supervision import StepState
from celery5.services.process.incarnation_end import IncarnationEnd
from celery5.similar_names import did_you_mean


class StepRecord:
    """The status of one step. The step itself records it; a command may request a retry."""

    def __init__(self, *, optional: bool, max_tries: int = 0) -> None:
        self.optional = optional
        self.max_tries = max_tries
        self.state = StepState.WAITING
        self.last_error = ""
        self.failures = 0
        """How often in a row it failed."""
        self._retry_requested = trio.Event()

    def set_state(self, state: StepState) -> None:
        """Record another state."""
        self.state = state

    def set_up(self) -> None:
        """Record that the step is up, and forget its failures."""
        self.state, self.last_error, self.failures = StepState.UP, "", 0

    def set_failed(self, state: StepState, error: str, failures: int) -> None:
        """Record the last error, and how often in a row the step failed."""
        self.state, self.last_error, self.failures = state, error, failures

    def request_retry(self) -> None:
        """Wake the step, if it waits for its next try."""
        self._retry_requested.set()

    async def wait_retry(self, timeout: float) -> bool:
        """Return whether a retry is requested within `timeout` seconds, or was since the last call."""
        with trio.move_on_after(timeout):
            await self._retry_requested.wait()
        is_requested = self._retry_requested.is_set()
        self._retry_requested = trio.Event()
        return is_requested


class StepStatus:
    """The steps of one process."""

    def __init__(self) -> None:
        self.incarnation_end = IncarnationEnd()
        self._steps: dict[str, StepRecord] = {}

    def add_step(self, step: str, *, optional: bool, max_tries: int = 0) -> StepRecord:
        """Return a new record for a step."""
        self._steps[step] = StepRecord(optional=optional, max_tries=max_tries)
        return self._steps[step]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return all steps as values with a JSON form: `state`, and for one that failed `failures` and `why`."""
        return {
            name: {"state": record.state.value}
            | ({"failures": record.failures, "why": record.last_error} if record.last_error else {})
            for name, record in self._steps.items()
        }

    async def handle_command(self, parameters: BootStepParameters) -> object:
        """Perform `retry-boot-step`: try a failed optional step again, at once and then as its policy says.

        Returns at once; the log reports the outcome. The retry does not wait for the step's circuit breaker. Raises
        CommandRefused for a step that is unknown, is not optional, or has not failed.
        """
        name = parameters.step
        record = self._steps.get(name)
        if record is None:
            failed = [step for step, other in self._steps.items() if other.state in _FAILED]
            hint = did_you_mean(name, self._steps, otherwise=f"failed: {', '.join(failed) or 'none'}")
            raise CommandRefused(f"no boot step {name!r} here; {hint}")
        if not record.optional:
            raise CommandRefused(
                f"boot step {name!r} is mandatory: it is tried again by itself, or its worker stops"
            )
        if record.state not in _FAILED:
            raise CommandRefused(
                f"boot step {name!r} is {record.state.value}: only one that failed is tried again"
            )
        record.request_retry()
        return {"step": name, "tries": record.max_tries}


_FAILED = (StepState.FAILED, StepState.GIVEN_UP)
