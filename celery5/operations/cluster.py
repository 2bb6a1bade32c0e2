"""See how the application is as a whole: its state, its health, its settings, and who has done what to it."""

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from celery5.operations.operation import Effect, Operation
from celery5.operations.parameters import Limit, Nothing, Seconds, about, as_duration
from celery5.protocol.audit import AuditEntry
from celery5.protocol.health.broker_diagnosis import Finding
from celery5.protocol.observability.overview import Overview
from celery5.protocol.observability.rollup import HOUR

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.config.settings import SettingOrigin
    from celery5.observability.metrics import QueueSummary
    from celery5.results.job_details import AppState


class StateFilter(msgspec.Struct, frozen=True):
    """How many queues are described."""

    limit: Annotated[
        int, Meta(ge=0, le=10_000), about("Queues that are read at most, the first by name; none for 0.")
    ] = 10_000


async def read_state(app: "App", asked: StateFilter) -> "AppState":
    """Show the queues, what is in them, who works on them, and the other processes."""
    return await app.ainfo(limit=asked.limit)


class AuditFilter(msgspec.Struct, frozen=True):
    """Which actions."""

    limit: Annotated[Limit, about("Actions at most.")] = 50
    action: Annotated[
        str, Meta(max_length=200), about("This action: dlq:replay, or dlq for all of dlq.", metavar="ACTION")
    ] = ""
    who: Annotated[
        str, Meta(max_length=200), about("Those of this person: anna, or anna@host.", metavar="NAME")
    ] = ""
    since: Annotated[
        Seconds | None, about("Those of this last time: 90 (seconds), 15m, 2h, 7d.", metavar="SPAN")
    ] = None
    before: Annotated[
        str,
        Meta(max_length=50),
        about("Those older than the entry with this id: the next page.", metavar="ID"),
    ] = ""


async def list_actions(app: "App", asked: AuditFilter) -> list[AuditEntry]:
    """Show who has done what, from where, and what came of it: the newest first."""
    since = None if asked.since is None else time.time() - asked.since
    return await app.audit.alist(
        limit=asked.limit, action=asked.action, who=asked.who, since=since, before=asked.before
    )


async def examine(app: "App", _: Nothing) -> list[Finding]:
    """Look at the application, its settings, broker, keys and host, and say what to change."""
    from celery5.broker.colour import run_in_thread

    def run() -> list[Finding]:
        from celery5.doctor.examination import get_checks, run_checks

        return list(run_checks(get_checks(app)))

    return await run_in_thread(run)


async def show_settings(app: "App", _: Nothing) -> "list[SettingOrigin]":
    """Show every setting, its value and where that comes from, passwords masked."""
    from celery5.config.settings import get_origins

    return get_origins(app)


class OverviewFilter(msgspec.Struct, frozen=True):
    """Which time the overview looks back to."""

    since: Annotated[
        float,
        as_duration(at_least=60, at_most=6 * 3600),
        about("How far back the numbers go.", metavar="SPAN"),
    ] = float(HOUR)


async def read_overview(app: "App", asked: OverviewFilter) -> Overview:
    """Show how queues, tasks and workers do, and what needs a person."""
    return await app.metrics.aoverview(since=asked.since)


class SummaryFilter(msgspec.Struct, frozen=True):
    """Which summary."""

    queue: Annotated[str, about("The queue; default: all.")] = ""
    since: Annotated[Seconds, about("How far back, on the full hour.", metavar="SPAN")] = float(HOUR)


async def summarize_metrics(app: "App", asked: SummaryFilter) -> "dict[str, QueueSummary]":
    """Show how the jobs of each task ended, ran and waited, by queue, and how old the report of each process is."""
    return await app.metrics.asummary(asked.queue, since=asked.since)


CLUSTER_OPERATIONS = (
    Operation("info:show", read_state, result_module="celery5.results.job_details"),
    Operation("top:show", read_overview),
    Operation("audit:list", list_actions),
    Operation("doctor:run", examine, Effect.SEE_CONFIDENTIAL),
    Operation("config:show", show_settings, Effect.SEE_CONFIDENTIAL, result_module="celery5.config.settings"),
    Operation("metrics:show", summarize_metrics, result_module="celery5.observability.metrics"),
)
"""The operations on the application as a whole."""
