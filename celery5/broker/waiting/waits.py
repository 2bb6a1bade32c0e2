"""Waiting: who waits for which documents, and what has come. Three colours of waiting share it.

A document is stored under a key and announced on the channel of the same name. Whoever waits first
subscribes, then reads the key, then listens: nothing can slip between, and what is told twice does no harm.
"""

from collections.abc import Callable, Iterable, Mapping

StopCondition = Callable[[Mapping[str, bytes]], bool]


class ResultWait:
    """One caller and what it waits for.

    `missing` are the keys still to come (as sent, and as the caller wrote them), `found` the documents that
    came. It is `finished` when all have come, when `enough` says so, or when it failed with `error`. `wake`
    is called then, once.
    """

    __slots__ = ("enough", "error", "finished", "found", "missing", "wake")

    def __init__(
        self, keys: Iterable[str], *, enough: StopCondition | None, wake: Callable[[], None]
    ) -> None:
        self.missing = {key.encode(): key for key in keys}
        self.found: dict[str, bytes] = {}
        self.enough = enough
        self.wake = wake
        self.error: BaseException | None = None
        self.finished = not self.missing

    def get_documents(self, outage: BaseException | None) -> dict[str, bytes]:
        """What came, or the error that ended it. Without enough the `outage`, if there is one, is to blame."""
        if not self.finished and outage is not None:
            raise outage
        if self.error is not None:
            raise self.error
        return self.found


class ResultWaits:
    """All who wait on one connection."""

    def __init__(self) -> None:
        self._waits: dict[bytes, list[ResultWait]] = {}
        self._touched: dict[ResultWait, None] = {}

    def add(self, wait: ResultWait) -> list[bytes]:
        """`wait` begins. Gives the keys that nobody else waits for."""
        new: list[bytes] = []
        for key in wait.missing:
            waits = self._waits.get(key)
            if waits is None:
                self._waits[key] = [wait]
                new.append(key)
            else:
                waits.append(wait)
        return new

    def remove(self, wait: ResultWait) -> list[bytes]:
        """`wait` is over, however it ended. Gives the keys that nobody waits for any more."""
        gone: list[bytes] = []
        for key in wait.missing:
            waits = self._waits.get(key, [])
            if wait in waits:
                waits.remove(wait)
                if not waits:
                    del self._waits[key]
                    gone.append(key)
        self._touched.pop(wait, None)
        return gone

    def add_document(self, key: bytes, document: bytes) -> bool:
        """A document is there. False when nobody waits for it (any more): it was told already."""
        waits = self._waits.get(key)
        if waits is None:
            return False
        for wait in waits:
            # In this order, and the key last of all: an interrupted arrival can be made once more.
            self._touched[wait] = None
            if key in wait.missing:
                wait.found[wait.missing[key]] = document
                del wait.missing[key]
        del self._waits[key]
        return True

    def wake_finished(self) -> bool:
        """Finish and wake those for whom what has arrived is enough; true when there was one.

        Once for everything that came together: `enough` may be slow with many documents.
        """
        touched, self._touched = self._touched, {}
        some = False
        for wait in touched:
            if wait.finished:
                continue
            try:
                wait.finished = not wait.missing or (wait.enough is not None and wait.enough(wait.found))
            except Exception as error:
                wait.error = error
                wait.finished = True
            if wait.finished:
                some = True
                wait.wake()
        return some

    def fail(self, error: BaseException) -> None:
        """Nothing will come any more: everybody gets `error`."""
        for wait in {wait: None for waits in self._waits.values() for wait in waits}:
            if not wait.finished:
                wait.error = error
                wait.finished = True
                wait.wake()

    @property
    def keys(self) -> list[bytes]:
        """All keys that somebody waits for."""
        return list(self._waits)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waits

    def __bool__(self) -> bool:
        return bool(self._waits)
