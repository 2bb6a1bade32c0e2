"""Together: several brokers are asked at the same time, in every colour, so that nobody waits for one after another.

Floor: broker. Reads and writes: what it is given to do.
"""

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from celery5.broker.colour import current_colour
from celery5.errors import BrokerError

T = TypeVar("T")


def run_all(functions: Sequence[Callable[[], T]]) -> list[T | BrokerError]:
    """What each of them gives, or the broker's error that it raises, in plain Python: all but the last in threads.
    Any other error is raised when all have ended."""
    found: dict[int, T | Exception] = {}

    def do(at: int) -> None:
        try:
            found[at] = functions[at]()
        except Exception as error:
            found[at] = error

    threads = [
        threading.Thread(target=do, args=(at,), daemon=True, name="celery5 broker")
        for at in range(len(functions) - 1)
    ]
    for thread in threads:
        thread.start()
    do(len(functions) - 1)
    for thread in threads:
        thread.join()
    return [_value(found[at]) for at in range(len(functions))]


async def run_all_async(functions: Sequence[Callable[[], Awaitable[T]]]) -> list[T | BrokerError]:
    """`together`, from Trio or asyncio."""
    found: dict[int, T | Exception] = {}

    async def do(at: int) -> None:
        try:
            found[at] = await functions[at]()
        except Exception as error:
            found[at] = error

    if len(functions) == 1:
        await do(0)
    elif current_colour() == "trio":
        import trio

        async with trio.open_nursery() as nursery:
            for at in range(len(functions)):
                nursery.start_soon(do, at)
    else:
        import asyncio

        await asyncio.gather(*[do(at) for at in range(len(functions))])
    return [_value(found[at]) for at in range(len(functions))]


def _value(what: Any) -> Any:
    if isinstance(what, Exception) and not isinstance(what, BrokerError):
        raise what
    return what
