"""Run: measure celery5 beside its peers on one machine in one run, and write the table.

python benchmarks/run.py                         everything, three rounds, about 20 minutes on two cores
python benchmarks/run.py --quick --only celery5,huey
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import children
import report
from contestants import CONTESTANTS, OURS, Contestant
from environments import CannotPrepare, cache, prepare
from measures import EVERY_ROUND, ONCE, OURS_ONLY, Failed, Figures, Stand
from redis.exceptions import RedisError
from server import NoServer, Server

HERE = Path(__file__).resolve().parent


@dataclass
class Record:
    """What came out: the samples of each figure of each contestant, and why others are missing."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def keep(self, name: str, told: Figures) -> None:
        """One sample of each figure."""
        for figure, value in told.items():
            self.figures.setdefault(name, {}).setdefault(figure, []).append(value)

    def fail(self, name: str, measure: str, reason: str) -> None:
        """A measure that gave nothing."""
        self.failures.setdefault(name, {})[measure] = reason


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure celery5 beside its peers.")
    parser.add_argument(
        "--only", default="", help="contestants, by name or by environment, separated by commas"
    )
    parser.add_argument("--measures", default="", help=f"of {','.join([*EVERY_ROUND, *ONCE])}")
    parser.add_argument("--rounds", type=int, default=None, help="rounds; 3, or 1 when quick")
    parser.add_argument(
        "--jobs", type=int, default=None, help="jobs of each measure, instead of each contestant's own"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of a quarter of the jobs: figures are rough"
    )
    parser.add_argument("--limit", type=float, default=25.0, help="minutes after which nothing new is begun")
    parser.add_argument(
        "--publish", action="store_true", help="write results.md and README.md after a partial run too"
    )
    return parser.parse_args(arguments)


def chosen(only: str) -> list[Contestant]:
    """The contestants that are asked for."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    known = {name for one in CONTESTANTS for name in (one.name, one.environment)}
    if unknown := names - known:
        raise SystemExit(
            f"unknown contestant {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
        )
    return [one for one in CONTESTANTS if not names or one.name in names or one.environment in names]


def stands(
    contestants: list[Contestant], server: Server, folder: Path, asked: argparse.Namespace, record: Record
) -> Iterator[Stand]:
    """Prepare the environment of each contestant; one that cannot be had is recorded and left out."""
    for one in contestants:
        try:
            python = prepare(one)
        except CannotPrepare as error:
            record.fail(one.name, "environment", str(error))
            say(f"{one.name}: no environment: {error}")
            continue
        scale = 0.25 if asked.quick else 1.0
        place = folder / one.module / (one.variant or "plain")
        place.mkdir(parents=True)
        yield Stand(one, python, server, place, scale, 30.0 if asked.quick else 90.0, asked.jobs)


def measure(stand: Stand, name: str, how: Callable[[Stand], Figures], record: Record) -> None:
    """One measure of one contestant; a failure is written down and does not stop the run."""
    one = stand.contestant
    if (
        name in one.skips
        or name in record.failures.get(one.name, {})
        or (name in OURS_ONLY and one.name != OURS)
    ):
        return
    try:
        told = how(stand)
    except (Failed, RedisError, OSError) as error:
        record.fail(one.name, name, str(error))
        say(f"  {one.name:20} {name:9} failed: {error}")
        return
    record.keep(one.name, told)
    say(f"  {one.name:20} {name:9} " + "  ".join(f"{key} {value:,.4g}" for key, value in told.items()))


def rounds(all_stands: list[Stand], asked: argparse.Namespace, record: Record) -> int:
    """All rounds: in each, every measure goes round all contestants, in an order that changes. Gives those finished."""
    wanted = {name.strip() for name in asked.measures.split(",") if name.strip()} or {*EVERY_ROUND, *ONCE}
    end = time.monotonic() + asked.limit * 60
    total = asked.rounds or (1 if asked.quick else 3)
    for number in range(total):
        for name, how in (EVERY_ROUND | (ONCE if number == 0 else {})).items():
            if name not in wanted:
                continue
            fills = name == "bulk" and "drain1" in wanted  # filling a queue to drain it measures the same
            say(f"round {number + 1} of {total}: {name}")
            for stand in random.sample(all_stands, len(all_stands)):
                if time.monotonic() > end:
                    say("out of time: the rest of the rounds is left out")
                    return number
                if not (fills and "drain1" not in stand.contestant.skips):
                    measure(stand, name, how, record)
    return total


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def stop(number: int, frame: object) -> None:
    """SIGTERM ends the run like Ctrl-C: every child is ended on the way out."""
    raise KeyboardInterrupt


def main() -> int:
    """Measure and write. Gives the exit code."""
    asked = options()
    contestants = chosen(asked.only)
    signal.signal(signal.SIGTERM, stop)
    record, load, began = Record(), os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory(prefix="celery5-bench-") as folder:
        try:
            with Server() as server:
                done = rounds(list(stands(contestants, server, Path(folder), asked, record)), asked, record)
                machine = report.machine(server.version, done, asked.quick, load, time.time() - began)
        except NoServer as error:
            say(str(error))
            return 1
        except KeyboardInterrupt:
            say("stopped; nothing was written")
            return 130
        finally:
            children.end_all()
    whole = not (asked.quick or asked.only or asked.measures or asked.jobs)
    place = HERE if whole or asked.publish else cache()
    text = report.page(machine, record.figures, record.failures)
    (place / "results.md").write_text(text)
    raw = {"machine": machine, "figures": record.figures, "failures": record.failures}
    (place / "results.json").write_text(json.dumps(raw, indent=1) + "\n")
    if place == HERE:
        report.fill(HERE.parent / "README.md", report.excerpt(machine, record.figures))
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
