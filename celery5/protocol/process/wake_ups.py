"""Wake-ups: how many workers of a queue answer what all of them hear, so that a thousand do not do the work of one.

A message on a channel, and the time at which a job falls due, reach every worker of a queue, and one of them is enough.
Each answers by chance, so that a few of them do, without asking the others. Should none do so, the next heartbeat of
any worker finds out: the more workers there are, the sooner that is. The field calls the problem a "thundering herd".
"""

ANSWERING = 8
"""Workers that answer on average. That none of many does happens once in three thousand times (e**-8)."""
SPREAD_PER_WORKER = 0.001
"""Seconds by which the workers of a queue spread what each of them has to do, for each of them."""
MAX_SPREAD = 1.0
"""The most seconds of it, however many they are."""


def does_answer(workers: int, draw: float) -> bool:
    """Return whether a worker answers what all `workers` of its queue hear; `draw` is a random number from 0 to 1."""
    return draw * workers < ANSWERING


def get_spread(workers: int, draw: float) -> float:
    """Return the seconds that a worker waits before it does what all `workers` of its queue will do."""
    return draw * min(workers * SPREAD_PER_WORKER, MAX_SPREAD)
