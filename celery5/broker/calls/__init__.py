"""Calls: the commands and scripts that celery5 sends to Redis, as values, by subject."""

from celery5.lazy_modules import load_lazily

load_lazily(
    __name__,
    "alerts",
    "audit",
    "bulk",
    "cluster",
    "commands",
    "dashboard",
    "dead_letters",
    "events",
    "health",
    "job_history",
    "limits",
    "observability",
    "scaling",
    "scheduling",
    "streams",
    "workflows",
)
