"""Annotated: functions whose annotations are text, some of which only a type checker can resolve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from somewhere.unknown import Nothing  # type: ignore[import-not-found]


@dataclass
class Order:
    """An order."""

    id: UUID
    lines: list[int]


def known(order: Order, near: UUID | None = None) -> list[Order]:
    """All can be resolved."""
    return [order]


def partly(order: Order, other: Nothing, count: int = 1) -> Nothing:
    """One cannot."""
