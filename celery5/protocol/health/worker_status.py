"""The status that a worker reports in one line, for people, and for the Controller that compares a new version."""

import msgspec

READY = "ready"
"""How the status of a worker begins when nothing keeps it from being ready."""
_SUCCEEDED, _FAILED = "succeeded", "failed"
_RECYCLING = "; recycling: "
_WAITING = "; waits for a successor: "


class Attempts(msgspec.Struct, frozen=True):
    """How many attempts succeeded, and how many failed: those that are retried, and those that are dead."""

    successes: int = 0
    failures: int = 0

    @property
    def total(self) -> int:
        """Return how many there are."""
        return self.successes + self.failures

    @property
    def failed_share(self) -> float:
        """Return the share of those that failed; 0 without any."""
        return self.failures / self.total if self.total else 0.0

    def plus(self, more: "Attempts") -> "Attempts":
        """Return both together."""
        return Attempts(self.successes + more.successes, self.failures + more.failures)

    def since(self, before: "Attempts") -> "Attempts":
        """Return those that were added; all of them if the process began to count again."""
        if self.successes < before.successes or self.failures < before.failures:
            return self
        return Attempts(self.successes - before.successes, self.failures - before.failures)


class WorkerStatus(msgspec.Struct, frozen=True):
    """What the last status of a worker says."""

    # What keeps it from being ready; "" for nothing.
    problem: str
    attempts: Attempts
    # Why it is being recycled; "" when it is not.
    recycling: str = ""
    # Why it asks for a process that takes its place, before it is recycled; "" when it does not.
    successor: str = ""


def format_worker_status(
    problem: str, ended: int, attempts: Attempts, dead: int, *, recycling: str = "", successor: str = ""
) -> str:
    """Return the status that a worker reports, in one line: `ready; attempts: 9, succeeded: 8, failed: 1, dead: 0`.

    Each number has its name before it, so that they are read without knowing the words around them.
    """
    counts = {"attempts": ended, _SUCCEEDED: attempts.successes, _FAILED: attempts.failures, "dead": dead}
    named = ", ".join(f"{name}: {count}" for name, count in counts.items())
    suffix = f"{_RECYCLING}{recycling}" if recycling else f"{_WAITING}{successor}" if successor else ""
    return f"{problem or READY}; {named}{suffix}"


def parse_worker_status(status: str) -> WorkerStatus | None:
    """Return what a worker's status says; None for one of another version or of another kind of process."""
    recycled, _, recycling = status.rpartition(_RECYCLING)
    waiting, _, successor = status.rpartition(_WAITING)
    return (
        _read_counts(recycled, recycling=recycling)
        or _read_counts(waiting, successor=successor)
        or _read_counts(status)
    )


def _read_counts(text: str, *, recycling: str = "", successor: str = "") -> WorkerStatus | None:
    problem, _, counts = text.rpartition("; ")
    pairs = (pair.partition(": ") for pair in counts.split(", "))
    numbers = {name: int(number) for name, _, number in pairs if number.isdecimal()}
    if not {_SUCCEEDED, _FAILED} <= numbers.keys():
        return None
    attempts = Attempts(numbers[_SUCCEEDED], numbers[_FAILED])
    return WorkerStatus("" if problem == READY else problem, attempts, recycling, successor)
