"""Tell the names that a setting has had in the versions of Celery."""

import re

from celery5.config.settings import Settings
from celery5.hints import find_equivalent

OLD_NAMES = {
    "broker_url": "broker_url",
    "always_eager": "task_always_eager",
    "eager_propagates_exceptions": "task_eager_propagates",
    "eager_propagates": "task_eager_propagates",
    "task_result_expires": "result_expires",
    "default_queue": "task_default_queue",
    "queues": "task_queues",
    "routes": "task_routes",
    "ignore_result": "task_ignore_result",
    "acks_late": "task_acks_late",
    "annotations": "task_annotations",
    "track_started": "task_track_started",
    "create_missing_queues": "task_create_missing_queues",
    "send_task_sent_event": "task_send_sent_event",
    "send_events": "worker_send_task_events",
    "default_routing_key": "task_default_routing_key",
    "default_exchange": "task_default_exchange",
    "default_exchange_type": "task_default_exchange_type",
    "redirect_stdouts": "worker_redirect_stdouts",
    "store_errors_even_if_ignored": "task_store_errors_even_if_ignored",
    "max_cached_results": "result_cache_max",
    "celeryd_task_time_limit": "task_time_limit",
    "celeryd_task_soft_time_limit": "task_soft_time_limit",
    "celeryd_hijack_root_logger": "worker_hijack_root_logger",
    "celerybeat_schedule": "beat_schedule",
    "celerybeat_scheduler": "beat_scheduler",
}
"""Names of Celery 3, without `CELERY_` and in lower case, and what Celery 5 calls them."""
UPPER_NAME = re.compile(r"(CELERY|CELERYD|CELERYBEAT|BROKER)_[A-Z0-9_]+")
EAGER = {"task_always_eager", "task_eager_propagates", "task_store_eager_result"}
"""The settings of eager mode, which no code may lose unseen."""


def normalize(name: str) -> str:
    """Return what Celery 5 calls a setting of any age: `CELERYD_CONCURRENCY` is `worker_concurrency`."""
    lower = name.lower()
    short = lower.removeprefix("celery_")
    if find_equivalent("setting", short) or short in Settings.__struct_fields__:
        return OLD_NAMES.get(short, short)
    if short in OLD_NAMES:
        return OLD_NAMES[short]
    for old, new in (("celeryd_", "worker_"), ("celerybeat_", "beat_")):
        if lower.startswith(old):
            return new + lower.removeprefix(old)
    return short
