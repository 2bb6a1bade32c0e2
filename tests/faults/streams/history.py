"""History: what was sent, begun and written, and what is wrong with it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import redis

from celery5 import App
from tests.faults.streams.application import PARTITIONS, Payment, Total, declare_payments, declare_totals
from tests.redis.commands.staff import Staff

GROUP = "bill"


@dataclass(frozen=True)
class Begun:
    """One line of the history: a processor has begun with a record."""

    customer: str
    number: int
    partition: int
    pid: int
    at: float


def read_begun(staff: Staff) -> list[Begun]:
    """Return what was begun, in order."""
    found = []
    for line in staff.history.read_text().splitlines():
        customer, number, partition, pid, at = line.split()
        found.append(Begun(customer, int(number), int(partition), int(pid), float(at)))
    return found


class Producer:
    """Sends the numbers 1, 2, 3, ... of each customer, and knows how far it has come."""

    def __init__(self, app: App, customers: int = 40) -> None:
        self.payments = declare_payments(app)
        self.totals = declare_totals(app)
        self.sent = {f"c{number}": 0 for number in range(customers)}

    def make(self, rounds: int = 1, **fields: Any) -> list[Payment]:
        """Return the next numbers of all customers."""
        made = []
        for _ in range(rounds):
            for customer in self.sent:
                self.sent[customer] += 1
                made.append(Payment(customer, self.sent[customer], **fields))
        return made

    def make_for(self, customer: str, **fields: Any) -> Payment:
        """Return the next number of one customer."""
        self.sent[customer] = self.sent.get(customer, 0) + 1
        return Payment(customer, self.sent[customer], **fields)


def read_outputs(client: "redis.Redis", app: App) -> list[Total]:
    """Return the outputs, those of a customer in their order."""
    keys, outputs = app.keys.for_stream("totals"), []
    for partition in range(PARTITIONS):
        entries: Any = client.xrange(keys.log(partition))
        outputs += [msgspec.json.decode(fields[b"=json"], type=Total) for _, fields in entries]
    return outputs


def read_state(client: "redis.Redis", app: App) -> dict[str, int]:
    """Return the keyed state."""
    state: Any = client.hgetall(app.keys.for_stream("payments").state(GROUP))
    return {name.decode(): int(value) for name, value in state.items()}


def find_faults(sent: Mapping[str, int], outputs: Sequence[Total], state: Mapping[str, int]) -> list[str]:
    """Return what is wrong: each record has one output, in the order of its key, with the right total.

    Args:
        sent: The last number of each customer.
        outputs: All outputs, those of a customer in their order.
        state: The last total of each customer, as the processor keeps it.
    """
    faults = []
    numbers = defaultdict[str, list[int]](list)
    for output in outputs:
        numbers[output.customer].append(output.number)
        if output.total != sum(range(output.number + 1)):
            faults.append(f"total: {output.customer} {output.number} has the total {output.total}")
    for customer, last in sent.items():
        found = numbers[customer]
        doubled = len(found) - len(set(found))
        lost = len(set(range(1, last + 1)) - set(found))
        if doubled:
            faults.append(f"double: {doubled} outputs of {customer}")
        if lost:
            faults.append(f"lost: {lost} outputs of {customer}")
        if found != sorted(found):
            faults.append(f"order: the outputs of {customer} are {found}")
        if state.get(customer, 0) != sum(range(last + 1)):
            faults.append(f"state: {customer} has {state.get(customer)} instead of {sum(range(last + 1))}")
    return faults


def count_outputs(client: "redis.Redis", app: App) -> int:
    """Return how many outputs were delivered."""
    keys = app.keys.for_stream("totals")
    lengths: list[Any] = [client.xlen(keys.log(partition)) for partition in range(PARTITIONS)]
    return sum(lengths)


def get_owners(client: "redis.Redis", app: App) -> dict[int, str]:
    """Return the incarnation that owns each partition."""
    keys, owners = app.keys.for_stream("payments"), {}
    for partition in range(PARTITIONS):
        owner: Any = client.hget(keys.partition(GROUP, partition), "owner")
        owners[partition] = (owner or b"").decode()
    return owners


def get_partitions(client: "redis.Redis", app: App, name: str) -> set[int]:
    """Return the partitions that the worker of this name owns."""
    return {partition for partition, owner in get_owners(client, app).items() if owner.startswith(f"{name}:")}


def is_shared(client: "redis.Redis", app: App, *names: str) -> bool:
    """Whether workers of these names own all partitions, in fair shares."""
    shares = [len(get_partitions(client, app, name)) for name in names]
    return sum(shares) == PARTITIONS and max(shares) - min(shares) <= 1
