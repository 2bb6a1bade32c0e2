"""The page of alerts: what fires, and what has fired."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest
from celery5.observability.alerts import AlertState


def _rank(alert: AlertState) -> tuple[bool, bool, bool, str]:
    """Return what alerts are sorted by: those that fire first, then those that nobody was told of."""
    return (not alert.fires, alert.undelivered is None, alert.status == "inactive", alert.name)


async def load_alerts(request: PageRequest) -> Mapping[str, Any]:
    """Return the alerts and their history: those that fire first."""
    alerts = await request.read("alert:list")
    return {
        "alerts": sorted(alerts, key=_rank),
        "history": await request.read_part("the history of alerts", "alert:history", list[Any](), limit=50),
    }


ALERT_PAGES = (
    Page(path="alerts", template="alerts.html", title="Alerts", load=load_alerts, nav="Alerts", refresh=5.0),
)
"""The page of alerts."""
