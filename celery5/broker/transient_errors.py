"""Distinguish errors of Redis that pass by themselves from others."""

from celery5.errors import BrokerDenied, BrokerReplied, BrokerUnavailable

_OUTAGE_CODES = frozenset({"OOM", "MISCONF", "NOREPLICAS", "UNBLOCKED"})
"""Memory is full; the disk is full; too few replicas; a blocked read was ended, by a failover or a lost key."""
_KEY_ERROR_CODES = frozenset({"WRONGTYPE", "UNREADABLE"})
"""Another program has written to a key: it has another type, or holds what cannot be read."""


def is_recoverable(error: BrokerReplied | BrokerUnavailable) -> bool:
    """Return whether a later try may succeed: a broker may be reachable again, and a corrupt key repaired."""
    return is_outage(error) or is_key_corrupt(error)


def is_outage(error: BaseException) -> bool:
    """Return whether the error is transient and affects every call, whatever its key."""
    return isinstance(error, BrokerUnavailable) or (
        isinstance(error, BrokerReplied) and error.code in _OUTAGE_CODES
    )


def is_transient(error: BaseException) -> bool:
    """Return whether this is a recoverable error of the broker.

    A missing permission is one for a process that runs: whoever changed the user can change it back. At its first start
    a process ends with it (`should_restart`).
    """
    if isinstance(error, BrokerDenied):
        return True
    return isinstance(error, BrokerReplied | BrokerUnavailable) and is_recoverable(error)


def is_key_corrupt(error: BaseException) -> bool:
    """Return whether Redis works, and the content of one key causes the error."""
    return isinstance(error, BrokerReplied) and error.code in _KEY_ERROR_CODES
