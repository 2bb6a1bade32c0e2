"""Random histories of workflows by hand: `python -m tests.faults.workflows --seed 7 --episodes 100`."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.workflows.episode import play


def main() -> int:
    """Play random episodes of runs of workflows. Returns 1 when something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.workflows", description=main.__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first episode")
    parser.add_argument("--episodes", type=int, default=10, help="with this seed and those after it")
    parser.add_argument("--runs", type=int, default=200, help="in each episode")
    parser.add_argument("--server", help="the server binary; default: what celery5 finds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process outlives this one
    began, runs, wrong = time.monotonic(), 0, 0

    def make_folder(seed: int) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"c5-workflows-{seed}-", dir="/tmp"))

    folders: dict[int, Path] = {}
    seeds = range(options.seed, options.seed + options.episodes)
    for outcome in play(
        iter(seeds),
        options.runs,
        lambda seed: folders.setdefault(seed, make_folder(seed)),
        binary=options.server,
    ):
        folder = folders.pop(outcome.seed)
        if outcome.wrong:
            print(f"logs and history: {folder}")
        else:
            shutil.rmtree(folder)
        runs, wrong = runs + outcome.runs, wrong + bool(outcome.wrong)
        print(
            f"{outcome}\n{runs} runs in {time.monotonic() - began:.0f} s, {wrong} episodes with a difference",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
