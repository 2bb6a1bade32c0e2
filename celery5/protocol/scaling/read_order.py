"""Divide a worker's reads among the priorities of a queue, and among its queues.

Either in strict order, the first one for as long as it has jobs; or by weights, so that none starves.
"""

import re
from collections.abc import Mapping

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.states import HIGH, LOW, NORMAL
from celery5.protocol.shards import get_queue_of_shard
from celery5.protocol.text_values import parse_assignments

Weights = Mapping[str, float]
"""Numbers above 0, by name."""

_WEIGHTS = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3}):([1-9]\d{0,3})")
_WEIGHT = re.compile(r"[1-9]\d{0,3}")
_LEVELS_HINT = "write strict, 4:2:1, or mail=4:2:1 for one queue"
_ORDER_HINT = "write urgent > mail > bulk, or weights: urgent=4 mail=2 bulk=1"


class PriorityWeights(msgspec.Struct, frozen=True):
    """How the priorities share each queue: the weights of its lanes by queue, None for a strict order.

    The name '' stands for all other queues.
    """

    by_queue: Mapping[str, Weights | None] = {}

    def get_weights(self, queue: str) -> Weights | None:
        """Return the weights of a queue's lanes, by their letters; None for a strict order."""
        return self.by_queue.get(get_queue_of_shard(queue), self.by_queue.get(""))


class QueueOrder(msgspec.Struct, frozen=True):
    """How the queues of a worker share it: strictly in the order of `names`, or by `weights`, or all alike.

    A queue that is not named comes last, and has the weight 1.
    """

    names: tuple[str, ...] = ()
    weights: Weights = {}

    def get_rank(self, queue: str) -> int:
        """Return the place of a queue in a strict order. Its shards have the same."""
        queue = get_queue_of_shard(queue)
        return self.names.index(queue) if queue in self.names else len(self.names)


class FairSplit:
    """Divides capacity by weights so that each gets its share in the long run, however small the parts are."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def divide(self, count: int, weights: Weights) -> dict[str, int]:
        """Return how many of `count` each name gets.

        A fraction of a share is kept for the next time. Unused capacity is not: nobody accumulates a credit.
        """
        total = sum(weights.values())
        credit = {
            name: self._credit.get(name, 0.0) + count * weight / total for name, weight in weights.items()
        }
        dealt = {name: max(0, int(share)) for name, share in credit.items()}
        while sum(dealt.values()) < count:
            most = max(credit, key=lambda name: credit[name] - dealt[name])
            dealt[most] += 1
        while sum(dealt.values()) > count:
            least = min((name for name in dealt if dealt[name]), key=lambda name: credit[name] - dealt[name])
            dealt[least] -= 1
        self._credit |= {name: credit[name] - dealt[name] for name in weights}
        return dealt


def parse_priorities(text: str) -> PriorityWeights:
    """Return how priorities share queues, from the setting `priorities`.

    `strict` or `4:2:1` (high, normal, low) is for all queues, `mail=4:2:1` for one; separated by spaces. Raises
    Misconfigured.
    """
    weights: dict[str, Weights | None] = {}
    for queue, levels in parse_assignments(text, _LEVELS_HINT, nameless=True).items():
        match = _WEIGHTS.fullmatch(levels)
        if match is None and levels != "strict":
            word = f"{queue}={levels}" if queue else levels
            raise Misconfigured(f"{word!r} does not say how priorities share a queue: {_LEVELS_HINT}")
        weights[queue] = (
            None if match is None else dict(zip((HIGH, NORMAL, LOW), map(float, match.groups()), strict=True))
        )
    return PriorityWeights(weights)


def parse_queue_order(text: str) -> QueueOrder:
    """Return how the queues of a worker share it, from the setting `queue_order`.

    `urgent > mail > bulk` is strict; `urgent=4 mail=2` are weights; empty treats all alike. Raises
    Misconfigured.
    """
    words = text.split()
    if ">" in words:
        names = words[::2]
        mixed = ">" in names or any(_WEIGHT.fullmatch(name.rpartition("=")[2]) for name in names)
        if mixed or set(words[1::2]) != {">"} or len(words) % 2 == 0:
            raise Misconfigured(f"{text!r} is not an order of queues: {_ORDER_HINT}")
        if len(set(names)) < len(names):
            raise Misconfigured(f"{text!r} names a queue twice")
        return QueueOrder(names=tuple(names))
    weights = parse_assignments(text, _ORDER_HINT)
    for queue, weight in weights.items():
        if not _WEIGHT.fullmatch(weight):
            raise Misconfigured(f"{f'{queue}={weight}'!r} is not the weight of a queue: {_ORDER_HINT}")
    return QueueOrder(weights={queue: float(weight) for queue, weight in weights.items()})
