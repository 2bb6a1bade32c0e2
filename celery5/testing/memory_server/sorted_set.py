"""Sorted set: members by their scores, as Redis orders them."""

from bisect import bisect_left, bisect_right, insort


class SortedSet:
    """Members with a score each."""

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.order: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self.scores)

    def set(self, member: bytes, score: float) -> None:
        """Add a member, or set its score."""
        self.remove(member)
        self.scores[member] = score
        insort(self.order, (score, member))

    def remove(self, member: bytes) -> bool:
        """Remove a member; return whether there was one."""
        score = self.scores.pop(member, None)
        if score is None:
            return False
        del self.order[bisect_left(self.order, (score, member))]
        return True

    def rank(self, member: bytes) -> int:
        """Return the position of a member that is there."""
        return bisect_left(self.order, (self.scores[member], member))

    def span(self, low: float, high: float, *, after: bool, before: bool) -> tuple[int, int]:
        """Return the positions of the first score from `low` on, and of the one behind the last up to `high`.

        Args:
            low: The least score.
            high: The greatest score.
            after: Without those of `low` itself.
            before: Without those of `high` itself.
        """
        first = (bisect_right if after else bisect_left)(self.order, low, key=_get_score)
        end = (bisect_left if before else bisect_right)(self.order, high, key=_get_score)
        return first, max(first, end)


def _get_score(item: tuple[float, bytes]) -> float:
    return item[0]
