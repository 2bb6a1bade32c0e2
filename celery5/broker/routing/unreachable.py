"""Leave unreachable brokers out of calls that go to all brokers.

Usually an unreachable broker makes such a call fail, since its part of the reply is missing. Within
`skip_unreachable` the replies of the others are returned, and no later call waits for the unreachable broker again.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from celery5.errors import BrokerDenied, BrokerError, BrokerUnavailable, BrokerUnsupported

T = TypeVar("T")

UNREACHABLE = (BrokerUnavailable, BrokerDenied, BrokerUnsupported)
"""The errors of a broker that cannot be used now."""

_unreachable: ContextVar[dict[str, BrokerError] | None] = ContextVar("celery5_absent", default=None)


@contextmanager
def skip_unreachable() -> Generator[Mapping[str, BrokerError], None, None]:
    """Leave out unreachable brokers within this block.

    A block inside a block is part of the outer one.

    Yields:
        The errors of the brokers that were left out, by name. The mapping grows when more fail.
    """
    outer = _unreachable.get()
    if outer is not None:
        yield outer
        return
    unreachable: dict[str, BrokerError] = {}
    token = _unreachable.set(unreachable)
    try:
        yield unreachable
    finally:
        _unreachable.reset(token)


@contextmanager
def leave_out_none() -> Generator[None, None, None]:
    """Raise all errors in this block, even within `skip_unreachable`: no node of a cluster is left out."""
    token = _unreachable.set(None)
    try:
        yield
    finally:
        _unreachable.reset(token)


def get_unreachable() -> dict[str, BrokerError] | None:
    """Return the brokers that are left out, with their errors; None outside of `skip_unreachable`."""
    return _unreachable.get()


def not_found_error(what: str, unreachable: Mapping[str, BrokerError]) -> BrokerUnavailable:
    """Return the error for something that is on none of the brokers that could be reached."""
    reasons = "; ".join(f"broker {name} cannot be asked: {error}" for name, error in unreachable.items())
    return BrokerUnavailable(f"{what} is on none of the brokers that can be reached, and {reasons}")


async def retry_without_unreachable(function: Callable[[], Awaitable[T]]) -> T:
    """Call `function`, and again after a broker failed during the call and is left out from then on."""
    while True:
        unreachable = get_unreachable()
        count = 0 if unreachable is None else len(unreachable)
        try:
            return await function()
        except UNREACHABLE:
            if unreachable is None or len(unreachable) == count:
                raise
