"""Which brokers are left out of calls that go to all brokers, since they cannot be reached.

Usually an unreachable broker is an error for a call to all of them: what it has is not known. Within
`skip_unreachable` the replies of the others are returned, and no call waits for the unreachable one a second time.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from celery5.errors import BrokerDenied, BrokerError, BrokerTooOld, BrokerUnavailable

T = TypeVar("T")

UNREACHABLE = (BrokerUnavailable, BrokerDenied, BrokerTooOld)
"""Who says this cannot be asked anything now."""

_absent: ContextVar[dict[str, BrokerError] | None] = ContextVar("celery5_absent", default=None)


@contextmanager
def skip_unreachable() -> Generator[Mapping[str, BrokerError], None, None]:
    """Leave out unreachable brokers within this block. Yields these by name, with their errors; the mapping grows as
    more are found. A block inside another one is part of it."""
    outer = _absent.get()
    if outer is not None:
        yield outer
        return
    found: dict[str, BrokerError] = {}
    token = _absent.set(found)
    try:
        yield found
    finally:
        _absent.reset(token)


def get_unreachable() -> dict[str, BrokerError] | None:
    """Those that are left out here; None where none is to be."""
    return _absent.get()


def not_found_error(what: str, unreachable: Mapping[str, BrokerError]) -> BrokerUnavailable:
    """What is raised when `what` is on none of the brokers that could be asked."""
    named = "; ".join(f"broker {name} cannot be asked: {error}" for name, error in unreachable.items())
    return BrokerUnavailable(f"{what} is on none of the brokers that can be reached, and {named}")


async def retry_without_unreachable(function: Callable[[], Awaitable[T]]) -> T:
    """Do `work`, and again without a broker that was found to be away in the middle of it, where it may be left
    out."""
    while True:
        left_out = get_unreachable()
        known = 0 if left_out is None else len(left_out)
        try:
            return await function()
        except UNREACHABLE:
            if left_out is None or len(left_out) == known:
                raise
