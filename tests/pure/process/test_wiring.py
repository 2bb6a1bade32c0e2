"""Wiring: the injector gives every part what its constructor asks for, by name and by type.

A type checker cannot see through an injector. So the calls that it makes are written out in full here, one function for
each kind of process, and mypy checks those.
"""

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from celery5 import App
from celery5.boot_step import BootStep
from celery5.bootsteps.boot import BootGraph
from celery5.config.settings import Settings
from celery5.processes import foreground, router, scheduler, worker
from celery5.processes.controller import ControllerParts, ControllerValues
from celery5.processes.lifecycle.incarnations import PROCESS_EVENTS
from celery5.processes.process_parts import ProcessValues
from celery5.processes.publisher import PublisherParts, PublisherValues
from celery5.processes.router import RouterParts, RouterValues
from celery5.processes.scheduler import SchedulerParts, SchedulerValues
from celery5.processes.worker_parts import WorkerParts, WorkerValues
from celery5.wiring import StepsMaker, build, list_parts, part, step, steps, steps_of

ROOT = Path(__file__).parents[3]
PROCESSES: dict[type, tuple[type[msgspec.Struct], ...]] = {
    WorkerParts: (ProcessValues, WorkerValues),
    SchedulerParts: (ProcessValues, SchedulerValues),
    RouterParts: (ProcessValues, RouterValues),
    ControllerParts: (ProcessValues, ControllerValues),
    PublisherParts: (ProcessValues, PublisherValues),
}
"""The parts of each kind of process, and the values that it is built with."""

every_process = pytest.mark.parametrize("parts", PROCESSES, ids=lambda parts: parts.__name__)


class Calls:
    """The calls that build one process, written out in the order of the injector."""

    def __init__(self, parts: type) -> None:
        self.parts = {"steps": steps_of(parts), **list_parts(parts)}
        self.values = {name: owner.__name__ for owner in PROCESSES[parts] for name in owner.__struct_fields__}
        self.settings = set(Settings.__struct_fields__) - self.values.keys() - self.parts.keys()
        """The settings that a part may ask for: parts and values of the same names win."""
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.overridden: list[str] = []
        """Parameters with a default of their own for which a setting happens to have the same name."""
        self.imports: set[str] = set()
        self.lines: list[str] = []
        self.call("root", BootGraph)

    def call(self, name: str, function: Callable[..., Any]) -> None:
        arguments = [
            f"{parameter}={self.provide(parameter)}" for parameter in self.list_parameters(name, function)
        ]
        if isinstance(
            function, StepsMaker
        ):  # that each is a service is checked where it is declared as a step
            self.imports.add(BootStep.__module__)
            self.lines.append(f"{name}: tuple[{BootStep.__module__}.BootStep, ...] = ()")
            return
        self.imports.add(function.__module__)
        self.lines.append(f"{name} = {function.__module__}.{function.__qualname__}({', '.join(arguments)})")

    def list_parameters(self, name: str, function: Callable[..., Any]) -> Iterator[str]:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in self.parts or parameter.name in self.values:
                yield parameter.name
            elif parameter.name in self.settings:
                yield parameter.name
                if parameter.default is not parameter.empty:
                    self.overridden.append(f"{name}: {parameter.name}")
            elif parameter.default is parameter.empty:
                self.missing.append(f"{name}: {parameter.name}")

    def provide(self, name: str) -> str:
        """The expression for a part, which is built before, or a value. A value wins, as in the injector."""
        first = name not in self.used
        self.used.add(name)
        if name in self.values:
            return f"{self.values[name]}_.{name}"
        if name in self.settings:
            return f"ProcessValues_.settings.{name}"
        if first:
            self.call(name, self.parts[name].make)
        return name


@every_process
def test_every_parameter_of_every_part_is_provided(parts: type) -> None:
    assert Calls(parts).missing == []


@every_process
def test_no_setting_takes_the_place_of_a_default_by_its_name(parts: type) -> None:
    assert Calls(parts).overridden == []


@every_process
def test_every_value_and_every_part_is_used(parts: type) -> None:
    calls = Calls(parts)
    # Of what all kinds of processes share, some need not use everything.
    shared = set(ProcessValues.__struct_fields__) | {
        name for owner in parts.__mro__[1:] for name in vars(owner)
    }
    assert calls.values.keys() - calls.used - shared == set()
    assert vars(parts).keys() & calls.parts.keys() - calls.used == set()


@pytest.mark.timeout(180)
def test_every_part_and_value_has_the_type_that_is_asked_for(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed here")
    every = {parts: Calls(parts) for parts in PROCESSES}
    modules = {module for calls in every.values() for module in calls.imports}
    modules |= {owner.__module__ for owners in PROCESSES.values() for owner in owners}
    text = "".join(f"import {module}\n" for module in sorted(modules))
    for parts, calls in every.items():
        owners = ", ".join(
            f"{owner.__name__}_: {owner.__module__}.{owner.__name__}" for owner in PROCESSES[parts]
        )
        text += f"\n\ndef build_{parts.__name__}({owners}) -> None:\n"
        text += "".join(f"    {line}\n" for line in calls.lines)
    page = tmp_path / "wired.py"
    page.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(page)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.stdout.startswith("Success"), done.stdout + done.stderr


class _Idle:
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()


def _make_two() -> dict[str, _Idle]:
    return {"a": _Idle(), "b": _Idle()}


class _Parts:
    stop_after = part(lambda: 7.0)
    redis = step(_Idle)
    stores = steps(_make_two, name="store", after=(redis,))
    publishers = steps(_make_two, name="publisher", after=(stores,), stop_limit=stop_after)
    log_again = step(_Idle, after=(publishers,))


class _FewerParts(_Parts):
    redis = step(_Idle, stop_limit=1.0)


class _Root:
    def __init__(self, *, steps: Sequence[BootStep]) -> None:
        self.steps = steps


def test_a_step_after_a_mapping_requires_all_its_services_or_that_of_its_key() -> None:
    built = build(_Root, _Parts).steps
    assert {step.name: (step.requires, step.stop_limit) for step in built} == {
        "redis": ((), 30.0),
        "store-a": (("redis",), 30.0),
        "store-b": (("redis",), 30.0),
        "publisher-a": (("store-a",), 7.0),
        "publisher-b": (("store-b",), 7.0),
        "log-again": (("publisher-a", "publisher-b"), 30.0),
    }


def test_a_process_runs_no_steps_that_its_class_inherits() -> None:
    assert [(step.name, step.stop_limit) for step in build(_Root, _FewerParts).steps] == [("redis", 1.0)]


class _Values(msgspec.Struct):
    settings: Settings
    lease: str


class _Settled:
    def __init__(self, *, steps: Sequence[BootStep], results_ttl: float, lease: str, keys: int) -> None:
        self.found = results_ttl, lease, keys


class _PartsWithKeys:
    keys = part(lambda: 5)


def test_a_part_gets_a_setting_by_name_where_no_part_or_value_has_it() -> None:
    values = _Values(Settings(results_ttl=70.0, lease=9.0), lease="of the worker")
    assert build(_Settled, _PartsWithKeys, values).found == (70.0, "of the worker", 5)


class _Descriptor:
    """Has `__get__`, as `functools.partial` has from CPython 3.14 on."""

    def __get__(self, instance: object, owner: type | None = None) -> "_Descriptor":
        return self


class _Holder:
    def __init__(self, *, name: object, queue: object) -> None:
        self.found = (name, queue)


class _NoParts: ...


def test_values_that_are_descriptors_are_given_as_they_are() -> None:
    name, queue = _Descriptor(), _Descriptor()

    class Described(msgspec.Struct):
        name: object

    assert build(_Holder, _NoParts, Described(name), queue=queue).found == (name, queue)


def test_two_values_of_one_name_are_refused() -> None:
    nothing: dict[str, Any] = dict.fromkeys(ControllerValues.__struct_fields__)
    values = ControllerValues(**nothing)
    with pytest.raises(TypeError, match="two values are named"):
        build(BootGraph, ControllerParts, values, values)


def test_an_application_is_checked_for_each_process_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    for page in (worker, router, scheduler):
        monkeypatch.setattr(page, "check", lambda _app, name=page.__name__: checked.append(name))
    monkeypatch.setattr(router, "is_needed", lambda _app: True)
    foreground.check(App("shop", broker="redis://127.0.0.1:1/0"))
    assert checked == [worker.__name__, router.__name__]


def test_the_log_events_of_a_process_begin_with_its_kind() -> None:
    for kind, events in PROCESS_EVENTS.items():
        assert set(msgspec.structs.astuple(events)) == {
            f"{kind}:started",
            f"{kind}:reload-started",
            f"{kind}:restarted",
            f"{kind}:stopped",
        }
