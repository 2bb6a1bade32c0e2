"""Hours: a scaling strategy that knows when there will be much to do, and is ready before."""

from collections.abc import Callable
from datetime import datetime

from celery5.scaling import Load, Scale


class Hours:
    """As many workers as the jobs need; and in the early hours of a bakery at least half of all there may be."""

    def __init__(self, begin: int, end: int, *, clock: Callable[[], datetime] = datetime.now) -> None:
        self._begin = begin
        self._end = end
        self._clock = clock

    def __call__(self, load: Load) -> Scale:
        """The scale that is wanted. It is kept within the limits, and no cool-down is cut short by it."""
        early = self._begin <= self._clock().hour < self._end
        ready = load.maximum // 2 if early else load.minimum
        return Scale(max(load.needed(margin=0.2), ready), load.now.prefetch)
