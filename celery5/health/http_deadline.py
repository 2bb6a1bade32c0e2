"""End a blocking HTTP request in time, however slowly the other side sends its answer.

The time limit of a socket is for each read: a server that sends a byte every few seconds would keep a thread for days.
"""

import http.client
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress


@contextmanager
def end_in_time(
    connection: http.client.HTTPConnection, seconds: float
) -> Generator[threading.Event, None, None]:
    """End what is read from a connection, which is open, `seconds` after the start of the block.

    Yields:
        An event that is set then. The library takes a head that was cut off for a whole one.

    Raises:
        TimeoutError: Reading has failed because of that.
    """
    opened, expired = connection.sock, threading.Event()

    def end() -> None:
        expired.set()
        with suppress(OSError):
            # Not that of an SSLSocket, which the thread that reads would stumble over.
            socket.socket.shutdown(opened, socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    except (OSError, http.client.HTTPException, ValueError):
        if expired.is_set():
            raise TimeoutError(f"the answer was not there within {seconds:.3g} s") from None
        raise
    finally:
        timer.cancel()
