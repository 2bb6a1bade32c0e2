"""See toys, and wind them up."""

from typing import Annotated

import msgspec
from msgspec import Meta

from celery5.app import App
from celery5.operations.operation import Changed, Effect, Operation
from celery5.operations.parameters import Nothing, Text, about


class Toy(msgspec.Struct, frozen=True):
    """A toy."""

    toy: str
    turns: int
    colour: str


async def list_toys(app: App, _: Nothing) -> list[Toy]:
    """Show all toys."""
    return [Toy("mouse", 3, "grey")]


class Winding(msgspec.Struct, frozen=True):
    """A toy to wind up."""

    toy: Annotated[Text, about("The toy.")]
    turns: Annotated[int, Meta(ge=1), about("How often its key is turned.")] = 3


async def wind(app: App, asked: Winding) -> Changed:
    """Wind up a toy."""
    return Changed(summary=f"{asked.toy} is wound up", count=1)


TOY_OPERATIONS = (
    Operation("toy:list", list_toys),
    Operation("toy:wind", wind, Effect.CONTROL),
)
"""The operations on toys."""
