"""Accepting: the next connection of a listener, however long that takes.

Floor: services. Reads: a listening socket. Writes: nothing.
"""

import trio

AGAIN = 0.1
"""Seconds until it is tried again."""


async def accepted(listener: trio.SocketListener) -> trio.SocketStream:
    """The next connection. That there is no room for one more, or the network has trouble of its own, passes."""
    while True:
        try:
            return await listener.accept()
        except OSError:
            await trio.sleep(AGAIN)
