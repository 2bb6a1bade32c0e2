"""Record which callers wait for which documents, and what has arrived; shared by all three colours.

A document is stored under a key and announced on the channel of the same name. The first caller
subscribes, then reads the key, then listens: so no announcement is missed. A document may arrive twice.
"""

from collections.abc import Callable, Iterable

from celery5.broker.driver import StopCondition


class ResultWait:
    """The documents that one caller waits for."""

    __slots__ = ("enough", "error", "finished", "found", "missing", "wake")

    def __init__(
        self, keys: Iterable[str], *, enough: StopCondition | None, wake: Callable[[], None]
    ) -> None:
        # Keys whose documents have not arrived: as sent to Redis, and as the caller passed them.
        self.missing = {key.encode(): key for key in keys}
        # The documents that have arrived, by key.
        self.found: dict[str, bytes] = {}
        # Returns whether these documents end the wait.
        self.enough = enough
        # Called once, when the wait is finished.
        self.wake = wake
        # The error that ended the wait.
        self.error: BaseException | None = None
        # Whether all documents have arrived, `enough` has returned true, or there is an `error`.
        self.finished = not self.missing

    def get_documents(self, outage: BaseException | None) -> dict[str, bytes]:
        """Return the documents, or raise the error that ended the wait. An unfinished wait raises `outage`, if any."""
        if not self.finished and outage is not None:
            raise outage
        if self.error is not None:
            raise self.error
        return self.found


class ResultWaits:
    """All waits on one connection."""

    def __init__(self) -> None:
        self._waits: dict[bytes, list[ResultWait]] = {}
        self._touched: dict[ResultWait, None] = {}

    def add(self, wait: ResultWait) -> list[bytes]:
        """Add a wait; return its keys that no earlier wait has."""
        new_keys: list[bytes] = []
        for key in wait.missing:
            waits = self._waits.get(key)
            if waits is None:
                self._waits[key] = [wait]
                new_keys.append(key)
            else:
                waits.append(wait)
        return new_keys

    def remove(self, wait: ResultWait) -> list[bytes]:
        """Remove a wait, however it ended; return its keys that no remaining wait has."""
        unused_keys: list[bytes] = []
        for key in wait.missing:
            waits = self._waits.get(key, [])
            if wait in waits:
                waits.remove(wait)
                if not waits:
                    del self._waits[key]
                    unused_keys.append(key)
        self._touched.pop(wait, None)
        return unused_keys

    def add_document(self, key: bytes, document: bytes) -> bool:
        """Add a document to the waits for it. Return False when there are none, or it had arrived before."""
        waits = self._waits.get(key)
        if waits is None:
            return False
        for wait in waits:
            # In this order, with the key last: if this is interrupted, the call can be repeated.
            self._touched[wait] = None
            if key in wait.missing:
                wait.found[wait.missing[key]] = document
                del wait.missing[key]
        del self._waits[key]
        return True

    def wake_finished(self) -> bool:
        """Finish and wake the waits that have enough documents; return whether there were any.

        Called once for all documents of one read: `enough` may be slow when there are many.
        """
        touched, self._touched = self._touched, {}
        has_finished = False
        for wait in touched:
            if wait.finished:
                continue
            try:
                wait.finished = not wait.missing or (wait.enough is not None and wait.enough(wait.found))
            except Exception as error:
                wait.error = error
                wait.finished = True
            if wait.finished:
                has_finished = True
                wait.wake()
        return has_finished

    def fail(self, error: BaseException) -> None:
        """End all waits with `error`."""
        for wait in {wait: None for waits in self._waits.values() for wait in waits}:
            if not wait.finished:
                wait.error = error
                wait.finished = True
                wait.wake()

    @property
    def keys(self) -> list[bytes]:
        """All keys that are waited for."""
        return list(self._waits)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waits

    def __bool__(self) -> bool:
        return bool(self._waits)
