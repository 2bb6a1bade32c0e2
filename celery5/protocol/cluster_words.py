"""Cluster Words: what a cluster description can say of a group, by name and type, and who judges values (C89).

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from collections.abc import Mapping
from typing import Any

from celery5.protocol.members import Kind

COMMON_FLAGS = {
    "broker": str,
    "config": str,
    "inbox": bool,
    "inbox_signatures": bool,
    "keys": str,
    "log_format": ("auto", "json", "console", "journal"),
    "log_level": ("debug", "info", "warning", "error"),
    "reload": bool,
    "status_host": str,
    "status_port": int,
}
"""Flags that the `start` of each kind knows, by their names. Each further member of a group has the next port."""
WORKER_FLAGS = {
    "concurrency": int,
    "cpu_slots": int,
    "grace_period": float,
    "max_jobs": int,
    "max_memory": "size",
    "queues": list,
}
PUBLISHER_FLAGS = {
    **dict.fromkeys(("backlog", "certificate", "client_ca", "connections", "key", "socket", "tcp"), str),
    "plain": bool,
}
FLAG_TYPES: Mapping[Kind, Mapping[str, Any]] = {
    "worker": {**COMMON_FLAGS, **WORKER_FLAGS},
    "router": COMMON_FLAGS,
    "scheduler": COMMON_FLAGS,
    "publisher": {**COMMON_FLAGS, **PUBLISHER_FLAGS},
}
"""What can be said of a group, by its kind: flags of `celery5 KIND start`, with the type of each."""
UNSUPPORTED_FLAGS = {
    "processes": "each member is one process: say count = N",
    "name": "each member has a name of its own, made of its group's",
    "burst": "members stay until they are stopped",
}
"""Flags that make no sense for a member, with what to do instead."""


class ValueChecker:
    """Who knows what values mean to members, and says what is wrong with one, in words that follow its key; '' for
    nothing. This one lets everything pass."""

    def check_flag(self, kind: Kind, name: str, value: Any) -> str:
        """About the flag of a group's members, of the type that it is to be of."""
        return ""

    def check_variable(self, name: str, value: str) -> str:
        """About a variable of their environment."""
        return ""
