"""Run Trio code from plain Python, step by step and in virtual time.

The Trio loop runs in its own thread, because a thread has one Trio loop at most, and a test may have others. A
guest loop in the thread of the test was tried: then neither `trio.run` nor a second driver works in the same test.
"""

import threading
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Protocol, TypeVar, cast

import trio
import trio.lowlevel

T = TypeVar("T")

STEP_LIMIT = 30.0
"""Real seconds that one step may take."""


class Startable(Protocol):
    """An asynchronous function that says when it is ready."""

    async def __call__(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run until cancelled."""
        ...


class VirtualTimeLoop:
    """A Trio loop whose clock stands still until `advance`.

    Args:
        main: What runs in it, until `stop`.
    """

    def __init__(self, main: Startable) -> None:
        self._main = main
        # Not at the top: it loads pytest where that is installed, and this package is for any framework.
        from trio.testing import MockClock, wait_all_tasks_blocked

        self._wait_all_tasks_blocked = wait_all_tasks_blocked
        self._clock = MockClock()
        self._start_time = self._clock.current_time()
        self._context = copy_context()
        self._thread = threading.Thread(target=self._context.run, args=(self._run,), daemon=True)
        self._started = threading.Event()
        self._errors: list[BaseException] = []
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.current_time() - self._start_time

    def start(self) -> None:
        """Start `main`, and wait until it is ready. Raises what it raises."""
        self._thread.start()
        self._wait(self._started)

    def _run(self) -> None:
        try:
            trio.run(self._run_main, clock=self._clock)
        except BaseException as error:  # raised again by the next step, in the thread of the test
            self._errors.append(error)
        finally:
            self._token = None
            self._started.set()

    async def _run_main(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._main)
            self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()
            self._started.set()

    def stop(self) -> None:
        """Cancel everything, and wait until it has ended. Raises what has ended it before."""
        if self._token is not None and self._nursery is not None:
            self._token.run_sync_soon(self._nursery.cancel_scope.cancel)
        self._thread.join(STEP_LIMIT)
        if self._thread.is_alive():
            raise _make_timeout()
        if self._errors:
            raise unwrap(self._errors[0])

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an asynchronous function, then everything until it waits; return what the function returns.

        Time passes only if the function waits for it: by as much as is needed.
        """
        results = list[T]()

        async def run() -> None:
            results.append(await function())

        async def wait_for_result() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                await self._wait_all_tasks_blocked()
                while not results:
                    await self._pass_time(float("inf"))

        self._step(wait_for_result)
        return results[0]

    def advance(self, seconds: float) -> None:
        """Let virtual time pass, and everything happen in its time."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"advance({seconds!r}): give seconds from 0 on")
        end = self._clock.current_time() + seconds

        async def wait() -> None:
            while (left := end - self._clock.current_time()) > 0:
                await self._pass_time(left)

        self._step(wait)

    async def _pass_time(self, most: float) -> None:
        """Let time pass until the next deadline, and everything that is due happen."""
        await self._wait_all_tasks_blocked()
        seconds = trio.lowlevel.current_statistics().seconds_to_next_deadline
        if seconds == most == float("inf"):
            raise RuntimeError("the code under test waits for something that never happens")
        self._clock.jump(max(0.0, min(seconds, most)))
        await self._wait_all_tasks_blocked()

    def _step(self, function: Callable[[], Awaitable[None]]) -> None:
        """Run a function of ours to its end, then everything until it waits. Raises what it raises."""
        if self._token is None or self._nursery is None:
            raise RuntimeError("use it in a `with` block")
        ended, errors = threading.Event(), list[Exception]()

        async def step() -> None:
            try:
                await function()
                await self._wait_all_tasks_blocked()
            except Exception as error:
                errors.append(error)
            finally:
                ended.set()

        self._token.run_sync_soon(self._nursery.start_soon, step)
        self._wait(ended)
        if errors:
            raise unwrap(errors[0])

    def _wait(self, event: threading.Event) -> None:
        if not event.wait(STEP_LIMIT):
            raise _make_timeout()
        if self._errors:
            raise unwrap(self._errors[0])


def _make_timeout() -> TimeoutError:
    return TimeoutError(f"the code under test has not come to a wait within {STEP_LIMIT:g} s")


def unwrap(error: BaseException) -> BaseException:
    """Return the only error of nested groups that have one member each."""
    while isinstance(error, BaseExceptionGroup):
        inner = cast("tuple[BaseException, ...]", error.exceptions)
        if len(inner) != 1:
            break
        error = inner[0]
    return cast("BaseException", error)
