"""The asyncio event loop that jobs share: what one of them sets in it, or takes up of it, concerns that job alone."""

import asyncio
import importlib
import sys
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class TaskOwner(Protocol):
    """A job that makes tasks."""

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        ...


OWNER: ContextVar[TaskOwner | None] = ContextVar("celery5_asyncio_job", default=None)
"""The job that code in the loop runs for; None for the runner itself."""
_TASK_FACTORY: ContextVar[Any] = ContextVar("celery5_task_factory", default=None)
_EXECUTOR: ContextVar[Executor | None] = ContextVar("celery5_default_executor", default=None)


if TYPE_CHECKING:
    _AnyLoop = asyncio.BaseEventLoop
else:  # the loop of asyncio or of uvloop, see `make_loop`
    _AnyLoop = object


class JobTask(asyncio.Task[Any]):
    """The asyncio task of one job, or one that the job has made.

    While the job runs, no other can cancel it, as one does that cancels `asyncio.all_tasks()`. Afterwards any may: a
    client that one job has opened, another one closes.

    Make that of a job by itself, not by the loop's `create_task`, which asks a task factory of somebody.
    """

    def __init__(
        self,
        coroutine: Any,
        *,
        loop: asyncio.AbstractEventLoop,
        owner: TaskOwner | None = None,
        **options: Any,
    ) -> None:
        self._owner = OWNER.get() if owner is None else owner
        super().__init__(coroutine, loop=loop, **options)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, unless another job asks for it while its own runs."""
        asks, owner = OWNER.get(), self._owner
        is_foreign = asks is not None and asks is not owner
        if is_foreign and (owner is None or owner.is_running):
            return False
        return super().cancel(msg)


class JobsLoop(_AnyLoop):
    """A loop whose task factory and default executor, where a job sets them, hold for that job and what it starts."""

    def __init__(self) -> None:
        super().__init__()
        self._shared_executor: ThreadPoolExecutor | None = None
        self._calls: dict[object, set[asyncio.Future[Any]]] = {}

    def set_task_factory(self, factory: Any) -> None:
        """Set the task factory of the job that calls this."""
        _TASK_FACTORY.set(factory)

    def get_task_factory(self) -> Any:
        """Return the task factory of the job that calls this; None without one."""
        return _TASK_FACTORY.get()

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Return a new task, made by the factory of the job that calls this."""
        factory = _TASK_FACTORY.get()
        if factory is None:
            if self.is_closed():
                raise RuntimeError("Event loop is closed")
            return JobTask(coro, loop=self, **options)
        name = options.pop("name", None)
        task: asyncio.Task[Any] = factory(self, coro, **options)
        if name is not None and hasattr(task, "set_name"):
            task.set_name(name)
        return task

    def set_default_executor(self, executor: Any) -> None:
        """Set the default executor of the job that calls this."""
        _EXECUTOR.set(executor)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: the executor belongs to the other jobs, too; and one that a job has set, to that job."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Call `func` in an executor, by default in the one that the jobs share."""
        executor = executor or _EXECUTOR.get()
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        if self._shared_executor is None:
            self._shared_executor = ThreadPoolExecutor(thread_name_prefix="celery5-asyncio")
        future = super().run_in_executor(self._shared_executor, func, *args)
        owner = OWNER.get()
        calls = self._calls.setdefault(owner, set())
        calls.add(future)

        def forget(done: asyncio.Future[Any]) -> None:
            calls.discard(done)
            if not calls and self._calls.get(owner) is calls:  # also of a job that has ended before
                del self._calls[owner]

        future.add_done_callback(forget)
        return future

    def end_job(self, owner: object) -> None:
        """Forget a job. Calls that it has left behind keep their executor; the others get a new one."""
        calls = self._calls.pop(owner, None)
        if calls and self._shared_executor is not None:
            self._retire_executor()

    def close(self) -> None:
        """Close the loop, and let its executor end."""
        super().close()
        self._retire_executor()

    def _retire_executor(self) -> None:
        executor, self._shared_executor = self._shared_executor, None
        if executor is not None:
            executor.shutdown(wait=False)


def start_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], context: Context, owner: TaskOwner
) -> JobTask:
    """Return the task of a job, which has made its first step if that is possible. Call it in a callback of the loop.

    A job that waits for nothing needs no further turn of the loop then.
    """
    context.run(OWNER.set, owner)
    if sys.version_info >= (3, 12):
        return JobTask(coroutine, loop=loop, owner=owner, context=context, eager_start=True)
    if not isinstance(loop, JobsLoop):
        return JobTask(coroutine, loop=loop, owner=owner, context=context)
    # A new task gives its first step to `call_soon` of its loop.
    first_steps: list[Callable[[], object]] = []

    def keep(step: Callable[[], object], context: Context) -> None:
        first_steps.append(step)

    vars(loop)["call_soon"] = keep
    try:
        task = JobTask(coroutine, loop=loop, owner=owner, context=context)
    finally:
        del vars(loop)["call_soon"]
    context.run(first_steps[0])
    return task


def make_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop, which is a JobsLoop: of uvloop where that is installed, else of asyncio.

    An event loop policy that the application has set decides instead. Loops of other libraries are used as they are.
    """
    loop = asyncio.new_event_loop()
    uvloop_class, loop_class = _find_uvloop_class(), type(loop)
    if loop_class is asyncio.SelectorEventLoop and uvloop_class is not None and not _has_own_policy():
        loop_class = uvloop_class
    if loop_class not in (asyncio.SelectorEventLoop, uvloop_class):
        return loop
    loop.close()
    jobs_loop_class: type[JobsLoop] = type("JobsLoop", (JobsLoop, loop_class), {})
    return jobs_loop_class()


def _find_uvloop_class() -> type[asyncio.AbstractEventLoop] | None:
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        return None
    loop_class: type[asyncio.AbstractEventLoop] = uvloop.Loop
    return loop_class


def _has_own_policy() -> bool:
    """Return whether the application has set an event loop policy. Python 3.14 deprecates them, and 3.16 has none."""
    names: Any = asyncio
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if not hasattr(names, "get_event_loop_policy"):
            return False
        return type(names.get_event_loop_policy()) is not names.DefaultEventLoopPolicy
