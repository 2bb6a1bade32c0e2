"""Accepting: the next connection of a listener, however long that takes.

Floor: services. Reads: a listening socket. Writes: nothing.
"""

import trio

RETRY_DELAY = 0.1
"""Seconds until it is tried again."""


async def accept_connection(listener: trio.SocketListener) -> trio.SocketStream:
    """The next connection. That there is no room for one more, or the network has trouble of its own, passes."""
    while True:
        try:
            return await listener.accept()
        except OSError:
            await trio.sleep(RETRY_DELAY)
