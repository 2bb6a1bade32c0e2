"""Nemesis: a seeded run by hand: `python -m tests.faults.nemesis --seed 7 --seconds 120`."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.faults.nemesis.run import run
from tests.faults.nemesis.schedule import KINDS_ON


def main() -> int:
    """Make the runs that were asked for. Returns 1 when something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.nemesis", description=main.__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which faults strike")
    parser.add_argument("--runs", type=int, default=1, help="with this seed and the ones after it")
    parser.add_argument(
        "--on",
        choices=sorted(KINDS_ON),
        default="server",
        help="one server; a cluster of three primaries with a replica each; or two servers and three sentinels",
    )
    parser.add_argument(
        "--tls", action="store_true", help="TLS, and for each process the user that `celery5 acl` prints"
    )
    parser.add_argument("--server", help="the server binary; default: what celery5 finds")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process outlives this one
    wrong = 0
    for seed in range(told.seed, told.seed + told.runs):
        outcome = run(
            seed,
            told.seconds,
            Path(tempfile.mkdtemp(prefix=f"nemesis-{seed}-")),
            on=told.on,
            binary=told.server,
            tls=told.tls,
        )
        print(outcome, flush=True)
        wrong += bool(outcome.wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
