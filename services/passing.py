"""Passing: which error replies of Redis pass by themselves, so that a worker waits instead of ending.

Floor: services. Reads: nothing. Writes: nothing.
"""

from celery5.errors import BrokerReplied

_CODES = frozenset({"OOM", "MISCONF", "NOREPLICAS", "UNBLOCKED"})
"""Memory is full; the disk is full; too few replicas; a blocked read was ended, by a failover or a lost key."""


def passes(error: BrokerReplied) -> bool:
    """Whether trying again later makes sense."""
    return error.code in _CODES
