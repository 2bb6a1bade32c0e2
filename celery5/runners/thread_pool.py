"""Thread pool: long-lived threads that make the calls of Trio tasks.

`trio.to_thread.run_sync` finds a thread for each call and wakes the loop at each end. Here threads stay and take call
after call, and the loop wakes once for all calls that have ended since it last looked. Where more calls are made than
there are slots, a thread goes on with the next one by itself.
"""

import math
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, Generic, TypeVar

import trio

T = TypeVar("T")

Execute = Callable[[Callable[[], Any]], Any]
"""Makes a call in another thread, and returns or raises what it does."""

IDLE_TIMEOUT = 10.0
"""Seconds for which a thread waits for a call before it ends."""
STALL_INTERVAL = 0.01
"""Seconds without the end of any call after which those that wait are given back, if they may be."""
_IDLE_CHECKS = 50


class NotBegun(Exception):
    """A call has waited for calls that take long, and is not made."""


class ThreadCall(Generic[T]):
    """One call of a function in a thread, in a copy of the context in which this is made.

    Args:
        function: What is called.
        on_begin: Called in the thread just before. It must not raise.
        may_be_given_back: Whether the call may end with NotBegun.
    """

    __slots__ = (
        "context", "end", "error", "function", "has_begun", "is_over", "may_be_given_back", "on_begin", "result",
        "thread", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        function: Callable[[], T],
        on_begin: Callable[[], None] | None = None,
        *,
        may_be_given_back: bool = False,
    ) -> None:
        self.function = function
        self.on_begin = on_begin
        self.may_be_given_back = may_be_given_back
        self.context: Context = copy_context()
        self.waiter: _Waiter | None = None
        """What waits for it; None once it has ended or was abandoned."""
        self.thread: _Thread | None = None
        """The thread that makes it now."""
        self.has_begun = False
        self.is_over = False
        self.end: trio.Event | None = None
        """Set when it has ended; None unless it was abandoned before."""
        self.result: T | None = None
        self.error: BaseException | None = None

    def begin(self, thread: "_Thread") -> bool:
        """Begin, in its thread. Return whether it may go on: it was not cancelled before."""
        if self.waiter is None:
            return False
        self.has_begun, self.thread = True, thread
        if self.on_begin is not None:
            self.on_begin()
        return True

    def make(self) -> None:
        """Call the function, in its thread, or in the one that is lent."""
        try:
            if _LENT:
                self.result = _LENT[-1](partial(self.context.run, self.function))
            else:
                self.result = self.context.run(self.function)
        except BaseException as error:
            self.error = error


_LENT: list[Execute] = []


@contextmanager
def lent_thread(execute: Execute) -> Generator[None, None, None]:
    """Have the calls of all pools made by `execute` while the block lasts: in the thread of a test.

    There `trio.from_thread` does not work.
    """
    _LENT.append(execute)
    try:
        yield
    finally:
        _LENT.remove(execute)


class _Waiter:
    """The Trio task that waits for a call, and then for those that follow in its place.

    To wake the task for each of them would take as long as to hand a short one over.
    """

    __slots__ = ("_choose_next", "_task", "call")

    def __init__(
        self,
        call: ThreadCall[Any],
        choose_next: Callable[[ThreadCall[Any]], ThreadCall[Any] | None] | None,
    ) -> None:
        self._task = trio.lowlevel.current_task()
        self._choose_next = choose_next
        self.set_call(call)

    def set_call(self, call: ThreadCall[Any]) -> None:
        """Wait for this call from now on."""
        self.call = call
        call.waiter = self

    def abort(self, _raise: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        """Have the end of the call wake nobody: the task is woken by its cancellation."""
        self.call.waiter = None
        return trio.lowlevel.Abort.SUCCEEDED

    def finish_call(self) -> ThreadCall[Any] | None:
        """Return the call that follows on this one, which has ended; wake the task if there is none."""
        call = self.call
        call.waiter = None
        if self._choose_next is not None and call.error is None:
            following = self._task.context.run(self._choose_next, call)
            if following is not None:
                self.set_call(following)
                return following
        trio.lowlevel.reschedule(self._task)
        return None


class _Thread:
    """One thread, and the scope of the Trio task that it belongs to."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_retired = False


class ThreadPool:
    """Threads that make calls, `slots` at once; a thread is started when all others are busy.

    In a call `trio.from_thread` works as in one of `trio.to_thread.run_sync` with `abandon_on_cancel`: for Trio each
    thread is one such call, so that no private part of it is needed. Cancelling a call cancels that of Trio, and the
    thread ends with it.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        # The calls that have a slot: those that run, and those that a thread is about to take from `_waiting`.
        self._active = 0
        # The calls that wait for a slot.
        self._backlog: deque[ThreadCall[Any]] = deque()
        self._is_watched = False
        self._ended_count = 0
        self._waiting: SimpleQueue[ThreadCall[Any] | None] = SimpleQueue()
        self._ended: deque[ThreadCall[Any]] = deque()
        self._wakes = False
        self._lock = Lock()
        self._thread_count = 0
        self._unlimited = trio.CapacityLimiter(math.inf)

    def resize(self, slots: int) -> None:
        """Set how many calls may be made at once. Those that are made go on."""
        if slots != self._slots:
            self._slots = slots
            self._dispatch()

    async def make(
        self, call: ThreadCall[T], choose_next: Callable[[ThreadCall[T]], ThreadCall[T] | None] | None = None
    ) -> T:
        """Make a call, and return or raise what its function does.

        Args:
            call: The call.
            choose_next: Called in the loop with one that has returned, in the context of this task. Returns a call to
                be made in its place without waking this task; then that is the call whose end counts.

        Raises:
            Cancelled: This task was cancelled first. Either the call never begins; or it goes on in its thread, where
                `trio.from_thread.check_cancelled` raises, and keeps its slot until it sets `end`.
            NotBegun: The calls before it take long, and it may be given back.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        waiter = _Waiter(call, choose_next)
        self._add(call)
        try:
            await trio.lowlevel.wait_task_rescheduled(waiter.abort)
        except trio.Cancelled:
            self._abandon(waiter.call)
            raise
        call = waiter.call
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def _add(self, call: ThreadCall[Any]) -> None:
        """In the loop: have a call made."""
        with self._lock:  # a thread that ends a call sees this one, or has freed its slot before
            self._backlog.append(call)
            is_free = self._active < self._slots
        if is_free:
            self._dispatch()
        elif call.may_be_given_back and not self._is_watched:
            self._is_watched = True
            trio.lowlevel.spawn_system_task(self._watch)

    def _dispatch(self) -> None:
        """In the loop: hand calls that wait to threads while slots are free."""
        new_threads = 0
        with self._lock:
            while self._backlog and self._active < self._slots:
                call = self._backlog.popleft()
                if call.waiter is None:  # it was cancelled
                    continue
                self._active += 1
                self._waiting.put(call)
                if self._active > self._thread_count:
                    self._thread_count += 1
                    new_threads += 1
        for _ in range(new_threads):
            trio.lowlevel.spawn_system_task(self._host, _Thread(), trio.lowlevel.current_trio_token())

    async def _watch(self) -> None:
        """Give calls back that wait while no call ends, as long as calls wait."""
        idle_checks = ended_count = 0
        while idle_checks < _IDLE_CHECKS:
            ended_count = self._ended_count
            await trio.sleep(STALL_INTERVAL)
            idle_checks = 0 if self._backlog else idle_checks + 1
            if self._backlog and self._ended_count == ended_count and not self._ended:
                self._give_back()
        self._is_watched = False

    def _give_back(self) -> None:
        with self._lock:
            calls = [call for call in self._backlog if call.waiter is not None]
            self._backlog = deque(call for call in calls if not call.may_be_given_back)
        for call in calls:
            if call.may_be_given_back and call.waiter is not None:
                call.error = NotBegun()
                call.waiter.finish_call()

    def _abandon(self, call: ThreadCall[T]) -> None:
        """Have a call that has begun notice that it is cancelled, and one that has not begun never begin."""
        with self._lock:  # so that it does not begin just now
            thread = call.thread
            if thread is not None:
                thread.is_retired = True
        if call.has_begun and not call.is_over:
            call.end = trio.Event()
        if thread is not None:
            thread.scope.cancel()

    async def _host(self, thread: _Thread, token: trio.lowlevel.TrioToken) -> None:
        """Have one thread for as long as it is used."""
        try:
            with thread.scope:
                await trio.to_thread.run_sync(
                    self._work, thread, token, abandon_on_cancel=True, limiter=self._unlimited
                )
        except trio.Cancelled:  # the run ends
            thread.is_retired = True
            self._waiting.put(None)
            raise
        except Exception as error:  # no thread could be started
            with self._lock:
                self._thread_count -= 1
                self._active -= 1
            with suppress(Empty):
                if (call := self._waiting.get_nowait()) is not None:
                    call.has_begun, call.error = True, error
                    self._ended.append(call)
                    self._collect()

    def _work(self, thread: _Thread, token: trio.lowlevel.TrioToken) -> None:
        """In a thread: make call after call until none comes for a while."""
        call = self._take(thread)
        while call is not None:
            call.make()
            with self._lock:
                call.thread = None
                self._thread_count -= (is_retired := thread.is_retired)
                following = self._release_slot(None if is_retired else thread)
            self._ended.append(call)
            if not self._wakes:
                self._wakes = True
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(self._collect)
            if is_retired:
                return
            call = following or self._take(thread)

    def _take(self, thread: _Thread) -> ThreadCall[Any] | None:
        """In a thread: return the next call; None when the thread is to end."""
        while True:
            try:
                call = self._waiting.get(timeout=IDLE_TIMEOUT)
            except Empty:
                with self._lock:
                    if not self._waiting.empty():
                        continue
                    self._thread_count -= 1
                return None
            if call is None:
                return None
            with self._lock:
                if call.begin(thread) or (call := self._release_slot(thread)) is not None:
                    return call

    def _release_slot(self, thread: _Thread | None) -> ThreadCall[Any] | None:
        """In a thread, with the lock: return the next call, which has begun in its slot; None when the slot is free."""
        while thread is not None and self._backlog and self._active <= self._slots:
            call = self._backlog.popleft()
            if call.begin(thread):
                return call
        self._active -= 1
        return None

    def _collect(self) -> None:
        """In the loop: wake the tasks whose calls have ended, or go on with what follows in their place."""
        self._wakes = False  # what ends from now on wakes the loop again
        for _ in range(len(self._ended)):
            call = self._ended.popleft()
            self._ended_count += 1
            call.is_over = True
            if call.waiter is not None:
                if (following := call.waiter.finish_call()) is not None:
                    self._add(following)
            elif call.end is not None:
                call.end.set()
        if self._backlog:
            self._dispatch()
