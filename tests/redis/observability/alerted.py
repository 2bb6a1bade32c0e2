"""Applications whose alerts fire within a second, and what can be seen of them."""

from typing import Any

from celery5 import App
from celery5.observability import AlertCondition, AlertTransition
from celery5.observability.alerts import AlertState

QUICK: dict[str, Any] = {
    "metrics_interval": 0.1,
    "alert_oldest": 0,
    "alert_failures": 0,
    "alert_no_workers": 0,
    "alert_dead": 0,
    "alert_stream_lag": 0,
    "alert_loop_lag": 0,
}
"""Settings by which rules are evaluated ten times a second, and none is built in."""


def declare(app: App, condition: AlertCondition, *, name: str = "tested", for_: float = 0.2) -> None:
    """Declare a rule that fires and resolves soon."""
    app.alert(name, condition, for_=for_, keep_firing_for=0.2)


async def get_statuses(app: App) -> dict[tuple[str, str], str]:
    """Return the status of each alert that is not inactive, by rule and subject."""
    states: list[AlertState] = await app.alerts.alist()
    return {(one.name, one.subject): one.status for one in states if one.status != "inactive"}


async def get_changes(app: App) -> list[tuple[str, str]]:
    """Return what has fired and resolved, the oldest first: the change and the subject."""
    history: list[AlertTransition] = await app.alerts.ahistory()
    return [(one.change, one.subject) for one in reversed(history)]
