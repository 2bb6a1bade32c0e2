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

ProvidedValues = MutableMapping[str, Any]
"""The values that code may ask for by name. Values of steps are added under their names, with _ for -."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class StepCode:
    """The code of one step. It may be run several times, and is made anew each time."""

    def __init__(self, *, step: BootStep, offered: ProvidedValues) -> None:
        self._step = step
        self._offered = offered

    async def run(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the code until it ends, or until cancelled when there is something to undo.

        `started()` gets its value: the result of a function, else the object that was made.
        """
        step, given = self._step, self._given()
        one: Any = _loaded(step, step.run)
        if inspect.isclass(one):
            made: Any = one
            one = made(**_answers(made, given))
        undo = _loaded(step, step.undo) or getattr(one, "undo", None)
        up = _Up(one, task_status)
        try:
            await self._body(getattr(one, "run", one), given, up)
            if not up.said:  # code that has ended counts as up
                up.started()
            if undo is not None:
                await trio.sleep_forever()
        finally:
            if undo is not None and up.said:
                with trio.move_on_after(step.stop_limit, shield=True):
                    await _called(undo, given | {_key(step.name): up.value})

    async def _body(self, body: Callable[..., Any], given: dict[str, Any], up: "_Up") -> None:
        if "task_status" in inspect.signature(body).parameters:
            await _called(body, given | {"task_status": up})
        elif self._step.stays:
            up.started()
            await _called(body, given)
        else:
            value = await _called(body, given)
            up.started(value)

    def _given(self) -> dict[str, Any]:
        logger = logging.getLogger(
            f"{getattr(self._offered.get('app'), 'name', 'celery5')}.{self._step.name}"
        )
        return {**self._offered, "logger": logger}


class _Up(trio.TaskStatus[Any]):
    """Notes that the code is up, and passes on its value: that of `started()`, else the object itself."""

    def __init__(self, one: object, status: trio.TaskStatus[Any]) -> None:
        self.value = None if inspect.isroutine(one) else one
        self.said = False
        self._status = status

    def started(self, value: Any = None) -> None:
        self.value = self.value if value is None else value
        self._status.started(self.value)
        self.said = True


def check_step(step: BootStep, offered: Mapping[str, Any], names: set[str]) -> None:
    """Raise Misconfigured when a step's code cannot be found, or asks for a value that does not exist.

    Args:
        step: The step to check.
        offered: The values that every step may ask for.
        names: The steps of the application; a step may ask for the values of those that it requires.
    """
    one = _loaded(step, step.run)
    there = {*offered, "logger", *(_key(each) for each in step.requires if each in names)}
    body = getattr(one, "run", None) if inspect.isclass(one) or hasattr(one, "run") else one
    if not callable(body):
        raise Misconfigured(f"boot step {step.name!r}: {one!r} has no run(): give it one, or a function")
    asking: list[tuple[Any, set[str]]] = [(one, there)] if inspect.isclass(one) else []
    asking.append((partial(body, None) if inspect.isclass(one) else body, there | {"task_status"}))
    undo = _loaded(step, step.undo) or getattr(one, "undo", None)
    if undo is not None:
        method = inspect.isclass(one) and step.undo is None
        asking.append((partial(undo, None) if method else undo, there | {_key(step.name)}))
    for thing, known in asking:
        for name, parameter in _asks(thing).items():
            if name not in known and parameter.default is parameter.empty:
                needed = f"; does it require a step {name!r}?" if name in map(_key, names) else ""
                raise Misconfigured(
                    f"boot step {step.name!r} asks for {name!r}, which is not there; "
                    f"there are: {', '.join(sorted(there))}{needed}"
                )


def _loaded(step: BootStep, said: Any) -> Any:
    """Return a function, class or object of the step, imported by its name. Raises Misconfigured."""
    if not isinstance(said, str):
        return said
    module, _, name = said.partition(":")
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:
        why = describe_error(error)
        raise Misconfigured(f"boot step {step.name!r}: {module} cannot be imported: {why}") from error
    try:
        return attrgetter(name)(found)
    except AttributeError:
        raise Misconfigured(f"boot step {step.name!r}: there is no {name!r} in {module}") from None


async def _called(code: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call code with the values it asks for. Blocking code runs in a thread, which is abandoned when cancelled."""
    call = partial(code, **_answers(code, given))
    if inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(type(code).__call__):
        return await call()
    return await trio.to_thread.run_sync(call, abandon_on_cancel=True)


def _answers(code: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _asks(code) if name in given}


def _asks(code: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be passed by name."""
    try:
        found = inspect.signature(code).parameters
    except (TypeError, ValueError):  # written in C: it has no signature
        return {}
    return {name: each for name, each in found.items() if each.kind in _NAMED}


def _key(step: str) -> str:
    """Return the name of the parameter that asks for a step's value."""
    return step.replace("-", "_")
