"""Strategies: from what the settings `autoscale` and `prioritise` say to the functions that decide."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from celery5.config.settings import Settings
from celery5.errors import Misconfigured
from celery5.protocol.scaling.autoscale import Autoscale, parse_autoscale
from celery5.protocol.scaling.prioritisation import PrioritisationStrategy, parse_strategy


def is_scaled(settings: Settings) -> bool:
    """Whether an application wants either: then its workers report how they do, and a Scheduler decides."""
    return bool(settings.autoscale or settings.prioritise)


def get_autoscale(settings: Settings) -> Autoscale | None:
    """How the application is scaled; None when it is not. Raises Misconfigured."""
    return parse_autoscale(settings.autoscale, load_function)


def get_prioritisation(settings: Settings) -> PrioritisationStrategy | None:
    """Which tasks are preferred, as a strategy; None when none is. Raises Misconfigured."""
    return parse_strategy(settings.prioritise, load_function)


def load_function(said: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises Misconfigured."""
    module, _, name = said.partition(":")
    try:
        found: object = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # the user's module
        raise Misconfigured(f"strategy {said!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found) or isinstance(found, type):
        raise Misconfigured(
            f"strategy {said!r} is {found!r}: name a function, or an object that can be called"
        )
    return found
