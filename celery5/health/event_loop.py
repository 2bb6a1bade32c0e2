"""Measure how late the event loop is, and record what has blocked it."""

from collections.abc import Mapping

import msgspec
import trio

from celery5.protocol.counts import format_count


class LoopBlock(msgspec.Struct, frozen=True):
    """A block of the event loop, now or in the past: some code on it neither returned nor awaited."""

    # For how long, so far.
    seconds: float
    # The task and the id of the job that was seen most often on the loop; '' when no job was.
    task: str = ""
    job: str = ""
    # How many other jobs were seen.
    others: int = 0

    @property
    def why(self) -> str:
        """Return it as a phrase."""
        cause = f"job {self.job} of task {self.task}" if self.job else "code that belongs to no job"
        others = f" and {format_count(self.others, 'other')}" if self.others else ""
        return f"the event loop was blocked for {self.seconds:.3g} s by {cause}{others}"


class LoopBlocks:
    """What has blocked the event loop of this process. A thread writes during a block; the loop writes its end."""

    def __init__(self) -> None:
        self.current: LoopBlock | None = None
        self.last: LoopBlock | None = None
        self._totals: dict[str, tuple[int, float]] = {}
        self._ended = trio.Event()

    def update_block(self, block: LoopBlock) -> None:
        """Record that the loop is blocked."""
        self.current = block

    def end_block(self, block: LoopBlock) -> None:
        """Record that the loop runs again, and wake who waits for that. Called on the loop."""
        count, seconds = self._totals.get(block.task, (0, 0.0))
        self._totals = {**self._totals, block.task: (count + 1, seconds + block.seconds)}
        self.current, self.last = None, block
        ended, self._ended = self._ended, trio.Event()
        ended.set()

    @property
    def totals(self) -> Mapping[str, tuple[int, float]]:
        """Return how often each task has blocked the loop, and for how many seconds in all."""
        return self._totals

    async def wait_block(self) -> LoopBlock:
        """Return the next block, as soon as it is over."""
        await self._ended.wait()
        assert self.last is not None
        return self.last


async def measure_lateness(seconds: float) -> float:
    """Return by how many seconds a sleep of `seconds` ends late, which shows that the loop was blocked."""
    due = trio.current_time() + seconds
    await trio.sleep_until(due)
    return max(trio.current_time() - due, 0.0)
