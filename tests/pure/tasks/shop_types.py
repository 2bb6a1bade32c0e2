"""Shop types: one class of every kind that a task may take, and tasks' parameters made from annotations."""

import enum
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import attrs
import msgspec
import pydantic

from celery5.protocol.job.arguments import Parameters


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0
    tags: frozenset[str] = field(default_factory=frozenset)


@attrs.frozen
class Address:
    street: str
    since: date


class Line(msgspec.Struct, frozen=True):
    product: UUID
    price: Decimal
    at: Path = Path(".")


class Customer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    id: UUID
    born: date
    mail: str = pydantic.Field(alias="e-mail")


class Pair(NamedTuple):
    a: int
    b: str


class Box(TypedDict):
    wide: int
    label: str


def taking(*annotations: Any, returns: Any = None) -> Parameters:
    """The parameters of a function `t(p0, p1, ...)`."""
    names = [f"p{at}" for at in range(len(annotations))]
    made: dict[str, Any] = {}
    exec(f"def t({', '.join(names)}): ...", made)
    made["t"].__annotations__ = {**dict(zip(names, annotations, strict=True)), "return": returns}
    return Parameters("shop.t", made["t"])


def there_and_back(parameters: Parameters, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Encode, send, decode."""
    values, named = parameters.decode(*parameters.encode(args, kwargs))
    return list(values), dict(named)
