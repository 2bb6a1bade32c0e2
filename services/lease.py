"""Lease: whether this worker still counts as alive, as far as it knows.

Floor: services. Reads: nothing. Writes: nothing.
"""

from celery5.errors import LeaseLost


class Lease:
    """This worker's right to settle jobs: how long it lasts unrenewed, in seconds, and whether it was lost."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self.lost = False

    def lose(self, why: str) -> LeaseLost:
        """The lease is gone. Gives the error to raise."""
        self.lost = True
        return LeaseLost(why)
