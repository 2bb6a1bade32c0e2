"""The first page: what needs a person, and how the application is at a glance."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery5.dashboard.page import Page, PageRequest
from celery5.observability.alerts import AlertState, describe_unjudged
from celery5.observability.metrics import HistoryPoint, select_over
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.health.breaker import describe_held
from celery5.protocol.observability.overview import IS_BACK, Overview, describe_repaired, select_unrepaired

SHOWN_QUEUES = 5
"""Queues in the chart: those with the most jobs."""
SHOWN_LOST = 5
"""The most lost processes that are listed."""


class Depths(NamedTuple):
    """How many jobs waited on some queues, minute by minute."""

    points: list[dict[str, int]]
    # For each queue its name and a value for each point; None where nothing was measured.
    series: list[tuple[str, list[float | None]]]


def align_depths(histories: Mapping[str, Sequence[HistoryPoint]]) -> Depths:
    """Return histories of several queues with the same times for all."""
    depths = {
        name: {point.at: point.depth for point in select_over(history)} for name, history in histories.items()
    }
    times = sorted({at for by_time in depths.values() for at in by_time})
    series = [(name, [by_time.get(at) for at in times]) for name, by_time in depths.items()]
    return Depths([{"at": at} for at in times], series)


def find_own_alerts(alerts: Sequence[AlertState], overview: Overview) -> list[AlertState]:
    """Return the alerts on what the page has no line of its own for, the critical ones first."""
    listed = {f"task {task.name}" for task in overview.tasks if task.needs_attention}
    listed |= {f"queue {queue.name}" for queue in overview.queues if queue.verdict.needs_attention}
    listed |= {
        f"{lost.kind} {get_inbox_name(lost.worker)}" for lost in select_unrepaired(overview.lost)[:SHOWN_LOST]
    }
    listed |= {member.subject for member in overview.missing}
    own = [alert for alert in alerts if alert.fires and alert.subject not in listed]
    return sorted(own, key=lambda alert: (alert.severity != "critical", alert.name, alert.subject))


def name_firing(alerts: Sequence[AlertState]) -> dict[str, str]:
    """Return which rules fire, by what for, the critical ones first: a line on that may be there for another reason."""
    names: dict[str, list[str]] = {}
    for alert in sorted(alerts, key=lambda alert: (alert.severity != "critical", alert.name)):
        if alert.fires:
            names.setdefault(alert.subject, []).append(alert.name)
    return {subject: ", ".join(found) for subject, found in names.items()}


class OpenBreakers(NamedTuple):
    """The circuit breakers of one thing that are open."""

    of: str
    # What they hold up, as a phrase.
    held: str
    # On how many workers they are open.
    workers: int


def count_breakers(overview: Overview) -> list[OpenBreakers]:
    """Return what open circuit breakers hold back, and on how many workers."""
    counts = Counter(name for worker in overview.workers for name in worker.breakers)
    return [OpenBreakers(name, describe_held(name), count) for name, count in counts.items()]


def describe_healthy(overview: Overview) -> str:
    """Return the text for a page on which nothing needs a person. It agrees with the figures of the same overview.

    Failures of tasks come from reports, which are older than the figures.
    """
    totals = overview.totals
    parts = [
        "queues keep up",
        "" if totals.failed_per_second or totals.dead else "tasks succeed",
        "workers do well" if totals.workers else "",
    ]
    return f"Nothing: {', '.join(filter(None, parts))}."


async def load_overview(request: PageRequest) -> Mapping[str, Any]:
    """Return the overview, and the history of the busiest queues."""
    overview = await request.read("top:show")
    busiest = sorted(overview.queues, key=lambda queue: -(queue.backlog + queue.running))
    histories = {
        queue.name: await request.read_part(
            f"the history of queue {queue.name}", "metrics:history", list[HistoryPoint](), queue=queue.name
        )
        for queue in busiest[:SHOWN_QUEUES]
    }
    alerts = await request.read_part("the alerts", "alert:list", list[AlertState]())
    return {
        "overview": overview,
        "depths": align_depths(histories),
        "alerts": find_own_alerts(alerts, overview),
        "unjudged": describe_unjudged(alerts),
        "undelivered": [alert for alert in alerts if alert.undelivered],
        "firing": name_firing(alerts),
        "breakers": count_breakers(overview),
        "lost": select_unrepaired(overview.lost)[:SHOWN_LOST],
        "repaired": describe_repaired(overview.lost),
        "is_back": IS_BACK,
        "healthy": describe_healthy(overview),
    }


OVERVIEW_PAGES = (
    Page(
        path="", template="overview.html", title="Overview", load=load_overview, nav="Overview", refresh=5.0
    ),
)
"""The page of the application as a whole."""
