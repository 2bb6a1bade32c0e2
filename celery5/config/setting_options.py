"""The settings that `App(...)` takes as keyword arguments, for type checkers.

Written by `python -m tests.house.setting_options` from `Settings`: do not edit.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict

from celery5.protocol.publisher.own_backlog import OwnBacklog


class SettingOptions(TypedDict, total=False):
    """The settings, except those with their own parameter. None stands for the default."""

    brokers: Mapping[str, str] | None
    routes: Mapping[str, str] | None
    queue_routes: Mapping[str, str] | None
    default_queue: str | None
    shards: str | Mapping[str, Any] | None
    results_ttl: float | timedelta | None
    message_limit: int | None
    workflow_nesting_limit: int | None
    processes: int | None
    concurrency: int | None
    cpu_slots: int | Literal["auto"] | None
    box_slots: int | None
    capacity: str | Mapping[str, Any] | None
    rate_limits: str | None
    autoscale: str | Mapping[str, Any] | None
    prioritise: str | None
    box_jobs: int | None
    box_idle: float | timedelta | None
    max_jobs: int | None
    max_memory: str | None
    grace_period: float | timedelta | None
    lease: float | timedelta | None
    max_deliveries: int | None
    unknown_task_grace: float | timedelta | None
    unknown_record_grace: float | timedelta | None
    ignore_result: bool | None
    time_limit: float | timedelta | None
    soft_time_limit: float | timedelta | None
    recent_jobs: int | None
    backlog: int | OwnBacklog | None
    backlog_bytes: int | None
    replicas: int | None
    publisher: str | None
    publisher_socket: str | None
    publisher_tcp: str | None
    publisher_certificate: str | None
    publisher_key: str | None
    publisher_client_ca: str | None
    publisher_plain: bool | None
    publisher_backlog: str | None
    publisher_backlog_messages: int | None
    publisher_backlog_bytes: int | None
    publisher_connections: str | int | list[int] | None
    health_store: Literal["broker", "none"] | None
    worker_group: str | None
    log_format: Literal["auto", "json", "console", "journal"] | None
    log_level: Literal["debug", "info", "warning", "error"] | None
    retry_tracebacks: bool | None
    opentelemetry: Literal["off", "traces", "metrics", "all"] | None
    trace_relation: Literal["link", "parent"] | None
    sentry: bool | None
    loop_block_warning: float | timedelta | None
    own_checks: bool | None
    inbox: bool | None
    inbox_signatures: bool | None
    keys: str | None
    keys_usage: str | None
    priorities: str | None
    queue_order: str | None
    timezone: str | None
    schedules: Mapping[str, Any] | None
    schedules_version: int | None
    event_retention: float | timedelta | None
    event_catch_up: bool | None
    subscription_ttl: float | timedelta | None
    breaker_suspends: bool | None
    read_block: float | timedelta | None
    status_port: int | None
    status_host: str | None
    metrics_interval: float | timedelta | None
    job_history: int | None
    show_raw_values: bool | None
    statsd: str | None
    alerts: Mapping[str, str] | None
    alert_oldest: float | timedelta | None
    alert_failures: float | None
    alert_no_workers: float | timedelta | None
    alert_dead: int | None
    alert_worker_deaths: int | None
    alert_worker_lost: float | timedelta | None
    alert_member_missing: float | timedelta | None
    alert_undo: float | timedelta | None
    alert_stream_lag: float | timedelta | None
    alert_loop_lag: float | timedelta | None
    alert_memory: float | None
    alert_webhook: str | None
    alert_webhook_secret: str | None
