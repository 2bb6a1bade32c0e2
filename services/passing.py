"""Passing: which troubles with Redis pass by themselves, so that a worker waits instead of ending.

Floor: services. Reads: nothing. Writes: nothing.
"""

from celery5.errors import BrokerReplied, BrokerUnavailable

_CODES = frozenset({"OOM", "MISCONF", "NOREPLICAS", "UNBLOCKED"})
"""Memory is full; the disk is full; too few replicas; a blocked read was ended, by a failover or a lost key."""


def passes(error: BrokerReplied | BrokerUnavailable) -> bool:
    """Whether trying again later makes sense. That it is away does pass."""
    return isinstance(error, BrokerUnavailable) or error.code in _CODES


def is_transient(error: BaseException) -> bool:
    """Return whether this is an error of the broker that passes by itself.

    The one answer for a process that runs and for one that begins again: both wait for what is transient.
    """
    return isinstance(error, BrokerReplied | BrokerUnavailable) and passes(error)
