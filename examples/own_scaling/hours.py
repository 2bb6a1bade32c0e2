"""Scale up before the hours in which there is much to do."""

from collections.abc import Callable
from datetime import datetime

from celery5.scaling import Load, Scale


class Hours:
    """As many workers as the jobs need, and in the early hours at least half of the maximum."""

    def __init__(self, begin: int, end: int, *, clock: Callable[[], datetime] = datetime.now) -> None:
        self._begin = begin
        self._end = end
        self._clock = clock

    def __call__(self, load: Load) -> Scale:
        """Return the wanted scale. The caller keeps it within the limits and the cool-down."""
        early = self._begin <= self._clock().hour < self._end
        ready = load.maximum // 2 if early else load.minimum
        return Scale(max(load.needed(margin=0.2), ready), load.now.prefetch)
