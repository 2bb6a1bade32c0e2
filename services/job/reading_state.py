"""Which queues a worker reads now: the Consumer follows it, and others interrupt a read that began before a change."""

import trio


class ReadingState:
    """Which queues a worker reads now, and the read that is under way.

    The Consumer follows it. Other services interrupt a read that began before a change.
    """

    def __init__(self) -> None:
        self._paused: set[str] = set()
        self._is_stopping = False
        self._read = trio.CancelScope()
        self._is_audit_requested = False

    def is_closed(self, queue: str) -> bool:
        """Return whether this worker takes no jobs of a queue now."""
        return self._is_stopping or queue in self._paused

    @property
    def paused_queues(self) -> frozenset[str]:
        """The queues that are not read now."""
        return frozenset(self._paused)

    @property
    def is_stopping(self) -> bool:
        """Whether nothing is read any more."""
        return self._is_stopping

    def is_paused(self, queue: str) -> bool:
        """Return whether a queue is not read now."""
        return queue in self._paused

    def pause(self, *queues: str) -> None:
        """Stop reading these queues until `resume`."""
        self._paused.update(queues)
        self.interrupt()

    def resume(self, queue: str) -> None:
        """Read a queue again."""
        self._paused.discard(queue)
        self.interrupt()

    def set_stopping(self, is_stopping: bool) -> None:
        """Note whether nothing is read any more."""
        self._is_stopping = is_stopping

    def begin_read(self, scope: trio.CancelScope) -> None:
        """Note the scope of a read that begins: cancelling it ends the read."""
        self._read = scope

    def interrupt(self) -> None:
        """End the read that is under way."""
        self._read.cancel()

    def request_audit(self) -> None:
        """Look for lost jobs before the next read: the reply to a read may have been lost."""
        self._is_audit_requested = True

    def take_audit_request(self) -> bool:
        """Return whether an audit was requested since the last call."""
        requested, self._is_audit_requested = self._is_audit_requested, False
        return requested
