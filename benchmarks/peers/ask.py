"""Ask: the one command line that every peer answers, so that the runner treats all of them alike.

    python peers/ask.py x_app enqueue N     N no-op jobs, one call each
    python peers/ask.py x_app bulk N        N no-op jobs by the peer's way for many
    python peers/ask.py x_app sleep N       N jobs that sleep for 50 ms
    python peers/ask.py x_app latency N     N times: send, wait for the result; a worker runs
    python peers/ask.py x_app work N SIZE   N realistic jobs with a text of SIZE bytes, which they return
    python peers/ask.py x_app echo N SIZE   N jobs that only return their text
    python peers/ask.py x_app spread N      N no-op jobs over 20 queues
    python peers/ask.py x_app command P C   print the command line of P processes with C jobs at once in each
    python peers/ask.py x_app serve P C     be such a worker, until killed, for peers that have no command

Producers print {"queued": jobs now in the queue, "seconds": .., "cpu": .., "laps": [ms, ..]}. What they time starts
after a first job has opened connections and loaded scripts; that job is one of those queued.
"""

import json
import os
import sys
from importlib import import_module

from contract import WARM_UP_LAPS, Peer, clock


def answer(module: str, verb: str, *numbers: int) -> None:
    """Do what the command line says."""
    peer: Peer = import_module(module).peer
    if verb == "command":
        processes, concurrency = numbers
        own = [sys.executable, __file__, module, "serve", str(processes), str(concurrency)]
        print(json.dumps(peer.worker(processes, concurrency) if peer.worker else own), flush=True)
    elif verb == "serve":
        assert peer.serve is not None
        peer.serve(*numbers)
    else:
        queued = produce(peer, verb, *numbers)
        laps = clock.laps[WARM_UP_LAPS:]
        output = {"queued": queued, "seconds": clock.seconds, "cpu": clock.cpu, "laps": laps}
        print(json.dumps(output), flush=True)
        os._exit(0)  # ArdiQ's core crashes now and then when the interpreter ends


def produce(peer: Peer, verb: str, n: int, size: int = 0) -> int:
    """Send jobs, and return how many are now in the queue."""
    if verb == "latency":
        peer.latency(n + WARM_UP_LAPS)
    elif verb in ("work", "echo"):
        assert peer.fill is not None
        peer.fill(verb, n, size)
        return n
    elif verb == "spread":
        assert peer.spread is not None
        peer.spread(n)
        return n
    else:
        {"enqueue": peer.enqueue, "bulk": peer.bulk, "sleep": peer.sleep}[verb](n)
    return n + 1


if __name__ == "__main__":
    answer(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
