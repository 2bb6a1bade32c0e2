"""Distinguish errors of Redis that pass by themselves from others."""

import ssl
from collections.abc import Iterator
from typing import cast

from celery5.errors import BrokerDenied, BrokerError, BrokerReplied, BrokerUnavailable

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


def is_connection_refused(error: BrokerError) -> bool:
    """Return whether a connection failed by what a person must correct: a password, a permission, a certificate."""
    return not isinstance(error, BrokerUnavailable) or any(map(_is_tls_refusal, _iterate_causes(error)))


def _is_tls_refusal(error: BaseException) -> bool:
    """Return whether one side refuses the other in the handshake of TLS, and the connection was not just cut off."""
    return isinstance(error, ssl.SSLError) and not isinstance(
        error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError
    )


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what has caused it, also inside of groups."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for child in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _iterate_causes(child)
    if error.__cause__ is not None:
        yield from _iterate_causes(error.__cause__)


def is_key_corrupt(error: BaseException) -> bool:
    """Return whether Redis works, and the content of one key causes the error."""
    return isinstance(error, BrokerReplied) and error.code in _KEY_ERROR_CODES
