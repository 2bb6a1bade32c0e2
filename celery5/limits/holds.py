"""Say in words what holds the jobs of a queue that wait at limits."""

from collections.abc import Mapping

from celery5.application import Application
from celery5.broker.calls import limits as calls
from celery5.broker.driver import AsyncDriver
from celery5.protocol.limits import (
    KIND_PREFIX,
    Rate,
    make_admission_rule,
    parse_kind_rates,
)

MAX_NAMED = 3
"""Tasks that are named: those of which most jobs are held."""


class LimitHolds:
    """Describes what holds jobs, by the limits that tasks of the application declare and those that are imposed."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def describe(self, redis: AsyncDriver, held: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
        """Return what holds the jobs of each queue that has any, in words. Reads nothing where none is held.

        Args:
            redis: The way to the brokers.
            held: How many jobs wait at limits, by queue and task.
        """
        if not any(held.values()):
            return {}
        stored = await redis.perform(calls.list_overrides(self._app.keys))
        rates = parse_kind_rates(self._app.settings.rate_limits)
        overrides = stored.effective_limits

        def describe_task(name: str) -> str:
            task = self._app.tasks.get(name)
            kind = "" if task is None else task.kind
            imposed = overrides.get(KIND_PREFIX + kind)
            rule = make_admission_rule(
                name,
                None if task is None else task.declared_limits,
                computed=None,
                override=overrides.get(name),
                suspended=name in stored.suspended,
                kind=kind,
                kind_rate=Rate(imposed.rate) if imposed and imposed.rate else rates.get(kind),
            )
            return f"a limit of {name}" if rule is None else rule.describe()

        return {
            queue: ", ".join(
                describe_task(task) for task in sorted(tasks, key=lambda task: -tasks[task])[:MAX_NAMED]
            )
            for queue, tasks in held.items()
            if tasks
        }
