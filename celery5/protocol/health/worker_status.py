"""The status that a worker reports in one line, for people, and for the Controller that compares a new version."""

import re

import msgspec

READY = "ready"
"""How the status of a worker begins when nothing keeps it from being ready."""
_STATUS = re.compile(
    r"(.*); \d+ attempts ended: (\d+) successes, (\d+) failures; \d+ jobs dead(?:; recycling: (.*))?"
)


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


def format_worker_status(
    problem: str, ended: int, attempts: Attempts, dead: int, *, recycling: str = ""
) -> str:
    """Return the status that a worker reports, in one line."""
    counts = f"{attempts.successes} successes, {attempts.failures} failures"
    last = f"; recycling: {recycling}" if recycling else ""
    return f"{problem or READY}; {ended} attempts ended: {counts}; {dead} jobs dead{last}"


def parse_worker_status(status: str) -> WorkerStatus | None:
    """Return what a worker's status says; None for one of another version or of another kind of process."""
    found = _STATUS.fullmatch(status)
    if found is None:
        return None
    problem = "" if found[1] == READY else found[1]
    return WorkerStatus(problem, Attempts(int(found[2]), int(found[3])), found[4] or "")
