"""The type that Redis has for each key of celery5, by which the doctor finds keys that another program has made."""

import re
from collections.abc import Iterator, Mapping
from functools import cache

from celery5.broker.keys import Keys, list_key_shapes

_NAMES_BY_TYPE: Mapping[str, str] = {
    "hash": (
        "alert_silences alert_undelivered alerts archiving bulk_action classes code_version dead_causes "
        "document_progress documents flow foreign_jobs groups idle_runs incarnations jobs leader limited_counts "
        "limits lost_work map metrics_state parked partition plan progress relayed revoked_documents run schedules "
        "settings slot_counts slots state subscriptions suspended unclaimed_events unique waiting worker_deaths"
    ),
    "list": "job_deaths kind_starts run_items run_records",
    "set": "event_waits paused queues record_streams schedule_queues",
    "stream": (
        "alert_history alert_outbox archive audit dead documents_for failed_jobs handed high inbox kept_events log low "
        "metrics_hours_prefix metrics_minutes_prefix metrics_reports normal other_jobs outbox parked_log_prefix "
        "run_outbox"
    ),
    "string": (
        "alert_logged bulk_lease check check_notice check_turn declared_schedules history_sent imposed_limits "
        "limit_rules_turn member_end metrics_sent metrics_turn nonce recycling replication_mark reply report result "
        "run_home scaling scaling_turn sent signed_out source_lease timer_leader unique_window"
    ),
    "zset": (
        "audit_entries bulk_actions claimed_documents code_versions due foreign_list leases live_processes live_runs "
        "lost_workers members past_runs revoked_jobs schedule_times subscription_deadlines timer_candidates "
        "waiting_list_prefix"
    ),
}
"""The names of keys in the three classes of keys.py, which say no two things."""
_TYPES = {name: kind for kind, names in _NAMES_BY_TYPE.items() for name in names.split()}


def find_types(key: str) -> set[str]:
    """Return the types that a key may have, as TYPE replies them; none for a key that is not known here.

    There are several where keys of two kinds look alike, as those of a run and of its items do.
    """
    return {kind for pattern, kind in _compile_types() if pattern.fullmatch(key)}


def list_shared_keys(keys: Keys) -> Iterator[str]:
    """Yield the keys of an application of which there is one, such as that of its limits."""
    for name in _TYPES:
        if isinstance(getattr(Keys, name, None), property) and not name.endswith("_prefix"):
            yield getattr(keys, name)


@cache
def _compile_types() -> list[tuple[re.Pattern[str], str]]:
    return [(pattern, _TYPES[name]) for name, pattern in list_key_shapes() if name in _TYPES]
