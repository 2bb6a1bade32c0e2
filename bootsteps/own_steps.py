"""Run the code of an application's boot step or service: make it, pass the values it asks for, and undo it.

A constructor or a function asks for values by the names of its parameters, as celery5's own services do.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import trio

from celery5.boot_step import BootStep
from celery5.errors import Misconfigured
from celery5.protocol.masking import describe_error
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.surrounding import surround_call
from celery5.runners.user_errors import call_in_thread, reraise_cancellation

ProvidedValues = MutableMapping[str, Any]
"""The values that code may ask for by name. Values of steps are added under their names, with _ for -."""

ASYNCIO_RUNNER = "asyncio runner"
"""Where these values have what runs code on asyncio. It is no name of a parameter, so that no code can ask for it."""

_PASSED_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class StepCode:
    """The code of one step. It may be run several times, and is made again each time."""

    def __init__(self, *, step: BootStep, offered: ProvidedValues) -> None:
        self._step = step
        self._offered = offered

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the code until it ends, or until cancelled when there is something to undo.

        `started()` gets its value: the result of a function, else the object that was made.
        """
        step, values = self._step, self._collect_values()
        target: Any = _load(step, step.run)
        if inspect.isclass(target):
            class_: Any = target
            target = class_(**_select_arguments(class_, values))
        undo = _load(step, step.undo) or getattr(target, "undo", None)
        up = _Up(target, task_status)
        try:
            await self._run_body(getattr(target, "run", target), values, up)
            if not up.is_up:  # code that has ended counts as up
                up.started()
            if undo is not None:
                await trio.sleep_forever()
        finally:
            if undo is not None and up.is_up:
                with trio.move_on_after(step.stop_limit, shield=True):
                    await self._call(undo, values | {_get_parameter_name(step.name): up.value})

    async def _run_body(self, body: Callable[..., Any], values: dict[str, Any], up: "_Up") -> None:
        if "task_status" in inspect.signature(body).parameters:
            await self._call(body, values | {"task_status": up})
        elif self._step.stays:
            up.started()
            await self._call(body, values)
        else:
            value = await self._call(body, values)
            up.started(value)

    async def _call(self, code: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """Call code where it belongs: on Trio, on asyncio or in a thread."""
        if self._step.loop == "asyncio" and _is_async(code):
            runner: AsyncioRunner = self._offered[ASYNCIO_RUNNER]
            return await runner.call(partial(code, **_select_arguments(code, values)))
        return await _call(code, values)

    def _collect_values(self) -> dict[str, Any]:
        logger = logging.getLogger(
            f"{getattr(self._offered.get('app'), 'name', 'celery5')}.{self._step.name}"
        )
        return {**self._offered, "logger": logger}


class _Up(trio.TaskStatus[Any]):
    """Notes that the code is up, and passes on its value: that of `started()`, else the object itself."""

    def __init__(self, target: object, status: trio.TaskStatus[Any]) -> None:
        self.value = None if inspect.isroutine(target) else target
        self.is_up = False
        self._status = status

    def started(self, value: Any = None) -> None:
        self.value = self.value if value is None else value
        self._status.started(self.value)
        self.is_up = True


def check_step(step: BootStep, offered: Mapping[str, Any], names: set[str]) -> None:
    """Raise Misconfigured when a step's code cannot be found, or asks for a value that does not exist.

    Args:
        step: The step to check.
        offered: The values that every step may ask for.
        names: The steps of the application; a step may ask for the values of those that it requires.
    """
    target = _load(step, step.run)
    available = {
        *filter(str.isidentifier, offered),
        "logger",
        *(_get_parameter_name(name) for name in step.requires if name in names),
    }
    body = getattr(target, "run", None) if inspect.isclass(target) or hasattr(target, "run") else target
    if not callable(body):
        raise Misconfigured(f"boot step {step.name!r}: {target!r} has no run(): give it one, or a function")
    callables: list[tuple[Any, set[str]]] = [(target, available)] if inspect.isclass(target) else []
    callables.append((partial(body, None) if inspect.isclass(target) else body, available | {"task_status"}))
    undo = _load(step, step.undo) or getattr(target, "undo", None)
    if undo is not None:
        method = inspect.isclass(target) and step.undo is None
        callables.append(
            (partial(undo, None) if method else undo, available | {_get_parameter_name(step.name)})
        )
    if step.loop == "asyncio" and "task_status" in _list_parameters(body):
        raise Misconfigured(
            f"boot step {step.name!r}: task_status is Trio's, and this runs on asyncio: "
            "leave it out, and return the value that task_status.started() would take, or give the step loop='trio'"
        )
    for callable_, allowed in callables:
        for name, parameter in _list_parameters(callable_).items():
            if name not in allowed and parameter.default is parameter.empty:
                needed = (
                    f"; does it require a step {name!r}?" if name in map(_get_parameter_name, names) else ""
                )
                raise Misconfigured(
                    f"boot step {step.name!r} asks for {name!r}, which is not there; "
                    f"there are: {', '.join(sorted(available))}{needed}"
                )


def _load(step: BootStep, reference: Any) -> Any:
    """Return a function, class or object of the step, imported by its name. Raises Misconfigured."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    try:
        loaded = import_module(module)
    except BaseException as error:
        reraise_cancellation(error)
        why = describe_error(error)
        raise Misconfigured(f"boot step {step.name!r}: {module} cannot be imported: {why}") from error
    try:
        return attrgetter(name)(loaded)
    except AttributeError:
        raise Misconfigured(f"boot step {step.name!r}: there is no {name!r} in {module}") from None


async def _call(code: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call code with the values it asks for. Blocking code runs in a thread, which is abandoned when cancelled."""
    call = partial(code, **_select_arguments(code, values))
    if _is_async(code):
        return await call()
    return await call_in_thread(surround_call(call, "thread"))


def _is_async(code: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(type(code).__call__)


def _select_arguments(code: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in _list_parameters(code) if name in values}


def _list_parameters(code: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be passed by name."""
    try:
        loaded = inspect.signature(code).parameters
    except (TypeError, ValueError):  # written in C: it has no signature
        return {}
    return {name: parameter for name, parameter in loaded.items() if parameter.kind in _PASSED_BY_NAME}


def _get_parameter_name(step: str) -> str:
    """Return the name of the parameter that asks for a step's value."""
    return step.replace("-", "_")
