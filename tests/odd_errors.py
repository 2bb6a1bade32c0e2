"""Odd errors: their classes have redefined what Python and Trio ask an error for, or going into them has no end."""

from collections.abc import Callable
from typing import Any

import trio


class Hostile(type):
    """The class of a class that raises when it is asked for its name."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__", "__mro__"):
            raise KeyboardInterrupt(name)
        return super().__getattribute__(name)


class Lying(type):
    """The class of a class that answers with something else."""

    def __getattribute__(cls, name: str) -> Any:
        answers = {"__name__": 5, "__qualname__": None, "__module__": None, "__mro__": 7}
        return answers[name] if name in answers else super().__getattribute__(name)


class NoName(Exception, metaclass=Hostile):
    """Its class has no name."""


class NoNameAtAll(BaseException, metaclass=Hostile):
    """The same, and it is no Exception."""


class OtherName(Exception, metaclass=Lying):
    """The name of its class is no text."""


class OtherModule(Exception):
    """The module of its class is no text."""

    __module__: Any = 5


class NoText(Exception):
    """It has no text."""

    def __str__(self) -> str:
        raise KeyboardInterrupt("text")

    __repr__ = __str__


class NoNameNoText(NoText, metaclass=Hostile):
    """It has neither."""


class NoClass(Exception):
    """It raises when `isinstance` looks at it."""

    @property
    def __class__(self) -> Any:
        raise KeyboardInterrupt("class")

    @__class__.setter
    def __class__(self, _value: Any) -> None: ...


class OtherClass(Exception):
    """It says that it is a cancellation."""

    @property
    def __class__(self) -> Any:
        return trio.Cancelled

    @__class__.setter
    def __class__(self, _value: Any) -> None: ...


class NoAttributes(Exception):
    """It raises whatever it is asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt(name)


class Surrogate(Exception):
    """Its text has no bytes."""

    def __str__(self) -> str:
        return "half of a pair: \udc80"

    __repr__ = __str__


class NoMembers(ExceptionGroup[Exception]):
    """A group that raises when it is asked for its members."""

    @property
    def exceptions(self) -> Any:
        raise KeyboardInterrupt("members")


class HostileList(list[str]):
    """A list that nobody can go through."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt("notes")


def nest_deeply() -> BaseException:
    """Return a group in a group in a group, and so on."""
    error: Exception = ValueError("innermost")
    for _ in range(5000):
        error = ExceptionGroup("outer", [error])
    return error


def add_hostile_notes() -> BaseException:
    """Return an error whose notes raise."""
    error = ValueError("noted")
    error.__notes__ = HostileList(["one"])
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "no name": NoName,
    "no name at all": NoNameAtAll,
    "another name": OtherName,
    "another module": OtherModule,
    "no text": NoText,
    "no name, no text": NoNameNoText,
    "no class": NoClass,
    "another class": OtherClass,
    "no attributes": NoAttributes,
    "surrogate": Surrogate,
    "no members": lambda: NoMembers("group", [ValueError("one")]),
    "deep group": nest_deeply,
    "hostile notes": add_hostile_notes,
}
"""Makers of them, by what is odd."""
