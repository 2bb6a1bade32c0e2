"""Declare the workflow of an order, its tasks, and the event for which it waits."""

from dataclasses import dataclass

from celery5 import Event, Reject
from celery5.examples.order_workflow import app, ledger
from celery5.workflows import Flow

DAY = 86_400.0
"""Seconds."""


@app.event
class Decision(Event):
    """Somebody has approved an order, or refused it."""

    order: int
    is_approved: bool
    by: str


@dataclass
class Item:
    """One piece of an order."""

    order: int
    name: str


@dataclass
class Reservation:
    """What the warehouse keeps for an order."""

    order: int
    items: list[Item]


@dataclass
class Payment:
    """What the customer has paid for an order."""

    order: int
    cents: int


@app.task
def release(reservation: Reservation) -> None:
    """Undo `reserve`: it takes what that has returned."""
    ledger.write(reservation.order, "released")


@app.task(undo=release)
def reserve(order: int, items: list[str]) -> Reservation:
    """Have the warehouse keep the items."""
    ledger.write(order, "reserved", ", ".join(items))
    return Reservation(order, [Item(order, name) for name in items])


@app.task
def refund(payment: Payment) -> None:
    """Undo `charge`."""
    ledger.write(payment.order, "refunded", str(payment.cents))


@app.task(undo=refund)
def charge(reservation: Reservation) -> Payment:
    """Charge the customer."""
    cents = 990 * len(reservation.items)
    ledger.write(reservation.order, "charged", str(cents))
    return Payment(reservation.order, cents)


@app.task
async def follow(decision: Decision) -> str:
    """Go on with an order that is approved. `Reject` fails the workflow: what was done is undone."""
    if not decision.is_approved:
        raise Reject(f"order {decision.order} is refused by {decision.by}")
    return decision.by


@app.task
def pack(item: Item) -> str:
    """Pack one item."""
    ledger.write(item.order, "packed", item.name)
    return f"a box with a {item.name}"


@app.task
def ship(order: int, boxes: list[str], approved_by: str) -> str:
    """Give the boxes to the carrier."""
    ledger.write(order, "shipped", approved_by)
    return f"order {order}: {', '.join(boxes)}, approved by {approved_by}"


@app.workflow(deadline=7 * DAY)
def order(flow: Flow, number: int, items: list[str]) -> str:
    """Reserve, charge, wait for a decision of a person, pack and ship."""
    reservation = flow.call(reserve, number, items)
    flow.call(charge, reservation)
    decision = flow.wait_for(Decision, where={"order": number}, timeout=3 * DAY)
    approved_by = flow.call(follow, decision)
    boxes = flow.map(pack, reservation.items)
    return flow.call(ship, number, boxes, approved_by)
