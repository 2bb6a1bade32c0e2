"""Ask: the one command line that every peer answers, so that the runner treats all of them alike.

    python peers/ask.py x_app enqueue N    N no-op jobs, one call each
    python peers/ask.py x_app bulk N       N no-op jobs by the peer's way for many
    python peers/ask.py x_app sleep N      N jobs that sleep for 50 ms
    python peers/ask.py x_app latency N    N times: send, wait for the result; a worker runs
    python peers/ask.py x_app worker P C   P processes with C jobs at once in each, until killed

Producers print {"queued": jobs now in the queue, "seconds": .., "cpu": .., "laps": [ms, ..]}. What they time starts
after a first job has opened connections and loaded scripts; that job is one of those queued.
"""

import json
import sys
from importlib import import_module

from contract import WARM_UP_LAPS, Peer, clock


def answer(module: str, verb: str, *numbers: int) -> None:
    """Do what the command line says."""
    peer: Peer = import_module(module).peer
    if verb == "worker":
        processes, concurrency = numbers
        peer.worker(processes, concurrency)
        return
    (n,) = numbers
    if verb == "latency":
        peer.latency(n + WARM_UP_LAPS)
    else:
        {"enqueue": peer.enqueue, "bulk": peer.bulk, "sleep": peer.sleep}[verb](n)
    laps = clock.laps[WARM_UP_LAPS:]
    print(json.dumps({"queued": n + 1, "seconds": clock.seconds, "cpu": clock.cpu, "laps": laps}), flush=True)


if __name__ == "__main__":
    answer(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
