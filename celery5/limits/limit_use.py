"""Show the limits of all tasks: declared and imposed, whose they are, and how much of each is in use."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from celery5.application import Application
from celery5.broker.call import Call
from celery5.broker.calls import limits as calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.driver import AsyncDriver
from celery5.limits.overrides import TaskLimits, list_task_limits
from celery5.protocol.limits import (
    KIND_PREFIX,
    AdmissionRule,
    DeclaredLimits,
    LimitOverride,
    Range,
    Rate,
    describe_declared_limits,
    make_admission_rule,
    parse_kind_rates,
)

DECLARED, BY_HAND, BY_RULE, BY_SETTING = "declared", "by hand", "by a rule", "setting rate_limits"
"""The origins of a limit."""


class _Use(NamedTuple):
    running: int = 0
    waiting: int = 0
    began: int = 0


async def list_limits_in_use(app: Application, redis: AsyncDriver) -> list[TaskLimits]:
    """Return the limits of all tasks that have any, sorted by task, those of kinds included.

    It reads a few fields of each queue, and of each rate its last starts, MAX_STARTS at most.
    """
    stored = await redis.perform(calls.list_overrides(app.keys))
    imposed = list_task_limits(stored)
    kind_rates = parse_kind_rates(app.settings.rate_limits)
    effective = stored.effective_limits
    rows: dict[str, TaskLimits] = {}
    rules: dict[str, AdmissionRule] = {}
    for name in sorted({*imposed, *(name for name, task in app.tasks.items() if task.declared_limits)}):
        task = app.tasks.get(name)
        declared = None if task is None else task.declared_limits
        override = effective.get(name)
        entry = imposed.get(name) or TaskLimits(name)
        rule = make_admission_rule(
            name, declared, computed=None, override=override, suspended=entry.suspended
        )
        words = (
            "" if task is None else describe_declared_limits(declared, task.kind, kind_rates.get(task.kind))
        )
        rows[name] = _make_row(entry, rule, declared, override, words)
        if rule is not None and not name.startswith(KIND_PREFIX):
            rules[name] = rule
    for kind, rate in kind_rates.items():
        name = KIND_PREFIX + kind
        rows.setdefault(name, TaskLimits(name, rate=rate.text, origin=BY_SETTING))
    used = await _read_use(app, redis, list(rules.values()))
    return [_add_use(row, rules.get(name), used.get(name)) for name, row in sorted(rows.items())]


def _make_row(
    entry: TaskLimits,
    rule: AdmissionRule | None,
    declared: DeclaredLimits | None,
    override: LimitOverride | None,
    words: str,
) -> TaskLimits:
    is_set = override is not None and (override.limit is not None or bool(override.rate))
    by = BY_RULE if entry.rules else BY_HAND
    overrides_limit = override is not None and override.limit is not None
    is_range = not overrides_limit and declared is not None and isinstance(declared.limit, Range)
    rate: Rate | None = None if rule is None else rule.rate
    keeps_rate = rate is not None and not (override is not None and override.rate)
    keeps_limit = not overrides_limit and rate is None and declared is not None
    origins = [DECLARED] if keeps_rate or keeps_limit else []
    fields: dict[str, Any] = msgspec.structs.asdict(entry)
    fields |= {
        "limit": None if rule is None or is_range else rule.max_running,
        "rate": "" if rate is None else rate.text,
        "origin": ", ".join([*origins, by] if is_set else origins),
        "declared": words,
        "per": "" if rule is None else "key" if rule.keyed else rule.per.removeprefix("all"),
    }
    return TaskLimits(**fields)


def _add_use(row: TaskLimits, rule: AdmissionRule | None, use: _Use | None) -> TaskLimits:
    if rule is None or use is None:
        return row
    is_counted = rule.rate is not None and rule.rate.per == "all"
    return msgspec.structs.replace(
        row,
        running=None if rule.keyed else use.running,
        began=use.began if is_counted else None,
        waiting=use.waiting,
    )


async def _read_use(
    app: Application, redis: AsyncDriver, rules: Sequence[AdmissionRule]
) -> Mapping[str, _Use]:
    """Return how much of each limit is in use, by task: on the queue of the task, which is where it is counted.

    Of a task that is not known here it is the sum of all queues.
    """
    known = await redis.perform(queue_calls.list_queues(app.keys)) if rules else []
    by_queue: dict[str, list[AdmissionRule]] = {}
    for rule in rules:
        task = app.tasks.get(rule.task)
        queues = known if task is None else app.brokers.list_shards(task.queue, known)
        for queue in set(queues) & set(known):
            by_queue.setdefault(queue, []).append(rule)
    pairs = [(queue, rule) for queue, of_queue in by_queue.items() for rule in of_queue]
    asked: list[Call[Any]] = []
    for queue, rule in pairs:
        asked += calls.read_use(app.queue(queue), rule)
    replies: list[Any] = await redis.perform_all(asked) if asked else []
    used = {rule.task: _Use() for rule in rules}
    for number, (_, rule) in enumerate(pairs):
        running, waiting, starts, left = replies[4 * number : 4 * number + 4]
        began = 0 if rule.rate is None else calls.count_starts(rule.rate, starts, left)
        use = used[rule.task]
        used[rule.task] = _Use(use.running + running, use.waiting + waiting, use.began + began)
    return used
