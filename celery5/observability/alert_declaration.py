"""Declare rules of alerts with `app.alert`, and join them to those of the settings and those built in."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from celery5.errors import Misconfigured
from celery5.protocol.observability.alert_rules import (
    AlertThresholds,
    check_names,
    check_rule,
    make_builtin_rules,
    parse_rules,
)
from celery5.protocol.observability.alerting import AlertCondition, AlertRule, Severity

if TYPE_CHECKING:
    from celery5.config.settings import Settings


class DeclareAlert:
    """The declaration of rules: `app.alert(...)`."""

    def __init__(self) -> None:
        self._rules: dict[str, AlertRule] = {}

    def __call__(
        self,
        name: str,
        condition: AlertCondition,
        *,
        severity: Severity = "warning",
        for_: float = 60.0,
        keep_firing_for: float = 60.0,
    ) -> AlertRule:
        """Declare a rule. One with the name of a built-in rule replaces it.

        Args:
            name: Its name, on one line.
            condition: Such as `oldest(queue="mail", above=300)`: see `celery5.observability`.
            severity: `warning` or `critical`.
            for_: Seconds for which the condition must hold before it fires.
            keep_firing_for: Seconds for which it must not hold before it is resolved.

        Raises:
            Misconfigured: An argument makes no sense, or another rule has the name.
        """
        rule = check_rule(
            AlertRule(
                name=name, condition=condition, severity=severity, for_=for_, keep_firing_for=keep_firing_for
            )
        )
        if name in self._rules:
            raise Misconfigured(f"two alerts are named {name!r}")
        self._rules[name] = rule
        return rule

    def resolve(self, settings: "Settings", tasks: Mapping[str, Any]) -> tuple[AlertRule, ...]:
        """Return all rules: built in, of the application's code, of the settings. Raises Misconfigured.

        One with the name of another replaces it, in that order.
        """
        rules = {rule.name: rule for rule in make_builtin_rules(_get_thresholds(settings))}
        own = [*self._rules.values(), *parse_rules(settings.alerts)]
        queues = _get_queues(settings, tasks.values())
        for rule in own:
            rules[rule.name] = check_names(rule, queues=queues, tasks=tasks.keys())
        return tuple(rules.values())


def _get_thresholds(settings: "Settings") -> AlertThresholds:
    return AlertThresholds(
        oldest=settings.alert_oldest,
        failures=settings.alert_failures,
        no_workers=settings.alert_no_workers,
        dead=settings.alert_dead,
        worker_deaths=settings.alert_worker_deaths,
        worker_lost=settings.alert_worker_lost,
        member_missing=settings.alert_member_missing,
        not_undone=settings.alert_undo,
        stream_lag=settings.alert_stream_lag,
        loop_lag=settings.alert_loop_lag,
        memory=settings.alert_memory,
    )


def _get_queues(settings: "Settings", tasks: Iterable[Any]) -> set[str]:
    """Return the queues that settings and tasks name."""
    return {settings.default_queue, *settings.queue_routes.values(), *(task.queue for task in tasks)}
