"""The type that Redis has for each key of celery5, by which the doctor finds keys that another program has made."""

import re
from collections.abc import Iterator, Mapping
from functools import cache

from celery5.broker.keys import Keys, list_key_shapes

_NAMES_BY_TYPE: Mapping[str, str] = {
    "hash": (
        "alert_silences alert_undelivered alerts archiving dead_causes documents flow foreign_jobs groups "
        "idle_runs jobs leader limited_counts limits lost_work map metrics_state relayed revoked_documents "
        "schedules settings slot_counts slots subscriptions suspended unclaimed_events unique waiting "
        "worker_deaths"
    ),
    "list": "run_records",
    "set": "paused queues record_streams schedule_queues",
    "stream": (
        "alert_history alert_outbox audit dead failed_jobs handed high low metrics_reports normal other_jobs "
        "run_outbox"
    ),
    "string": (
        "alert_logged consumers_checked imposed_limits limit_rules_turn metrics_turn recycling replication_mark "
        "scaling scaling_turn steady_since timer_leader"
    ),
    "zset": (
        "audit_entries bulk_actions code_versions due leases live_runs lost_workers past_runs revoked_jobs "
        "schedule_times subscription_deadlines timer_candidates undoing_runs"
    ),
}
"""The names of keys in the three classes of keys.py, of those that end with words of ours."""
_TYPES = {name: kind for kind, names in _NAMES_BY_TYPE.items() for name in names.split()}


def find_types(key: str) -> set[str]:
    """Return the types that a key may have, as TYPE replies them; none for a key of which that is not certain.

    It is certain where the name ends with words of ours. Where it ends with what users or ids say, keys of other kinds
    may look alike: those of a run, of its items, of what it has to undo. Nobody is told to put such a key aside.
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
