"""Keep the status of each boot step of this process, and pass on requests to retry one.

The boot graph records here what becomes of its steps. The command `retry-boot-step` (the CEP's Retry Failed Boot Step)
finds its step here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from celery5.errors import CommandRefused
from celery5.protocol.process.supervision import StepState
from celery5.protocol.similar_names import did_you_mean


@dataclass(slots=True)
class StepRecord:
    """The status of one step."""

    optional: bool
    state: StepState = StepState.WAITING
    why: str = ""  # it failed last
    failures: int = 0  # in a row
    max_tries: int = 0
    retry_requested: trio.Event = field(default_factory=trio.Event)


class StepStatus:
    """The steps of one process."""

    def __init__(self) -> None:
        self._steps: dict[str, StepRecord] = {}

    def add_step(self, step: str, *, optional: bool) -> StepRecord:
        """Add a step, and return its record."""
        self._steps[step] = StepRecord(optional)
        return self._steps[step]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return all steps as values with a JSON form: `state`, and for one that failed `failures` and `why`."""
        return {
            name: {"state": step.state.value}
            | ({"failures": step.failures, "why": step.why} if step.why else {})
            for name, step in self._steps.items()
        }

    async def handle_command(self, parameters: Mapping[str, Any]) -> object:
        """Perform `retry-boot-step`: try a failed optional step again, at once and then as its policy says.

        It returns at once; the log shows what becomes of the step. Circuit breakers do not apply.

        Raises:
            CommandRefused: There is no such step, it is not optional, or it has not failed.
        """
        name = parameters.get("step")
        step = self._steps.get(name) if isinstance(name, str) else None
        if step is None:
            failed = [step_name for step_name, record in self._steps.items() if record.state in _FAILED]
            hint = did_you_mean(str(name), self._steps, otherwise=f"failed: {', '.join(failed) or 'none'}")
            raise CommandRefused(f"no boot step {name!r} here; {hint}")
        if not step.optional:
            raise CommandRefused(
                f"boot step {name!r} is mandatory: it is tried again by itself, or its worker stops"
            )
        if step.state not in _FAILED:
            raise CommandRefused(
                f"boot step {name!r} is {step.state.value}: only one that failed is tried again"
            )
        step.retry_requested.set()
        return {"step": name, "tries": step.max_tries}


_FAILED = (StepState.FAILED, StepState.GIVEN_UP)
