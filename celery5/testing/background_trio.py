"""Hold something that runs on Trio open in a thread, for tests in plain Python."""

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import TypeVar

import trio

from celery5.testing.virtual_loop import unwrap

START_LIMIT = 30.0
"""Seconds that a worker, or the boot steps, may take to come up."""

T = TypeVar("T")


@contextmanager
def in_thread(
    open_context: Callable[[], AbstractAsyncContextManager[T]],
    what: str,
    on_error: Callable[[BaseException], object] = lambda _error: None,
) -> Generator[T, None, None]:
    """Hold an asynchronous context manager open in a Trio run in a thread. Raises the errors that it raises.

    Args:
        open_context: Returns the context manager.
        what: What it is, for errors and as the name of the thread.
        on_error: Called in that thread with an error that ends it, before the block has ended.
    """
    ready, values, errors = threading.Event(), list[T](), list[BaseException]()
    tokens: list[trio.lowlevel.TrioToken] = []
    stopping = trio.Event()

    async def hold() -> None:
        async with open_context() as value:
            values.append(value)
            tokens.append(trio.lowlevel.current_trio_token())
            ready.set()
            await stopping.wait()

    def run() -> None:
        try:
            trio.run(hold)
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(unwrap(error))
            on_error(errors[0])
        finally:
            ready.set()

    thread = threading.Thread(target=run, name=f"celery5 {what}", daemon=True)
    thread.start()
    if not ready.wait(START_LIMIT):
        raise TimeoutError(f"the {what} did not come up within {START_LIMIT:g} s")
    if not values:
        thread.join()
        raise errors[0]
    try:
        yield values[0]
    finally:
        with suppress(trio.RunFinishedError):
            tokens[0].run_sync_soon(stopping.set)
        thread.join()
    if errors:
        raise errors[0]
