"""Run the jobs of an application in the test, without a server: `celery5.testing.in_memory`."""

import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from inspect import signature
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import trio

from celery5.app import App
from celery5.broker.colour import run_in_thread
from celery5.errors import Misconfigured, RunWaits
from celery5.extras import describe_installation
from celery5.middleware.jobs import IncomingJob, SendingBatch, get_command, get_sent_job
from celery5.middleware.middleware import Middleware
from celery5.middleware.outcomes import Dead, Released
from celery5.processes.development import run_in_background
from celery5.processes.foreground import ServeOptions
from celery5.processes.worker import WorkerOptions, list_queues
from celery5.protocol.shards import get_queue_of_shard
from celery5.protocol.workflows.status import NodeState
from celery5.results.async_result import WITHOUT_WORKER
from celery5.runners.surrounding import FunctionCall
from celery5.runners.thread_pool import lent_thread
from celery5.tasks.task import Task
from celery5.testing.background_trio import in_thread
from celery5.testing.clock import VirtualClock, set_clock
from celery5.testing.sent_messages import (
    SentMessages,
    bind_arguments,
    count_times,
    decode_arguments,
    describe_call,
    describe_calls,
    fits,
    sort_first,
)

DELIVERY_TASK = "celery5.workflows.deliver:"
"""The prefix of the names of celery5's own tasks, which deliver events to the runs that wait for them."""
TEST_ENDED = "the test has ended before this job began"

if TYPE_CHECKING:
    from celery5.testing.memory_server.server import MemoryServer


@dataclass
class RanJob:
    """A job that ran while `in_memory` was in force."""

    id: str
    # The task's name.
    task: str
    queue: str
    # Its arguments by the names of the parameters, as the task got them; defaults are left out.
    arguments: dict[str, Any]
    # How many attempts there were.
    attempts: int = 0
    # What the last attempt raised; None if it returned.
    error: BaseException | None = None


class InMemoryWorker(SentMessages):
    """Runs what an application has sent, in the test, when the test says so.

    It is the worker of production with its scripts, on a server in memory. `def` tasks run one after another in the
    thread that calls `run`, and `async def` tasks on loops in another one.
    """

    def __init__(self, app: App, server: "MemoryServer", stack: ExitStack, *, schedules: bool) -> None:
        super().__init__(app)
        self.ran: list[RanJob] = []
        """The jobs that have run, in the order in which they first began."""
        self._server = server
        self._stack = stack
        self._schedules = schedules
        self._calls = CallQueue()
        self._errors: list[BaseException] = []
        self._called = set[str]()
        # The queues that a worker reads, and those that jobs were sent to.
        self._read_queues = set[str]()
        self._sent_queues = set[str]()
        self._running = threading.Lock()
        # Set while `run` is at work, and at the end: until then a job that the worker has taken does not begin.
        self._may_begin = threading.Event()
        self._has_ended = False
        self._clock: VirtualClock = stack.enter_context(set_clock(app, server.url, None, self._wait_for_call))

    @property
    def now(self) -> float:
        """The time for jobs and workflows, in seconds since 1970: it passes in `run` and `advance` only."""
        return self._clock.now

    def run(self, *, raise_errors: bool = True) -> list[RanJob]:
        """Run everything to its end: all jobs, what they send, their retries, workflows with their sleeps and waits.

        Countdowns, the delays of retries, sleeps and timeouts pass at once, in their order.

        Args:
            raise_errors: Whether the error of the first job that failed for good is raised, when all have run.

        Returns:
            The jobs that ran.

        Raises:
            RunWaits: A workflow waits for a signal or an event, and nothing else is left to do.
            TimeoutError: A job has not ended within 30 seconds.
            Exception: What a job raised, with its traceback.
        """
        return self._run(partial(self._clock.advance_to_end, self._check_progress), raise_errors=raise_errors)

    def run_due(self, *, raise_errors: bool = True) -> list[RanJob]:
        """Run what is due now, and what it sends. No time passes: retries, countdowns and sleeps stay. See `run`."""
        wait = partial(self._clock.wait_until_idle, with_schedules=self._schedules)
        return self._run(wait, raise_errors=raise_errors)

    def advance(self, seconds: float, *, raise_errors: bool = True) -> list[RanJob]:
        """Let time pass, and run what falls due, in its order. See `run`; schedules fire, too, if there are any."""
        advance = partial(self._clock.advance, seconds, with_schedules=self._schedules)
        return self._run(advance, raise_errors=raise_errors)

    async def arun(self, *, raise_errors: bool = True) -> list[RanJob]:
        """`run`, for tests on Trio and asyncio. `def` tasks run in another thread."""
        return await run_in_thread(partial(self.run, raise_errors=raise_errors))

    async def arun_due(self, *, raise_errors: bool = True) -> list[RanJob]:
        """`run_due`, for tests on Trio and asyncio."""
        return await run_in_thread(partial(self.run_due, raise_errors=raise_errors))

    async def aadvance(self, seconds: float, *, raise_errors: bool = True) -> list[RanJob]:
        """`advance`, for tests on Trio and asyncio."""
        return await run_in_thread(partial(self.advance, seconds, raise_errors=raise_errors))

    def ran_of(self, task: Task[..., Any]) -> list[RanJob]:
        """Return the jobs of one task that have run."""
        return [job for job in self.ran if job.task == task.name]

    def assert_ran(
        self, task: Task[..., Any], *args: Any, attempts: int | None = None, **kwargs: Any
    ) -> RanJob:
        """Return the first job of a task that ran with these arguments.

        Args:
            task: The task.
            args: The arguments that are compared, as they are passed to `delay`: those that are left out may be any.
            attempts: How many attempts it had; None for any number.
            kwargs: The arguments by name.

        Raises:
            AssertionError: There is none. It says what ran instead.
        """
        values, found = self._find_ran(task, args, kwargs)
        fitting = [job for job in found if attempts in {None, job.attempts}]
        if fitting:
            return fitting[0]
        wanted = describe_call(task.name, values)
        if found:
            counts = " and ".join(str(job.attempts) for job in found)
            raise AssertionError(f"{wanted} did not run with attempts={attempts}, but with {counts}")
        jobs = sort_first(self.ran, self.ran_of(task))
        others = [
            describe_call(job.task, job.arguments, values if job.task == task.name else None) for job in jobs
        ]
        waiting = "" if self.ran else "; it runs when the test calls run()" if self.jobs_of(task) else ""
        if task.schedule and not self._schedules:
            waiting += "; its schedule fires in advance() with in_memory(app, schedules=True) only"
        raise AssertionError(f"{wanted} did not run; {describe_calls(others, 'ran')}{waiting}")

    def assert_not_ran(self, task: Task[..., Any], *args: Any, **kwargs: Any) -> None:
        """Raise AssertionError if a job of a task ran with these arguments."""
        values, found = self._find_ran(task, args, kwargs)
        if found:
            raise AssertionError(f"{describe_call(task.name, values)} ran, {count_times(len(found))}")

    def clear(self) -> None:
        """Forget what was sent and what has run. Jobs that wait go on waiting."""
        super().clear()
        self.ran.clear()

    def _find_ran(
        self, task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[RanJob]]:
        values = bind_arguments(task.function, args, kwargs)
        return values, [job for job in self.ran_of(task) if fits(job.arguments, values)]

    def _run(self, pass_time: Callable[[], None], *, raise_errors: bool) -> list[RanJob]:
        if not self._running.acquire(blocking=False):
            raise Misconfigured("run() is at work already: a job must not call it")
        try:
            first = len(self.ran)
            self._errors.clear()
            self._start()
            self._may_begin.set()
            self._server.release()
            try:
                pass_time()
            finally:
                self._server.hold()
                self._may_begin.clear()
            if self._errors and raise_errors:
                raise self._take_error()
            return self.ran[first:]
        finally:
            self._running.release()

    def _start(self) -> None:
        """Start the worker, when it is first needed."""
        if self._read_queues:
            return
        self._app.load()
        self._stack.enter_context(lent_thread(self._calls.execute))
        self._read_queues.update(list_queues(self._app, WorkerOptions()), self._sent_queues)
        self._start_worker(
            ServeOptions(queues=tuple(sorted(self._read_queues))), with_schedules=self._schedules
        )

    def _start_worker(self, options: ServeOptions, **companions: bool) -> None:
        serve = partial(run_in_background, self._app, options, **companions)
        self._stack.enter_context(in_thread(serve, "worker", self._calls.fail))
        self._stack.callback(self._end)

    def _end(self) -> None:
        """Begin no more jobs: those that wait for it end with an error."""
        self._has_ended = True
        self._may_begin.set()
        self._calls.close()

    def _wait_for_call(self, timeout: float) -> None:
        """Make the next call of a worker. A queue that only a call has named gets a worker of its own first."""
        if new_queues := frozenset(self._sent_queues) - self._read_queues:
            self._read_queues |= new_queues
            options = ServeOptions(queues=tuple(sorted(new_queues)), name=f"reader-{len(self._read_queues)}")
            self._start_worker(options, with_schedules=False, with_router=False)
        self._calls.make_next(timeout)

    def _take_error(self) -> BaseException:
        error = self._errors[0]
        for other in self._errors[1:]:
            error.add_note(f"{type(other).__name__} of another job: {other}")
        return error

    def _check_progress(self, next_due: int) -> None:
        """Raise RunWaits if nothing is left but the deadlines of runs that wait."""
        waiting: list[str] = []
        for run in self._app.workflows.list_runs(limit=1000, live_only=True):
            if run.deadline is not None and round(run.deadline * 1000) == next_due:
                found = self._app.workflows.find(run.id)
                nodes = found.graph().nodes if found is not None else ()
                names = [
                    repr(node.name.removeprefix("wait for "))
                    for node in nodes
                    if node.state is NodeState.WAITING
                ]
                if names:
                    waiting.append(f"{run.name}[{run.id}] waits for {' and '.join(names)}")
        if waiting:
            raise RunWaits(
                f"{'; '.join(waiting)}, and nothing else is left to do: send that, then run() again; "
                "or let the time pass until the run's deadline with advance(seconds)"
            )

    def _note_begun(self, job: IncomingJob) -> RanJob | None:
        command = get_command(job)
        if command is None or job.task not in self._app.tasks or job.task.startswith(DELIVERY_TASK):
            return None
        for ran in self.ran:
            if ran.id == job.id:
                return ran
        ran = RanJob(job.id, job.task, get_queue_of_shard(job.queue), {})
        with suppress(Exception):  # those of a run may be elsewhere: `note_call` gets them
            ran.arguments = decode_arguments(self._app, command)
        self.ran.append(ran)
        return ran

    def note_call(self, call: FunctionCall) -> None:
        """Note what a task is called with. Called by the worker, but not for boxed tasks.

        Raises:
            RuntimeError: The test has ended.
        """
        if self._has_ended:
            raise RuntimeError(TEST_ENDED)
        task = self._app.tasks.get(call.job.task) if call.job is not None else None
        for ran in self.ran:
            if task is not None and call.job is not None and ran.id == call.job.id:
                self._called.add(ran.id)
                with suppress(TypeError):
                    ran.arguments = dict(signature(task.function).bind(*call.args, **call.kwargs).arguments)

    def note_ended(self, job: IncomingJob, ran: RanJob | None) -> None:
        """Note the end of an attempt. Called by the worker."""
        outcome = job.outcome
        if ran is not None and not (ran.id in self._called or self._app.tasks[ran.task].box):
            self.ran.remove(ran)  # the worker has done it by itself, such as to list the members of a map
            ran = None
        if ran is not None and not isinstance(outcome, Released):
            ran.attempts = job.attempt
            ran.error = job.exception
        if isinstance(outcome, Dead) and job.exception is not None:
            self._errors.append(job.exception)

    def note_sent(self, batch: SendingBatch) -> None:
        """Note what was sent, and where to."""
        self._sent_queues.update(job.queue for job in batch.jobs)
        self.record([get_sent_job(job) for job in batch.jobs if job.kind != "run"])

    def make_middleware(self) -> Middleware:
        """Return what watches the jobs of the application."""
        return _JobWatch(self)

    @asynccontextmanager
    async def watch_job(self, job: IncomingJob) -> AsyncGenerator[None, None]:
        """Watch a job while it runs, which it begins when the test calls `run`. Called by the worker."""
        if not self._may_begin.is_set():  # it was let through at a limit, between two calls of `run`
            await trio.to_thread.run_sync(self._may_begin.wait, abandon_on_cancel=True)
        ran = self._note_begun(job)
        yield
        self.note_ended(job, ran)


class _JobWatch(Middleware):
    """Notes which jobs are sent, and which run."""

    def __init__(self, worker: InMemoryWorker) -> None:
        self._worker = worker

    @contextmanager
    def sending(self, batch: SendingBatch) -> Generator[None, None, None]:
        yield
        if batch.error is None:
            self._worker.note_sent(batch)

    def running(self, job: IncomingJob) -> Any:
        return self._worker.watch_job(job)

    def calling(self, call: FunctionCall) -> None:
        self._worker.note_call(call)

    def unstarted(self, job: IncomingJob) -> None:
        self._worker.note_ended(job, None)


@dataclass
class _Call:
    function: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class CallQueue:
    """Calls that threads of a worker want made in the thread of the test."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._is_closed = False
        self._worker_error: BaseException | None = None

    def execute(self, function: Callable[[], Any]) -> Any:
        """Let the thread that calls `make_next` make a call. Return its value, or raise its error."""
        call = _Call(function)
        self._calls.put(call)
        if self._is_closed:
            self.close()
        call.done.wait()
        if call.error is not None:
            raise call.error
        return call.result

    def make_next(self, timeout: float) -> None:
        """Make the next call, in this thread; return after `timeout` seconds if there is none.

        Raises:
            RuntimeError: The worker has ended: there will be none.
        """
        if self._worker_error is not None:
            raise RuntimeError(
                f"the worker of this test has ended: {self._worker_error}"
            ) from self._worker_error
        try:
            call = self._calls.get(timeout=timeout)
        except Empty:
            return
        try:
            call.result = call.function()
        except BaseException as error:
            call.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            call.done.set()

    def fail(self, error: BaseException) -> None:
        """Note the error that has ended the worker."""
        self._worker_error = error

    def close(self) -> None:
        """Make no more calls: those that wait end with an error."""
        self._is_closed = True
        while not self._calls.empty():
            call = self._calls.get()
            call.error = RuntimeError(TEST_ENDED)
            call.done.set()


@contextmanager
def in_memory(app: App, *, schedules: bool = False) -> Generator[InMemoryWorker, None, None]:
    """Keep what `app` sends in this process while the block lasts, and run it when the test says so.

    Nothing else is needed: no server, no worker. Everything works as in production, with the same scripts: jobs,
    retries, events with their subscribers, workflows, limits, streams, dead letters. Yields the InMemoryWorker.

    Args:
        schedules: Whether schedules fire, as time passes in `advance`.

    Raises:
        Misconfigured: The application has several brokers; virtual time is in force already; or the package lupa is
            missing.
    """
    if app.brokers.is_multi_broker:
        raise Misconfigured("in_memory works with one broker, and this application has several")
    if find_spec("lupa") is None:
        raise Misconfigured(f"in_memory needs the package lupa: {describe_installation('testing')}")
    from celery5.testing.memory_server.server import MemoryServer

    previous_url = app.settings.broker
    with ExitStack() as stack:
        server = stack.enter_context(MemoryServer())
        server.hold()
        app.use_broker(server.url)
        stack.callback(app.use_broker, previous_url)
        stack.callback(WITHOUT_WORKER.set, WITHOUT_WORKER.get())
        WITHOUT_WORKER.set("no job has run yet: call run() of what in_memory() returned first")
        worker = InMemoryWorker(app, server, stack, schedules=schedules)
        stack.enter_context(app.with_middleware(worker.make_middleware()))
        yield worker
