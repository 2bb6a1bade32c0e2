"""Member There: a process that speaks to systemd as members of a cluster do, and notes how it was started.

It stands by itself: it runs with no path but Python's own.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path


def say(*lines: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.sendto("\n".join(lines).encode(), os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))


def main(*said: str) -> None:
    name = said[said.index("--name") + 1]
    if "--fail" in said:
        say("STATUS=failed: boot step 'db' crashed")
        sys.exit(78)
    signal.signal(signal.SIGHUP, lambda *_: say("STATUS=read again"))
    signal.signal(signal.SIGTERM, lambda *_: leave(name))
    pids = Path(f"{name}.pids")
    with pids.open("a") as note:
        note.write(f"{os.getpid()}\n")
    Path(f"{name}.json").write_text(json.dumps({"arguments": said, "environment": dict(os.environ)}))
    say("READY=1", "STATUS=at work")
    while True:
        time.sleep(0.1)
        if not Path(f"{name}.hang").exists():
            say("WATCHDOG=1")


def leave(name: str) -> None:
    Path(f"{name}.left").touch()
    say("STOPPING=1")
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
