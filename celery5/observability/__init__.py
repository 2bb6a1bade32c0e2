"""Observability: metrics and their history, alerts, the search for jobs, middleware, OpenTelemetry, and Sentry."""

from typing import TYPE_CHECKING

from celery5.lazy import exports
from celery5.lazy_modules import load_lazily

if TYPE_CHECKING:
    from celery5.broker.calls.alerts import AlertSilence
    from celery5.middleware.jobs import IncomingJob, OutgoingJob, SendingBatch, SettlingBatch
    from celery5.middleware.middleware import Middleware
    from celery5.middleware.outcomes import (
        Dead,
        Expired,
        JobOutcome,
        Rejected,
        Released,
        Retrying,
        Revoked,
        Succeeded,
    )
    from celery5.observability.alerts import Alerts, AlertState
    from celery5.observability.job_search import JobPage, Jobs
    from celery5.observability.metrics import HistoryPoint, Metrics, QueueSummary, TaskNumbers
    from celery5.observability.opentelemetry import OpenTelemetryMiddleware
    from celery5.observability.outlets import MetricsOutlet, StatsDOutlet
    from celery5.observability.sentry import SentryMiddleware
    from celery5.observability.webhook import WebhookRefused
    from celery5.protocol.job.history import JobRecord
    from celery5.protocol.observability.alert_messages import AlertMessage, AlertPayload
    from celery5.protocol.observability.alert_rules import (
        dead_letters,
        failures,
        loop_lag,
        member_missing,
        memory_used,
        no_workers,
        not_undone,
        oldest,
        stream_lag,
        worker_deaths,
        worker_lost,
    )
    from celery5.protocol.observability.alerting import (
        AlertCondition,
        AlertRule,
        AlertTransition,
        UndeliveredNotification,
    )
    from celery5.protocol.observability.overview import (
        DueSchedule,
        LastError,
        LeftOut,
        Overview,
        OverviewTotals,
        ProcessStarts,
        QueueOverview,
        QueuePause,
        QueueVerdict,
        ReportingProcess,
        TaskOverview,
        UnreachableBroker,
        WorkerOverview,
    )
    from celery5.protocol.observability.queue_flow import QueueFlow
    from celery5.protocol.observability.report import MetricsReport
    from celery5.protocol.observability.storage import (
        QueueStorage,
        ServerStorage,
        Storage,
        StreamStorage,
    )
    from celery5.runners.operations import MessageOperation
    from celery5.runners.surrounding import FunctionCall

__all__ = [
    "AlertCondition",
    "AlertMessage",
    "AlertPayload",
    "AlertRule",
    "AlertSilence",
    "AlertState",
    "AlertTransition",
    "Alerts",
    "Dead",
    "DueSchedule",
    "Expired",
    "FunctionCall",
    "HistoryPoint",
    "IncomingJob",
    "JobOutcome",
    "JobPage",
    "JobRecord",
    "Jobs",
    "LastError",
    "LeftOut",
    "MessageOperation",
    "Metrics",
    "MetricsOutlet",
    "MetricsReport",
    "Middleware",
    "OpenTelemetryMiddleware",
    "OutgoingJob",
    "Overview",
    "OverviewTotals",
    "ProcessStarts",
    "QueueFlow",
    "QueueOverview",
    "QueuePause",
    "QueueStorage",
    "QueueSummary",
    "QueueVerdict",
    "Rejected",
    "Released",
    "ReportingProcess",
    "Retrying",
    "Revoked",
    "SendingBatch",
    "SentryMiddleware",
    "ServerStorage",
    "SettlingBatch",
    "StatsDOutlet",
    "Storage",
    "StreamStorage",
    "Succeeded",
    "TaskNumbers",
    "TaskOverview",
    "UndeliveredNotification",
    "UnreachableBroker",
    "WebhookRefused",
    "WorkerOverview",
    "dead_letters",
    "failures",
    "loop_lag",
    "member_missing",
    "memory_used",
    "no_workers",
    "not_undone",
    "oldest",
    "stream_lag",
    "worker_deaths",
    "worker_lost",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "AlertCondition": "celery5.protocol.observability.alerting",
            "AlertMessage": "celery5.protocol.observability.alert_messages",
            "AlertPayload": "celery5.protocol.observability.alert_messages",
            "AlertRule": "celery5.protocol.observability.alerting",
            "AlertSilence": "celery5.broker.calls.alerts",
            "AlertState": "celery5.observability.alerts",
            "AlertTransition": "celery5.protocol.observability.alerting",
            "Alerts": "celery5.observability.alerts",
            "Dead": "celery5.middleware.outcomes",
            "DueSchedule": "celery5.protocol.observability.overview",
            "Expired": "celery5.middleware.outcomes",
            "FunctionCall": "celery5.runners.surrounding",
            "HistoryPoint": "celery5.observability.metrics",
            "IncomingJob": "celery5.middleware.jobs",
            "JobOutcome": "celery5.middleware.outcomes",
            "JobPage": "celery5.observability.job_search",
            "JobRecord": "celery5.protocol.job.history",
            "Jobs": "celery5.observability.job_search",
            "LastError": "celery5.protocol.observability.overview",
            "LeftOut": "celery5.protocol.observability.overview",
            "Metrics": "celery5.observability.metrics",
            "MetricsOutlet": "celery5.observability.outlets",
            "MetricsReport": "celery5.protocol.observability.report",
            "Middleware": "celery5.middleware.middleware",
            "OpenTelemetryMiddleware": "celery5.observability.opentelemetry",
            "MessageOperation": "celery5.runners.operations",
            "OutgoingJob": "celery5.middleware.jobs",
            "Overview": "celery5.protocol.observability.overview",
            "OverviewTotals": "celery5.protocol.observability.overview",
            "ProcessStarts": "celery5.protocol.observability.overview",
            "QueueFlow": "celery5.protocol.observability.queue_flow",
            "QueueOverview": "celery5.protocol.observability.overview",
            "QueueStorage": "celery5.protocol.observability.storage",
            "QueueSummary": "celery5.observability.metrics",
            "QueuePause": "celery5.protocol.observability.overview",
            "QueueVerdict": "celery5.protocol.observability.overview",
            "ReportingProcess": "celery5.protocol.observability.overview",
            "Rejected": "celery5.middleware.outcomes",
            "Released": "celery5.middleware.outcomes",
            "Retrying": "celery5.middleware.outcomes",
            "Revoked": "celery5.middleware.outcomes",
            "SendingBatch": "celery5.middleware.jobs",
            "SentryMiddleware": "celery5.observability.sentry",
            "ServerStorage": "celery5.protocol.observability.storage",
            "SettlingBatch": "celery5.middleware.jobs",
            "StatsDOutlet": "celery5.observability.outlets",
            "Storage": "celery5.protocol.observability.storage",
            "StreamStorage": "celery5.protocol.observability.storage",
            "Succeeded": "celery5.middleware.outcomes",
            "TaskNumbers": "celery5.observability.metrics",
            "TaskOverview": "celery5.protocol.observability.overview",
            "UndeliveredNotification": "celery5.protocol.observability.alerting",
            "UnreachableBroker": "celery5.protocol.observability.overview",
            "WorkerOverview": "celery5.protocol.observability.overview",
            "WebhookRefused": "celery5.observability.webhook",
            "dead_letters": "celery5.protocol.observability.alert_rules",
            "failures": "celery5.protocol.observability.alert_rules",
            "loop_lag": "celery5.protocol.observability.alert_rules",
            "member_missing": "celery5.protocol.observability.alert_rules",
            "memory_used": "celery5.protocol.observability.alert_rules",
            "no_workers": "celery5.protocol.observability.alert_rules",
            "not_undone": "celery5.protocol.observability.alert_rules",
            "oldest": "celery5.protocol.observability.alert_rules",
            "stream_lag": "celery5.protocol.observability.alert_rules",
            "worker_deaths": "celery5.protocol.observability.alert_rules",
            "worker_lost": "celery5.protocol.observability.alert_rules",
        },
    )

load_lazily(__name__, "webhook")
