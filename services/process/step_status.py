"""Keep the status of each boot step of this process, and pass on requests to retry one.

Here the graph and the commands meet: the graph notes what has become of its steps, and the command `retry-boot-step`
(the CEP's Retry Failed Boot Step) finds the one that it is about.
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
    """How one step stands: its `state`, why it failed last, how often in a row, and what wakes whoever looks after it,
    once it may be asked for again."""

    optional: bool
    state: StepState = StepState.WAITING
    why: str = ""
    failures: int = 0
    max_tries: int = 0
    retry_requested: trio.Event = field(default_factory=trio.Event)


class StepStatus:
    """The steps of one process."""

    def __init__(self) -> None:
        self._steps: dict[str, StepRecord] = {}

    def add_step(self, step: str, *, optional: bool) -> StepRecord:
        """A new line for a step."""
        self._steps[step] = StepRecord(optional)
        return self._steps[step]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """All steps as values with a JSON form: `state`, and for one that failed `failures` and `why`."""
        return {
            name: {"state": each.state.value}
            | ({"failures": each.failures, "why": each.why} if each.why else {})
            for name, each in self._steps.items()
        }

    async def handle_command(self, parameters: Mapping[str, Any]) -> object:
        """Perform `retry-boot-step`: try a failed optional step again, at once and then as its policy says.

        Answers at once; the log tells how it goes. No circuit breaker is asked. Raises CommandRefused for a step
        that is not there, is not optional, or has not failed.
        """
        name = parameters.get("step")
        one = self._steps.get(name) if isinstance(name, str) else None
        if one is None:
            failed = [each for each, it in self._steps.items() if it.state in _FAILED]
            hint = did_you_mean(str(name), self._steps, otherwise=f"failed: {', '.join(failed) or 'none'}")
            raise CommandRefused(f"no boot step {name!r} here; {hint}")
        if not one.optional:
            raise CommandRefused(
                f"boot step {name!r} is mandatory: it is tried again by itself, or its worker stops"
            )
        if one.state not in _FAILED:
            raise CommandRefused(
                f"boot step {name!r} is {one.state.value}: only one that failed is tried again"
            )
        one.retry_requested.set()
        return {"step": name, "tries": one.max_tries}


_FAILED = (StepState.FAILED, StepState.GIVEN_UP)
