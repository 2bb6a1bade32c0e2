"""Compute when the rate of a task lets its next job begin, for tests in virtual time."""

from celery5.app import App
from celery5.broker.calls import limits as limit_calls
from celery5.broker.calls import virtual_time as calls
from celery5.broker.calls.jobs import SERVER_TIME
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.keys import QueueKeys
from celery5.protocol.limits import (
    KIND_PREFIX,
    AdmissionRule,
    Rate,
    escape_word,
    make_admission_rule,
    parse_kind_rates,
)


class RateWaits:
    """The waits of an application's jobs at the rates of tasks and of kinds of tasks."""

    def __init__(self, app: App, redis: BlockingRedis) -> None:
        self._app = app
        self._redis = redis

    def find_next(self, queues: list[QueueKeys]) -> int | None:
        """Return the ms until a job that waits at a limit may begin; -1 if only suspended tasks have such jobs.

        Returns None if a job waits for something else than a rate, or is about to begin.
        """
        waits = list[int]()
        stored = self._redis.perform(limit_calls.list_overrides(self._app.keys))
        kind_rates = parse_kind_rates(self._app.settings.rate_limits)
        for queue in queues:
            for task in self._redis.perform(calls.list_limited_tasks(queue)):
                rule = self._make_rule(task, stored, kind_rates)
                if rule is None or not rule.suspended:
                    wait = 0 if rule is None else self._find_wait(queue, rule)
                    if wait <= 0:
                        return None
                    waits.append(wait)
        return min(waits, default=-1)

    def _make_rule(
        self, name: str, stored: limit_calls.StoredOverrides, kind_rates: dict[str, Rate]
    ) -> AdmissionRule | None:
        task = self._app.tasks.get(name)
        kind = "" if task is None else task.kind
        imposed = stored.effective_limits.get(KIND_PREFIX + kind)
        return make_admission_rule(
            name,
            None if task is None else task.declared_limits,
            computed=None,
            override=stored.effective_limits.get(name),
            suspended=name in stored.suspended,
            kind=kind,
            kind_rate=Rate(imposed.rate) if imposed is not None and imposed.rate else kind_rates.get(kind),
        )

    def _find_wait(self, queue: QueueKeys, rule: AdmissionRule) -> int:
        """Return the ms until a job of a task may begin by its rates; 0 or less if one may begin now."""
        waits = [0]
        if rule.rate is not None and rule.rate.per == "all":
            waits.append(self._read_wait(calls.get_starts_key(queue, escape_word(rule.task)), rule.rate))
        if rule.kind_rate is not None:
            waits.append(self._read_wait(self._app.keys.kind_starts(rule.kind), rule.kind_rate))
        return max(waits)

    def _read_wait(self, key: str, rate: Rate) -> int:
        starts = self._redis.perform(calls.list_starts(key))
        if len(starts) < rate.count:
            return 0
        return starts[-rate.count] + rate.window - int(self._redis.perform(SERVER_TIME) * 1000)

    def wake(self, queues: list[QueueKeys]) -> None:
        """Make workers request the jobs that wait at limits."""
        for queue in queues:
            tasks = self._redis.perform(calls.list_limited_tasks(queue))
            self._redis.perform_all([calls.wake(queue.slots_freed, escape_word(task)) for task in tasks])
