"""The context managers of the testing kit: record what is sent, run a worker in this process, run code as a job."""

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import trio

from celery5.app import App
from celery5.boot_step import BootStep, select_steps
from celery5.bootsteps.boot import EXECUTION_STEP, BootGraph
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.health import erase_app
from celery5.broker.colour import BlockingDriverAdapter, run_blocking
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.processes.development import run_in_background
from celery5.processes.foreground import ServeOptions
from celery5.processes.process_parts import make_injectable_values
from celery5.protocol.commands.definitions import RETRY_BOOT_STEP
from celery5.protocol.job.job import new_id
from celery5.runners.context import CURRENT_JOB, CurrentJob
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.open_resources import replace_resource
from celery5.services.commands.dispatcher import CommandRegistry, ImmediateCommands, handle
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.process.step_status import StepStatus
from celery5.streams.operations import erase_streams
from celery5.tasks.resources import Resource
from celery5.tasks.task import Task
from celery5.testing.background_trio import in_thread
from celery5.testing.clock import VirtualClock, set_clock
from celery5.testing.recording import Recorded, refuse_unrecorded
from celery5.testing.virtual_loop import unwrap


@contextmanager
def recorded(app: App) -> Generator[Recorded, None, None]:
    """Keep the jobs and events that `app` sends while the block lasts, instead of publishing them. No broker is needed.

    Arguments are checked and encoded as usual. Blocks may be nested: the inner one keeps what is sent in it. No
    connection to a broker is opened: what would need one, such as starting a workflow, sending a record, adding a
    schedule or waiting for a result, raises NotRecorded.
    """
    recording = Recorded(app)
    with app.redirect(recording.record, refuse_unrecorded):
        yield recording


@contextmanager
def as_job(
    task: Task[..., Any] | None = None,
    *,
    attempt: int = 1,
    id: str = "",  # noqa: A002  the name of the field
    queue: str = "default",
    worker: str = "test",
    sections: Mapping[str, int] | None = None,
) -> Generator[CurrentJob, None, None]:
    """Let the code in the block run as a job: `current_job()` and the `self` of bound tasks have these values.

    Args:
        task: The task of the job; only its name is used.
        attempt: Which attempt it is, from 1.
        id: The job's id; a new one by default.
        sections: How often each `retry` section was tried again before, by name.
    """
    job = CurrentJob(id or new_id(), task.name if task else "", queue, attempt, worker, sections)
    token = CURRENT_JOB.set(job)
    try:
        yield job
    finally:
        CURRENT_JOB.reset(token)


@contextmanager
def running_worker(app: App, *, broker: str = "", queues: tuple[str, ...] = ()) -> Generator[str, None, None]:
    """Run a worker for `app` in a thread while the block lasts, with a Router and a Scheduler where it needs them.

    Yields the broker's URL: `broker`, or else a private server that ends with the block. `CELERY5_BROKER` is
    ignored, so that no test uses a production server. At the end running jobs have the application's `grace_period` to
    end, and the application's keys are removed from the broker. Raises Misconfigured, and ServerNotFound where there
    is no server to start.
    """
    with _serving(app, broker, queues) as url:
        yield url


@contextmanager
def _serving(
    app: App, broker: str, queues: tuple[str, ...], *, with_schedules: bool | None = None
) -> Generator[str, None, None]:
    """Do what `running_worker` does. `with_schedules`: whether there is a Scheduler; None: where one is needed."""
    if app.brokers.is_multi_broker:
        raise Misconfigured("running_worker works with one broker, and this application has several")
    serve = partial(run_in_background, app, ServeOptions(queues=queues), with_schedules=with_schedules)
    previous_url = app.settings.broker
    with _provide_server(broker) as url:
        check = app.guard_broker(None)  # running_worker may use the settings' broker
        app.use_broker(url)
        try:
            app.load()
            with in_thread(serve, "worker"):
                yield url
            _erase(app)
        finally:
            app.guard_broker(check)
            app.use_broker(previous_url)


@contextmanager
def virtual_time(
    app: App, *, broker: str = "", queues: tuple[str, ...] = (), start_time: float | None = None
) -> Generator[VirtualClock, None, None]:
    """Run a worker for `app` as `running_worker` does, and let its time stand still until the test lets it pass.

    Yields the clock: after `clock.advance(86400)` a day has passed for scheduled jobs, retries, `expires`, schedules,
    results, and for workflows: their sleeps, waits and deadlines. It takes milliseconds. Jobs run in real time.

    Args:
        broker: The URL of a server that nobody else uses; by default a private one.
        queues: The queues that the worker reads; by default all of the application.
        start_time: Where the clock starts, in seconds since 1970; by default at the present.

    Raises:
        Misconfigured: Virtual time is in force in this process already, or as `running_worker`.
        ValueError: `start_time` is no number of seconds.
        ServerNotFound: There is no server to start.
    """
    with (
        _provide_server(broker) as url,
        set_clock(app, url, start_time) as clock,
        _serving(app, url, queues, with_schedules=True),
    ):
        yield clock


def replaced(resource: Resource | Callable[..., Any], value: object) -> AbstractContextManager[None]:
    """Have jobs in this process get `value` in place of a resource, while the block lasts.

    Args:
        resource: The resource, or what opens it. It is not opened.
        value: What jobs get, for example a stand-in for a client.
    """
    return replace_resource(resource.open if isinstance(resource, Resource) else resource, value)


@asynccontextmanager
async def arunning_steps(app: App) -> AsyncGenerator[Mapping[str, Any], None]:
    """Bring up the boot steps and services of `app` in this Trio run, without a worker, while the block lasts.

    Yields the value of each mandatory step, by the step's name. Built-in steps that they require count as up.
    Raises the same errors as a worker: BootStepFailed, Misconfigured.
    """
    values: dict[str, Any] = {}
    log, step_status = Log(worker="test", app=app.name), StepStatus()
    commands = ImmediateCommands(
        commands=CommandRegistry(handlers=handle(RETRY_BOOT_STEP, step_status.handle_command))
    )
    own_steps = select_steps(app.bootsteps, "worker")
    own_names = {step.name for step in own_steps}
    built_in_names = {name for step in own_steps for name in step.requires} - own_names | {EXECUTION_STEP}
    asyncio_runner = AsyncioRunner()
    boot = BootGraph(
        steps=[
            BootStep("asyncio", asyncio_runner),
            *(BootStep(name, _IdleStep()) for name in sorted(built_in_names - {"asyncio"})),
        ],
        added=[*own_steps, _make_collector(app, values)],
        offered=make_injectable_values(app, "test", commands, asyncio_runner),
        step_status=step_status,
        self_commands=commands,
        log=log,
        circuit_breakers=CircuitBreakers(tasks=app.tasks, log=log),
    )
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(boot.run)
            yield values
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise unwrap(group) from None
    finally:
        log.finish()


@contextmanager
def running_steps(app: App) -> Generator[Mapping[str, Any], None, None]:
    """`arunning_steps` for plain Python: the steps run in a thread. What belongs to their event loop stays there."""
    with in_thread(lambda: arunning_steps(app), "boot steps") as values:
        yield values


class _IdleStep:
    """Stands in for a built-in step: it is up at once and does nothing."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await trio.sleep_forever()


def _make_collector(app: App, collected: dict[str, Any]) -> BootStep:
    """Return a step that requires all mandatory ones of the application, and stores their values in `collected`."""
    names = [
        step.name
        for step in select_steps(app.bootsteps, "worker")
        if not step.optional and EXECUTION_STEP not in step.requires
    ]

    async def collect(**values: Any) -> None:
        collected.update({name: values[name.replace("-", "_")] for name in names})

    parameters = [Parameter(name.replace("-", "_"), Parameter.KEYWORD_ONLY) for name in names]
    vars(collect)["__signature__"] = Signature(parameters)
    return BootStep("celery5-testing", collect, requires=names)


@contextmanager
def _provide_server(broker: str) -> Generator[str, None, None]:
    if broker:
        yield broker
        return
    with EmbeddedServer.start() as server:
        yield server.url


def _erase(app: App) -> None:
    """Remove the application's keys from the broker. Results expire by themselves."""
    queues = [app.queue(name) for name in app.perform(queue_calls.list_queues(app.keys))]
    run_blocking(erase_streams(app, BlockingDriverAdapter(app.connections.get_blocking_driver())))
    for call in erase_app(app.keys, queues):
        app.perform(call)
