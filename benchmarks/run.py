"""Measure celery5 and its peers on one machine in one run, and write the table.

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
    """The samples of each figure of each contestant, and the reasons of failures."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def keep(self, name: str, told: Figures) -> None:
        """Add a sample of each figure."""
        for figure, value in told.items():
            self.figures.setdefault(name, {}).setdefault(figure, []).append(value)

    def fail(self, name: str, measure: str, reason: str) -> None:
        """Record why a measure failed."""
        self.failures.setdefault(name, {})[measure] = reason


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
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
    """Return the contestants that `--only` names; without names all of them."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    all_names = {name for contestant in CONTESTANTS for name in (contestant.name, contestant.environment)}
    if unknown := names - all_names:
        raise SystemExit(
            f"unknown contestant {', '.join(sorted(unknown))}; known: {', '.join(sorted(all_names))}"
        )
    return [
        contestant
        for contestant in CONTESTANTS
        if not names or contestant.name in names or contestant.environment in names
    ]


def stands(
    contestants: list[Contestant], server: Server, folder: Path, asked: argparse.Namespace, record: Record
) -> Iterator[Stand]:
    """Prepare the environment of each contestant; one that fails is recorded and left out."""
    for contestant in contestants:
        try:
            python = prepare(contestant)
        except CannotPrepare as error:
            record.fail(contestant.name, "environment", str(error))
            say(f"{contestant.name}: no environment: {error}")
            continue
        scale = 0.25 if asked.quick else 1.0
        subfolder = folder / contestant.module / (contestant.variant or "plain")
        subfolder.mkdir(parents=True)
        yield Stand(contestant, python, server, subfolder, scale, 30.0 if asked.quick else 90.0, asked.jobs)


def measure(stand: Stand, name: str, how: Callable[[Stand], Figures], record: Record) -> None:
    """Run one measure of one contestant. A failure is recorded, and does not stop the run."""
    contestant = stand.contestant
    if (
        name in contestant.skips
        or name in record.failures.get(contestant.name, {})
        or (name in OURS_ONLY and contestant.name != OURS)
    ):
        return
    try:
        figures = how(stand)
    except (Failed, RedisError, OSError) as error:
        record.fail(contestant.name, name, str(error))
        say(f"  {contestant.name:20} {name:9} failed: {error}")
        return
    record.keep(contestant.name, figures)
    say(
        f"  {contestant.name:20} {name:9} "
        + "  ".join(f"{key} {value:,.4g}" for key, value in figures.items())
    )


def rounds(all_stands: list[Stand], asked: argparse.Namespace, record: Record) -> int:
    """Run all measures for all contestants, in random order, and return the number of finished rounds."""
    wanted = {name.strip() for name in asked.measures.split(",") if name.strip()} or {*EVERY_ROUND, *ONCE}
    deadline = time.monotonic() + asked.limit * 60
    total = asked.rounds or (1 if asked.quick else 3)
    for number in range(total):
        for name, how in (EVERY_ROUND | (ONCE if number == 0 else {})).items():
            if name not in wanted:
                continue
            fills = name == "bulk" and "drain1" in wanted  # filling a queue to drain it measures the same
            say(f"round {number + 1} of {total}: {name}")
            for stand in random.sample(all_stands, len(all_stands)):
                if time.monotonic() > deadline:
                    say("out of time: the rest of the rounds is left out")
                    return number
                if not (fills and "drain1" not in stand.contestant.skips):
                    measure(stand, name, how, record)
    return total


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def stop(number: int, frame: object) -> None:
    """End the run on SIGTERM as on Ctrl-C, so that every child is ended."""
    raise KeyboardInterrupt


def main() -> int:
    """Measure, write the results, and return the exit code."""
    arguments = options()
    contestants = chosen(arguments.only)
    signal.signal(signal.SIGTERM, stop)
    record, load, start = Record(), os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory(prefix="celery5-bench-") as folder:
        try:
            with Server() as server:
                done = rounds(
                    list(stands(contestants, server, Path(folder), arguments, record)), arguments, record
                )
                machine = report.machine(server.version, done, arguments.quick, load, time.time() - start)
        except NoServer as error:
            say(str(error))
            return 1
        except KeyboardInterrupt:
            say("stopped; nothing was written")
            return 130
        finally:
            children.end_all()
    complete = not (arguments.quick or arguments.only or arguments.measures or arguments.jobs)
    target = HERE if complete or arguments.publish else cache()
    workflows = report.read(HERE / "results.md", report.WORKFLOWS)
    text = report.page(machine, record.figures, record.failures, workflows)
    (target / "results.md").write_text(text)
    raw = {"machine": machine, "figures": record.figures, "failures": record.failures}
    (target / "results.json").write_text(json.dumps(raw, indent=1) + "\n")
    if target == HERE:
        report.fill(HERE.parent / "README.md", report.excerpt(machine, record.figures))
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
