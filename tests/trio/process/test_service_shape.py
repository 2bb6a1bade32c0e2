"""Service shape: every service starts, is cancelled at once, starts again, and leaves no task behind.

The services are found by looking: a new one is tried here before anybody remembers to write a test for it.
"""

import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace
from trio.testing import wait_all_tasks_blocked

import celery5.bootsteps
import celery5.runners
import celery5.services
from celery5 import App, source
from celery5.boot_step import BootStep
from celery5.bootsteps.boot import BootGraph, Service, Step, sort_steps
from celery5.bootsteps.own_steps import StepCode
from celery5.bootsteps.supervised import SupervisedStep
from celery5.logs.log import Log
from celery5.processes import controller, publisher, router, scheduler, worker
from celery5.processes.controller import ClusterOptions, ControllerParts
from celery5.processes.options import ProcessOptions
from celery5.processes.process_parts import Incarnation, ProcessValues, make_process_values
from celery5.processes.publisher import PublisherParts, StoreCache
from celery5.processes.router import RouterParts
from celery5.processes.scheduler import SchedulerParts
from celery5.processes.worker import WorkerOptions
from celery5.processes.worker_parts import WorkerParts
from celery5.protocol.cluster.description import Cluster
from celery5.services.bulk.bulk_performer import BulkPerformer
from celery5.services.commands.dispatcher import CommandRegistry, ImmediateCommands
from celery5.services.controller.broker_supervisor import BrokerSupervisor
from celery5.services.health.status_port import StatusPort
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.reloader import NextIncarnation
from celery5.services.process.step_status import StepStatus
from celery5.services.scheduling.declarations import RemoteBrokerSchedules
from celery5.services.streams.outbox_relay import OutboxRelay
from celery5.services.streams.processor_group import ProcessorGroup
from celery5.services.streams.stream_processors import StreamProcessors
from celery5.streams import StreamEvents
from celery5.wiring import build

NO_SERVICES = ("celery5.runners.boxes.box_process", "celery5.services.controller.systemd_bus")
"""Modules of what has a `run` and is no step of a process: a box, a connection that a platform opens."""


def living() -> list[type]:
    """Every class with `run(self, *, task_status)` in the services, the boot steps and the runners."""
    found = []
    for room in (celery5.services, celery5.bootsteps, celery5.runners):
        for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
            if module.name in NO_SERVICES:
                continue
            for thing in vars(importlib.import_module(module.name)).values():
                ours = inspect.isclass(thing) and thing.__module__ == module.name
                run = getattr(thing, "run", None) if ours else None
                protocol = getattr(thing, "_is_protocol", False)
                if run and not protocol and not thing.__name__.startswith("_"):
                    assert "task_status" in inspect.signature(run).parameters, thing
                    found.append(thing)
    return sorted(set(found), key=lambda service: service.__name__)


def test_the_services_are_found() -> None:
    names = {service.__name__ for service in living()}
    assert {"Consumer", "TaskExecution", "ResultPublisher", "Heartbeat", "Mover", "Recoverer"} <= names
    assert {"QueueMembership", "LentConnection", "AsyncioRunner", "BootGraph"} <= names


class Parts:
    """A worker's steps."""

    def __init__(self, *, steps: tuple[Step, ...]) -> None:
        self.steps = steps


def steps_with(service: type, app: App, log: Log) -> tuple[Step, ...]:
    """The steps of the first kind of process that has the service; a worker's, if none has."""
    incarnation = Incarnation("w", log, trio.Event(), NextIncarnation())
    options = ProcessOptions()
    cluster = replace(controller.make_cluster_values(app, ClusterOptions("")), cluster=Cluster())

    def shared(kind: str) -> ProcessValues:
        return make_process_values(app, options, incarnation, kind=kind)

    kinds: list[tuple[type, Callable[[], Sequence[msgspec.Struct]]]] = [
        (WorkerParts, lambda: worker.make_incarnation_values(app, WorkerOptions(), incarnation)),
        (SchedulerParts, lambda: (shared("scheduler"), scheduler.make_values(app))),
        (RouterParts, lambda: router.make_values(app, options, incarnation)),
        (ControllerParts, lambda: (shared("controller"), cluster)),
        (PublisherParts, lambda: (shared("publisher"), publisher.make_values(app, StoreCache()))),
    ]
    found: list[tuple[Step, ...]] = []
    for parts, make_values in kinds:
        found.append(build(Parts, parts, *make_values()).steps)
        if any(type(step.run) is service for step in found[-1]):
            return found[-1]
    return found[0]


def in_its_place(service: type, app: App) -> tuple[Service, list[Service]]:
    """The service as a worker has it, and all that must be up before it, in order."""
    log = Log(worker="w", app=app.name)
    steps = steps_with(service, app, log)
    if service is BootGraph:
        return BootGraph(steps=steps), []
    if service in (StepCode, SupervisedStep):
        return of_an_application(service, log), []
    if service is StatusPort:  # it outlives all that a boot graph brings up
        return StatusPort(process_status=ProcessStatus(), log=log, port=0, host="127.0.0.1"), []
    if service is BulkPerformer:  # the dashboard runs it in a thread
        return BulkPerformer(app=app, worker="w", log=log), []
    if service is BrokerSupervisor:  # and it, too
        return BrokerSupervisor(server=Served(), hung_after=60, log=log), []
    wired = StreamProcessors if service in PARTS_OF_A_PROCESSOR else service
    one = next((step for step in steps if type(step.run) is wired), None)
    assert one is not None, (
        f"{service.__name__} is no step of any process: wire it, or try it here in another way"
    )
    needed = set(one.requires)
    for step in reversed(sort_steps(steps)):
        if step.name in needed:
            needed.update(step.requires)
    runs: Service = one.run if wired is service else of_a_processor(service, one.run)
    return runs, [step.run for step in sort_steps(steps) if step.name in needed]


PARTS_OF_A_PROCESSOR = (OutboxRelay, ProcessorGroup)
"""What runs within `StreamProcessors`, which is the step."""


def of_a_processor(service: type, processors: object) -> Service:
    """Return the group of the one processor, or what runs within that."""
    assert isinstance(processors, StreamProcessors)
    (group,) = processors._groups.values()
    parts: dict[type, Service] = {
        ProcessorGroup: group,
        OutboxRelay: group._relay,
    }
    return parts[service]


class Served:
    """A server that is there."""

    pid = 1
    is_running = True

    def start(self, _given_up: Callable[[], bool], /) -> bool:
        """It runs."""
        return True

    def is_responding(self) -> bool:
        """It does."""
        return True

    def kill(self) -> None:
        """Nobody asks for that."""


class Nowhere:
    """A Data Sink."""

    name = "nowhere"

    def write(self, _documents: object) -> None:
        """Take anything."""


class Lodger:
    """A service of an application."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Stay."""
        task_status.started()
        await trio.sleep_forever()


def of_an_application(what: type, log: Log) -> Service:
    """What runs an application's service, and what looks after it."""
    step, working = BootStep("lodger", Lodger), trio.Event()
    if what is StepCode:
        return StepCode(step=step, offered={})
    posts = ImmediateCommands(commands=CommandRegistry(handlers={}))
    return SupervisedStep(
        step=step, offered={}, step_status=StepStatus(), self_commands=posts, log=log, working=working
    )


def declare_processor(app: App) -> None:
    """Declare a processor of a stream."""

    @app.processor(app.stream("orders", dict, partitions=2))
    async def read(events: StreamEvents[Any]) -> None:
        async for _ in events.records():
            pass


@pytest.mark.parametrize("service", living(), ids=lambda service: service.__name__)
async def test_a_service_starts_is_cancelled_at_once_and_starts_again(
    service: type, url: str, app_name: str, short_path: Path
) -> None:
    app = App(app_name, broker=url, lease=1.0)
    app.configure(publisher_socket=str(short_path / "p.sock"), publisher_backlog=f"{short_path}/")

    @source(single=True)
    async def feed(_emit: object) -> None:
        await trio.sleep_forever()

    @app.task(sinks=[Nowhere()], source=feed)
    async def nothing(_document: object = None) -> None:
        pass

    if service in (StreamProcessors, *PARTS_OF_A_PROCESSOR):
        declare_processor(app)
    further = {"further": url} if service is RemoteBrokerSchedules else {}
    one, needs = in_its_place(
        service, App(app_name, broker=url, brokers=further, lease=1.0) if further else app
    )
    threads = {thread.ident for thread in threading.enumerate()}
    async with trio.open_nursery() as around:
        for needed in needs:
            await around.start(needed.run)
        if service is RemoteBrokerSchedules:
            await app.connections.get_async_driver()  # which lasts as long as the Trio run
        await wait_all_tasks_blocked(0.01)
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(3):
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(partial(one.run, task_status=trio.TASK_STATUS_IGNORED))
                    nursery.cancel_scope.cancel()
                async with trio.open_nursery() as nursery:
                    await nursery.start(one.run)
                    nursery.cancel_scope.cancel()
                async with trio.open_nursery() as nursery:
                    await nursery.start(one.run)
                    await wait_all_tasks_blocked(0.01)
                    nursery.cancel_scope.cancel()
            with trio.fail_after(30):  # those of the others come and go
                while trio.lowlevel.current_statistics().tasks_living > tasks:
                    await trio.sleep(0.01)
        around.cancel_scope.cancel()
    with trio.fail_after(30):
        while ours(threads):
            await trio.sleep(0.01)


def ours(before: set[int | None]) -> list[str]:
    """Threads of celery5 that were not there before. Trio keeps its own for later."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in before and thread.name.startswith("celery5")
    ]
