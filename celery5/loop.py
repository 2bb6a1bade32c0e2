"""Loop: how late the event loop comes round.

Floor: domain. Reads: Trio's clock. Writes: nothing.
"""

import trio


async def lateness(seconds: float) -> float:
    """How much later than asked for a sleep of so many `seconds` ends, in seconds: what blocks the loop shows here."""
    due = trio.current_time() + seconds
    await trio.sleep_until(due)
    return max(trio.current_time() - due, 0.0)
