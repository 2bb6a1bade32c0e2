"""Take every job that this worker received, by a read or from the reply to another call."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery5.broker.calls.jobs import Entry
from celery5.errors import Corrupt
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Command, read_command
from celery5.protocol.job.verdict import Reason
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs, RecentJobs
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.job.unstarted_jobs import UnstartedJobs
from celery5.services.limits.admission_state import AWAITING_ADMISSION, AdmissionState
from celery5.services.scaling.preferences import Preferences
from celery5.services.worker.capacity import QueueCapacity
from celery5.services.worker.foreign_jobs import ForeignJobs
from celery5.tasks.task import Task


class JobIntake:
    """Takes the jobs that the Consumer has read, and those that other calls to Redis return."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        queues: Mapping[str, InternalTasksQueue],
        budget: MaximalConcurrencyBudget,
        job_middleware: JobMiddleware,
        queue_capacity: QueueCapacity,
        in_flight: InFlightJobs,
        recent: RecentJobs,
        isolated_jobs: IsolatedJobs,
        admission: AdmissionState,
        preferences: Preferences,
        unstarted: UnstartedJobs,
        foreign_jobs: ForeignJobs,
        message_limit: int,
        lacking: Mapping[str, str],
    ) -> None:
        self._tasks = tasks
        self._queues = queues
        self._tasks_with_budgets = budget.task_kinds
        self._capacity = queue_capacity
        self._in_flight = in_flight
        self._recent = recent
        self._isolated = isolated_jobs
        self._admission = admission
        self._preferences = preferences
        self._job_middleware = job_middleware
        self._unstarted = unstarted
        self._foreign_jobs = foreign_jobs
        self._message_limit = message_limit
        self._lacking = lacking
        # How many messages came that this worker has had before.
        self.duplicate_count = 0

    def accept_new(self, entries: Sequence[Entry]) -> int:
        """Take the entries that this worker does not hold yet, and return how many those are.

        An audit may find an admitted job while the reply that carries it is on its way. The second one is then no
        duplicate of the job.
        """
        new = [entry for entry in entries if (entry.queue, entry.id) not in self._in_flight]
        self.accept(new, may_hold_slots=self._admission.is_used)
        return len(new)

    def accept(self, entries: Sequence[Entry], *, may_hold_slots: bool = False) -> None:
        """Take entries that were read for this worker.

        An entry that an audit finds may hold a slot although its task has no limit now: its outcome, or the reply that
        admitted it, was lost.
        """
        accepted = self._accept(entries, may_hold_slots)
        if self._job_middleware.receives:
            self._job_middleware.note_received(accepted)

    def _accept(self, entries: Sequence[Entry], may_hold_slots: bool) -> Sequence[Delivery]:
        """Take entries; return the jobs that may run here."""
        now, accepted = time.time(), list[Delivery]()
        counts_by_queue: dict[str, dict[str, int]] = {}
        for entry in entries:
            delivery = _make_delivery(entry, now)
            try:
                command = read_command(entry.message, self._message_limit)
            except Corrupt as error:
                self._refuse(delivery, Reason.CORRUPT, "Corrupt", str(error))
                continue
            if self._recent.check_and_add(delivery, command):
                self._drop_duplicate(delivery, command)
                continue
            if command.task not in self._tasks or command.task in self._lacking:
                delivery.set_command(command)
                text = self._describe_foreign(command.task)
                self._in_flight.add(delivery)
                self._foreign_jobs.refuse(delivery, text)
                continue
            task = self._tasks[command.task]
            kind: str = task.kind
            if self._tasks_with_budgets and command.task in self._tasks_with_budgets:
                kind = command.task
            delivery.set_task(command, kind, task.recipients)
            accepted.append(delivery)
            counts = counts_by_queue.setdefault(entry.queue, {})
            if (
                delivery.is_admitted
                or command.task in self._admission.rules
                or kind in self._admission.saturated_kinds
            ):
                self._to_admission(delivery, command.task, counts)
                continue
            counts[kind] = counts.get(kind, 0) + 1
            self._put(delivery, command, may_hold_slots)
        self._capacity.record_read(counts_by_queue)
        if self._preferences.tasks:
            for queue_of_kind in self._queues.values():
                self._preferences.sort_queue(queue_of_kind)
        return accepted

    def _put(self, delivery: Delivery, command: Command, may_hold_slot: bool) -> None:
        """Queue a job that needs no admission."""
        if may_hold_slot:
            self._admission.assume_slot(delivery, command.task)
        self._in_flight.add(delivery)
        if delivery.deliveries < self._isolated.min_deaths:
            self._queues[delivery.kind].put(delivery)
        else:
            self._isolated.add(delivery)

    def _drop_duplicate(self, delivery: Delivery, command: Command) -> None:
        delivery.set_command(command)
        if self._admission.is_used:  # it may still have its slot if its outcome was lost
            delivery.take_slot(self._admission.get_rule(command.task))
        self._in_flight.add(delivery)
        self.duplicate_count += 1
        self._unstarted.drop_duplicate(delivery, command)

    def _describe_foreign(self, task: str) -> str:
        if task in self._lacking:
            return f"this worker lacks what task {task!r} takes: {self._lacking[task]}"
        return f"no task {task!r} on this worker: does it load the module that declares it?"

    def _to_admission(self, delivery: Delivery, task: str, counts: dict[str, int]) -> None:
        if why := self._admission.receive(delivery, task):
            self._refuse(delivery, Reason.REJECTED_BY_LIMIT, "RejectedByLimit", why)
        elif not delivery.is_admitted:
            kind = AWAITING_ADMISSION if task in self._admission.rules else self._admission.get_kind(task)
            counts[kind] = counts.get(kind, 0) + 1

    def _refuse(self, delivery: Delivery, reason: Reason, error: str, text: str) -> None:
        self._in_flight.add(delivery)
        self._unstarted.refuse(delivery, reason, error, text)


def _make_delivery(entry: Entry, now: float) -> Delivery:
    delivery = Delivery(entry.queue, entry.id, entry.message, entry.deliveries, read=now, lane=entry.lane)
    if entry.since:
        delivery.set_since(entry.since)
    if entry.is_foreign:
        delivery.set_foreign()
    return delivery
