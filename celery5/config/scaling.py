"""Read the settings about scaling, and load the functions that `autoscale` and `prioritise` name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from celery5.config.settings import Settings, count_cores
from celery5.errors import Misconfigured
from celery5.protocol.scaling.autoscale import Autoscale, parse_autoscale
from celery5.protocol.scaling.budget import Budget, automatic_budget, fixed_budget, parse_budgets
from celery5.protocol.scaling.prioritisation import PrioritisationStrategy, parse_strategy


def is_scaled(settings: Settings) -> bool:
    """Return whether either setting is used: then workers report their load, and a Scheduler decides."""
    return bool(settings.autoscale or settings.prioritise)


def get_autoscale(settings: Settings) -> Autoscale | None:
    """Return how the application is scaled; None if it is not. Raises Misconfigured."""
    return parse_autoscale(settings.autoscale, load_function)


def get_prioritisation(settings: Settings) -> PrioritisationStrategy | None:
    """Return the strategy that orders tasks; None if there is none. Raises Misconfigured."""
    return parse_strategy(settings.prioritise, load_function)


def merge_budgets(settings: Settings, own: Mapping[str, Budget]) -> dict[str, Budget]:
    """Return the budgets of all kinds, and of the tasks that have one: those of the application's code, `own`, else of
    the setting `budgets`, else the number of slots from the settings, which changes only for threads, where it is not
    set. Raises Misconfigured."""
    fixed = {
        "trio": fixed_budget(settings.concurrency),
        "asyncio": fixed_budget(settings.concurrency),
        "thread": automatic_budget(count_cores(), settings.concurrency)
        if settings.cpu_slots == "auto"
        else fixed_budget(settings.cpu_slots),
        "boxed": fixed_budget(settings.box_slots),
    }
    return {**fixed, **parse_budgets(settings.budgets), **own}


def load_function(path: str) -> Callable[..., Any]:
    """Return the function that `module:function` names. Raises Misconfigured."""
    module, _, name = path.partition(":")
    try:
        function: object = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # from the user's module
        raise Misconfigured(f"strategy {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(function) or isinstance(function, type):
        raise Misconfigured(
            f"strategy {path!r} is {function!r}: name a function, or an object that can be called"
        )
    return function
