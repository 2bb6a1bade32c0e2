"""Run the circuit breakers of tasks and services: decide which job may start, and how long the others wait.

A task gets its breaker at its first failure, or at once if it has health checks; until then it costs nothing. To start
and settle a job, a worker looks only at two collections, which are mostly empty: `not_closed` and `needing_success`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import trio

from celery5.errors import CircuitOpen
from celery5.health.circuit_breaker import BreakerReading, CircuitBreaker
from celery5.health.health_check import HealthCheck
from celery5.logs.log import Log
from celery5.protocol.health.breaker import SERVICE_PREFIX, BreakerPolicy, BreakerState
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.verdict import CircuitBlocked, Outcome, Raised, is_task_healthy
from celery5.protocol.masking import mask_lines
from celery5.protocol.names import get_class_names
from celery5.tasks.task import Task

_ERROR_CLASSES = get_class_names(CircuitOpen("open"))


class BreakerTrip(msgspec.Struct, frozen=True):
    """The breaker of a task has opened, and its jobs are held."""

    task: str
    why: str
    open_until: float  # on Trio's clock


class CircuitBreakers:
    """All breakers of one process: of its tasks and services, of the webhook and of outlets for metrics.

    Whatever shows breakers asks it. Those of connections are part of these, and shown beside (`ConnectionStatus`).

    `not_closed` has the breakers of tasks that are not closed, `needing_success` the tasks whose breakers would change
    with a success.
    """

    def __init__(self, *, tasks: Mapping[str, Task[..., Any]], log: Log) -> None:
        self._tasks = tasks
        self._log = log
        self._by_task: dict[str, CircuitBreaker | None] = {}
        self._others: dict[str, CircuitBreaker] = {}
        self._trips: trio.MemorySendChannel[BreakerTrip] | None = None
        self._sent_trips: dict[str, int] = {}
        self.not_closed: dict[str, CircuitBreaker] = {}
        self.needing_success: set[str] = set()
        for name, task in tasks.items():
            if task.checks:
                self._by_task[name] = self._make_circuit(name)

    def open_trips_channel(self) -> trio.MemoryReceiveChannel[BreakerTrip]:
        """Return a channel that receives each task whose jobs are held from now on. There is one such channel."""
        # Unbounded: a task is sent again only after its breaker was closed, or a probe has failed.
        self._trips, receive = trio.open_memory_channel[BreakerTrip](math.inf)
        return receive

    def add_service(
        self, name: str, policy: BreakerPolicy | None = None, checks: Sequence[HealthCheck] = ()
    ) -> CircuitBreaker | None:
        """Return the breaker of a service; None if its policy is off.

        What runs the service must call `try_pass` before it starts the service again.
        """
        policy = policy or BreakerPolicy()
        if policy.mode == "off":
            return None
        name = f"{SERVICE_PREFIX}{name}"
        self._others[name] = CircuitBreaker(name=name, policy=policy, log=self._log, checks=checks)
        return self._others[name]

    def add(self, name: str, policy: BreakerPolicy, *, effect: str) -> CircuitBreaker:
        """Return the breaker of something else that this process calls, such as `outlet:StatsD`.

        Args:
            name: What it protects. A second one of this name gets a number.
            policy: When it opens, and for how long.
            effect: What it does while it is open, as a phrase.
        """
        number = sum(other.split("#")[0] == name for other in self._others)
        name = f"{name}#{number + 1}" if number else name
        self._others[name] = CircuitBreaker(name=name, policy=policy, log=self._log, effect=effect)
        return self._others[name]

    def try_bar(self, delivery: Delivery, task: str) -> CircuitBlocked | None:
        """Return the outcome of a job whose task is in `not_closed`; None when it may run."""
        circuit = self.not_closed[task]
        wait = circuit.try_pass(delivery)
        if wait is None:
            return None
        text = f"the circuit breaker of {task} is open: {circuit.why}"
        failure = Failure(type="CircuitOpen", message=text)
        if circuit.policy.mode != "delay":
            return CircuitBlocked(failure, _ERROR_CLASSES)
        command = delivery.command
        if command is not None and command.expires is not None:
            # The expiry is then reported in time.
            wait = min(wait, max(command.expires - time.time(), 0.0))
        return CircuitBlocked(failure, _ERROR_CLASSES, wait)

    def record_outcome(self, delivery: Delivery, task: str, outcome: Outcome) -> None:
        """Record how a job has ended."""
        succeeded = is_task_healthy(outcome)
        if succeeded is False and task not in self._by_task:
            self._by_task[task] = self._make_circuit(task)
        circuit = self._by_task.get(task)
        if circuit is None or type(outcome) is CircuitBlocked:
            return
        # Masked here: it is stored for the pages of all processes, too.
        why = (
            mask_lines(f"{outcome.failure.type}: {outcome.failure.message}")
            if type(outcome) is Raised
            else ""
        )
        circuit.record_result(delivery, succeeded=succeeded, why=why)
        self._update_collections(task, circuit)

    def record_check(self, check: HealthCheck, state: str, why: str = "") -> None:
        """Record the state of a health check in all breakers that it belongs to, also if it is unchanged."""
        for name, circuit in self._by_task.items():
            if circuit is not None and check.name in circuit.checks:
                circuit.record_check(check, state, why)
                self._update_collections(name, circuit)
        for circuit in self._others.values():
            if check.name in circuit.checks:
                circuit.record_check(check, state, why)

    def get_readings(self) -> dict[str, BreakerReading]:
        """Return the current state of each breaker but those of connections, by the name of what it protects."""
        of_tasks = {name: circuit for name, circuit in self._by_task.items() if circuit is not None}
        return {name: circuit.get_reading() for name, circuit in (of_tasks | self._others).items()}

    def _make_circuit(self, task: str) -> CircuitBreaker | None:
        declared = self._tasks[task]
        policy = declared.breaker
        if policy.mode == "off":
            return None
        return CircuitBreaker(name=task, policy=policy, log=self._log, checks=declared.checks)

    def _update_collections(self, task: str, circuit: CircuitBreaker) -> None:
        """Update `not_closed` and `needing_success`, and send the task if its breaker has just opened."""
        if circuit.breaker.state is BreakerState.CLOSED:
            self.not_closed.pop(task, None)
        else:
            self.not_closed[task] = circuit
        if self._trips is not None and circuit.trips > self._sent_trips.get(task, 0):
            self._sent_trips[task] = circuit.trips
            if circuit.policy.mode == "delay":
                self._trips.send_nowait(BreakerTrip(task, circuit.why, circuit.breaker.open_until))
        if circuit.breaker.needs_success:
            self.needing_success.add(task)
        else:
            self.needing_success.discard(task)
