"""The turn of what may kill its worker: one job or record at a time, so that a death is blamed on the right one."""

from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import trio


class SuspectTurn:
    """Whose turn it is in one worker, among its suspects: jobs, and records, at which workers have died."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting = deque[Callable[[], object]]()

    def take(self, on_turn: Callable[[], object]) -> bool:
        """Take the turn and return True; if another has it, return False, and call `on_turn` when it is given."""
        if self._is_taken:
            self._waiting.append(on_turn)
            return False
        self._is_taken = True
        return True

    def release(self) -> None:
        """Give the turn to whoever has waited longest."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._is_taken = False

    @asynccontextmanager
    async def held(self, limit: float) -> AsyncGenerator[None, None]:
        """Hold the turn in this block, which begins without it after `limit` seconds: the other suspect may be long."""
        its_turn = trio.Event()
        if self.take(its_turn.set):
            its_turn.set()
        try:
            with trio.move_on_after(limit):
                await its_turn.wait()
            yield
        finally:
            if its_turn.is_set():
                self.release()
            else:
                self._waiting.remove(its_turn.set)
