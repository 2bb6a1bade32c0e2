"""Middleware: what an application runs around the sending, the running and the settling of its jobs."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from celery5.application import Application
from celery5.broker.colour import current_colour
from celery5.errors import Misconfigured
from celery5.logs.fence import FENCE, pass_cancellation
from celery5.protocol.job.job import Job
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.runners.context import LOG_EVENT
from celery5.runners.operations import MessageOperation
from celery5.runners.surrounding import CallBlock, CallSurround, FunctionCall, make_surround

if TYPE_CHECKING:
    from celery5.middleware.jobs import IncomingJob, OutgoingJob, SendingBatch, SettlingBatch

Block: TypeAlias = AbstractContextManager[Any] | None
"""What surrounds something: a context manager, or None for nothing."""
RunningBlock: TypeAlias = AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | None
"""The same around a running job, where it may also be asynchronous."""


class Middleware:
    """Something that an application does around each of its jobs: measure, log, trace, prepare.

    Override what you need; nothing else is called. The first middleware of an application is the outermost one. Blocks
    always end normally, but for those of `calling`: what happened is an attribute of the job or of the batch. What a
    method raises is logged once for each middleware (`middleware:failed`), and changes nothing for the job.
    """

    def added(self, app: Application) -> None:
        """Prepare for an application, before anything else is called. What this raises is raised."""

    def sending(self, batch: "SendingBatch") -> Block:
        """Return what surrounds the sending of jobs, events and workflows; in plain Python, Trio and asyncio alike.

        It may change the headers of what is sent.
        """

    def running(self, job: "IncomingJob") -> RunningBlock:
        """Return what surrounds a task that runs, in the worker. `job.outcome` is set when the block ends.

        `async with` blocks run on Trio. Context variables that are set in the block are visible in the task, unless it
        is boxed, and are gone after the job.
        """

    def calling(self, call: FunctionCall) -> CallBlock:
        """Return what surrounds the call of a task's function where it runs: `call.kind` says where.

        That is in the thread of a `def` task, in the asyncio or Trio task of an `async def` one, and in the process of
        a boxed one. Processors, timers and other functions of the application are surrounded, too, and `call.job` is
        None then. `async with` blocks surround `async def` alone, on its event loop.

        These blocks are part of the call: they get its error, their own errors are those of the job, and its limits in
        time count them. They cannot hide an error.
        """

    def settling(self, batch: "SettlingBatch") -> Block:
        """Return what surrounds the step that stores the outcomes of jobs and acknowledges them."""

    def operating(self, operation: MessageOperation) -> Block:
        """Return what surrounds what a component does with messages besides jobs.

        In the producer it is the sending of records to a stream; in a worker the processing of a record, or of a batch,
        and the commits of a processor; in a Router the delivery of documents to a sink and of events to their
        subscribers; in a Publisher daemon what it publishes. The block of `process` is entered where the processor
        runs: context variables are visible in it. `operation.error` is set when the block ends.
        """

    def received(self, jobs: "Sequence[IncomingJob]") -> None:
        """Handle jobs that a worker has read."""

    def unstarted(self, job: "IncomingJob") -> None:
        """Handle a job that ended in this worker, or was released, without being run: `job.outcome` says how."""

    def recovered(self, worker: str, queue: str, count: int) -> None:
        """Handle the death of another worker, whose `count` jobs of a queue were put back or became dead letters."""

    def process_started(self, kind: str, name: str) -> None:
        """Handle the start of this process: a worker, router, scheduler, controller or publisher that is ready now."""

    def process_stopped(self, kind: str, name: str) -> None:
        """Handle the end of this process, after its last job."""


_HOOKS = (
    "sending",
    "running",
    "calling",
    "settling",
    "operating",
    "received",
    "unstarted",
    "recovered",
    "process_started",
    "process_stopped",
)
Hook = tuple[Middleware, Callable[..., Any]]
"""A method of a middleware that is overridden."""


def check_middleware(given: Sequence[Middleware]) -> list[Middleware]:
    """Return the middleware of an application. Raises Misconfigured for anything else."""
    for middleware in cast("Sequence[object]", given):
        if not isinstance(middleware, Middleware):
            made = f": write {middleware.__name__}()" if isinstance(middleware, type) else ""
            raise Misconfigured(
                f"{middleware!r} is no object of a subclass of celery5.observability.Middleware{made}"
            )
    return list(given)


class MiddlewareStack:
    """The middleware of an application, in order. Which methods they override is looked up once, here."""

    def __init__(self, middleware: Sequence[Middleware]) -> None:
        self._middleware = tuple(middleware)
        self._hooks: dict[str, tuple[Hook, ...]] = {
            name: tuple((item, getattr(item, name)) for item in middleware if _overrides(item, name))
            for name in _HOOKS
        }
        self._running = self._hooks["running"]
        self._failed: set[int] = set()
        # Whether there is any middleware of a kind: all that is looked at where there is none.
        self.sends: bool = bool(self._hooks["sending"])
        self.runs: bool = bool(self._running or self._hooks["unstarted"])
        self.settles: bool = bool(self._hooks["settling"])
        self.operates: bool = bool(self._hooks["operating"])
        self.receives: bool = bool(self._hooks["received"])
        self.notes_unstarted: bool = bool(self._hooks["unstarted"])

    def __iter__(self) -> Any:
        return iter(self._middleware)

    def __len__(self) -> int:
        return len(self._middleware)

    # ---- blocks

    @contextmanager
    def sending(self, jobs: Sequence[Job], *, is_run: bool = False) -> Generator[list[Job], None, None]:
        """Surround the sending of `jobs`; yield them with the headers that middleware has added."""
        from celery5.middleware.jobs import OutgoingJob, SendingBatch  # most producers need neither

        batch = SendingBatch([OutgoingJob(job, is_run=is_run) for job in jobs])
        entered = self._enter("sending", batch)
        try:
            yield [self._make_job(outgoing, job) for outgoing, job in zip(batch.jobs, jobs, strict=True)]
        except BaseException as error:
            batch.fail(error)
            raise
        finally:
            self._exit(entered)

    @contextmanager
    def settling(self, batch: "SettlingBatch") -> Generator[None, None, None]:
        """Surround one settlement."""
        entered = self._enter("settling", batch)
        try:
            yield
        except BaseException as error:
            batch.fail(error)
            raise
        finally:
            self._exit(entered)

    @contextmanager
    def operating(self, operation: MessageOperation) -> Generator[None, None, None]:
        """Surround an operation. Headers that make no sense are dropped, with a warning."""
        entered = self._enter("operating", operation)
        try:
            if operation.name == "send":
                self._drop_bad_headers(operation)
            yield
        except BaseException as error:
            operation.error = error
            raise
        finally:
            self._exit(entered)

    def _drop_bad_headers(self, operation: MessageOperation) -> None:
        from celery5.middleware.jobs import check_headers  # as for `sending`

        for headers in operation.headers:
            try:
                check_headers(headers)
            except Exception as error:
                self.report(self._hooks["operating"][-1][0], "operating", error)
                headers.clear()

    @property
    def running(self) -> Sequence[tuple["Middleware", "Callable[[IncomingJob], RunningBlock]"]]:
        """The methods `running` that there are, with their middleware, from the outermost to the innermost."""
        return self._running

    def make_surround(self, *, is_boxed: bool = False) -> CallSurround | None:
        """Return what calls functions inside of the blocks of `calling`; None when there are none."""
        hooks = [hook for _, hook in self._hooks["calling"]]
        return make_surround(hooks, is_boxed=is_boxed) if hooks else None

    # ---- notifications

    def notify(self, hook: str, *words: Any) -> None:
        """Call the method named `hook` of each middleware that has it."""
        for middleware, function in self._hooks[hook]:
            try:
                with _guarding_task():
                    function(*words)
            except BaseException as error:
                pass_cancellation(error)
                self.report(middleware, hook, error)

    # ---- inside

    def _enter(
        self, name: str, batch: "SendingBatch | SettlingBatch | MessageOperation"
    ) -> list[tuple[Middleware, Any, str]]:
        entered: list[tuple[Middleware, Any, str]] = []
        for middleware, hook in self._hooks[name]:
            try:
                with _guarding_task():
                    block = hook(batch)
                    if block is not None:
                        block.__enter__()
                        entered.append((middleware, block, name))
            except BaseException as error:
                pass_cancellation(error)
                self.report(middleware, name, error)
        return entered

    def _exit(self, entered: list[tuple[Middleware, Any, str]]) -> None:
        while entered:
            middleware, block, name = entered.pop()
            try:
                with _guarding_task():
                    block.__exit__(None, None, None)
            except BaseException as error:
                pass_cancellation(error)
                self.report(middleware, name, error)

    def _make_job(self, outgoing: "OutgoingJob", job: Job) -> Job:
        """Return the job with its headers; without any, and a warning, if they make no sense."""
        try:
            return outgoing.make_job()
        except Exception as error:
            self.report(self._hooks["sending"][-1][0], "sending", error)
            return job

    def report(self, middleware: Middleware, hook: str, error: BaseException) -> None:
        """Log that a middleware has failed, once for each, and count it."""
        FENCE.count("middleware")
        if id(middleware) in self._failed:
            return
        self._failed.add(id(middleware))
        with FENCE("log"):
            LOG_EVENT.get()(
                "middleware:failed",
                "warning",
                middleware=type(middleware).__qualname__,
                hook=hook,
                why=describe_error(error, MAX_ERROR_LENGTH),
            )


class ObservedApplication(Application, Protocol):
    """An application that has middleware."""

    @property
    def middleware(self) -> MiddlewareStack:
        """What surrounds the sending and running of its jobs."""
        ...


def _guarding_task() -> AbstractContextManager[None]:
    """Return a block for a plain call, which keeps the cancel scopes of a Trio task as they are.

    A block such as `with trio.move_on_after(1): yield` would cancel what it surrounds, and nobody would notice.
    """
    if current_colour() != "trio":
        return nullcontext()
    from celery5.runners.user_errors import guard_scopes  # needs Trio, which few producers do

    return guard_scopes()


def _overrides(middleware: Middleware, name: str) -> bool:
    return getattr(type(middleware), name) is not getattr(Middleware, name) or name in vars(middleware)
