"""Read order: how the priorities of a queue, and the queues of a worker, share what a worker can read.

Either in strict order, the first one for as long as it has jobs; or by weights, so that none starves.
"""

import re
from collections.abc import Mapping

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.lanes import HIGH, LOW, NORMAL

Weights = Mapping[str, float]
"""Numbers above 0, by name."""

_WEIGHTS = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3}):([1-9]\d{0,3})")
_QUEUE = re.compile(r"(?P<queue>\S+)=(?P<weight>[1-9]\d{0,3})")
_LEVELS_HINT = "write strict, 4:2:1, or mail=4:2:1 for one queue"
_ORDER_HINT = "write urgent > mail > bulk, or weights: urgent=4 mail=2 bulk=1"


class PriorityWeights(msgspec.Struct, frozen=True):
    """How the priorities share each queue: the weights of its lanes by queue, None for a strict order.

    The name '' stands for all other queues.
    """

    by_queue: Mapping[str, Weights | None] = {}

    def get_weights(self, queue: str) -> Weights | None:
        """Return the weights of a queue's lanes, by their letters; None for a strict order."""
        return self.by_queue.get(queue, self.by_queue.get(""))


class QueueOrder(msgspec.Struct, frozen=True):
    """How the queues of a worker share it: strictly in the order of `names`, or by `weights`, or all alike.

    A queue that is not named comes last, and has the weight 1.
    """

    names: tuple[str, ...] = ()
    weights: Weights = {}

    def get_rank(self, queue: str) -> int:
        """Return the place of a queue in a strict order."""
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
        credit = {name: self._credit.get(name, 0.0) + count * each / total for name, each in weights.items()}
        dealt = {name: max(0, int(each)) for name, each in credit.items()}
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
    said: dict[str, Weights | None] = {}
    for word in text.split():
        queue, _, way = word.rpartition("=")
        match = _WEIGHTS.fullmatch(way)
        if match is None and way != "strict":
            raise Misconfigured(f"{word!r} does not say how priorities share a queue: {_LEVELS_HINT}")
        if queue in said:
            raise Misconfigured(
                f"{word!r}: {f'queue {queue!r}' if queue else 'for all queues it'} is said twice"
            )
        said[queue] = (
            None if match is None else dict(zip((HIGH, NORMAL, LOW), map(float, match.groups()), strict=True))
        )
    return PriorityWeights(said)


def parse_queue_order(text: str) -> QueueOrder:
    """Return how the queues of a worker share it, from the setting `queue_order`.

    `urgent > mail > bulk` is strict; `urgent=4 mail=2` are weights; empty treats all alike. Raises
    Misconfigured.
    """
    words = text.split()
    if ">" in words:
        names = words[::2]
        mixed = ">" in names or any(_QUEUE.fullmatch(each) for each in names)
        if mixed or set(words[1::2]) != {">"} or len(words) % 2 == 0:
            raise Misconfigured(f"{text!r} is no order of queues: {_ORDER_HINT}")
        if len(set(names)) < len(names):
            raise Misconfigured(f"{text!r} names a queue twice")
        return QueueOrder(names=tuple(names))
    weights: dict[str, float] = {}
    for word in words:
        match = _QUEUE.fullmatch(word)
        if match is None:
            raise Misconfigured(f"{word!r} is no weight of a queue: {_ORDER_HINT}")
        if match["queue"] in weights:
            raise Misconfigured(f"{text!r} names a queue twice")
        weights[match["queue"]] = float(match["weight"])
    return QueueOrder(weights=weights)
