"""Measure celery5 and its peers on one machine in one run, and write the tables.

python benchmarks/run.py                              everything: 20 minutes on two quiet cores
python benchmarks/run.py --quick                      ours and the new generation, one rough round
python benchmarks/run.py --only ours,mayu --measures drain1,drain2 --rounds 5 --publish
python benchmarks/run.py --resume                     go on with a run that was stopped
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import children
import report
from contestants import CONTESTANTS, NEW, OLDER, OURS, OWN, Contestant
from environments import CannotPrepare, cache, prepare
from measures import MEASURES, Failed, Stand
from record import Record
from redis.exceptions import RedisError
from server import NoServer, Server

HERE = Path(__file__).resolve().parent
GROUPS = (OURS, NEW, OWN, OLDER)
Step = tuple[int, str, str]
"""Number of the round, measure, contestant."""


@dataclass
class Run:
    """A run under way: what it measured, and the steps that are done, so that it can be resumed."""

    name: str
    arguments: list[str]
    record: Record = field(default_factory=Record)
    done: set[Step] = field(default_factory=set)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the run to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = {
            "name": self.name,
            "arguments": self.arguments,
            "record": self.record.raw(),
            "done": sorted(self.done),
            "seconds": self.seconds,
        }
        path.write_text(json.dumps(raw))

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Read a run that was stopped. Ends the program when there is none."""
        if not path.exists():
            raise SystemExit("no run was stopped: there is nothing to resume")
        raw = json.loads(path.read_text())
        done = {(number, measure, name) for number, measure, name in raw["done"]}
        return cls(raw["name"], raw["arguments"], Record.of_raw(raw["record"]), done, raw["seconds"])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Measure celery5 beside its peers.",
        epilog=f"Groups: {', '.join(GROUPS)}. Contestants: {'; '.join(c.name for c in CONTESTANTS)}.",
    )
    parser.add_argument(
        "--only",
        default="",
        help="contestants by group, name, module (mayu) or environment, separated by commas or semicolons",
    )
    parser.add_argument("--measures", default="", help=f"of {','.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, default=None, help="rounds; 3, or 1 when quick")
    parser.add_argument(
        "--jobs", type=int, default=None, help="jobs of each measure, instead of each contestant's own"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of a quarter of the jobs, ours and the new generation: figures are rough",
    )
    parser.add_argument("--limit", type=float, default=40.0, help="minutes after which nothing new is begun")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="merge a partial run into results.json, too, and write results.md and README.md from it",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run that was stopped last")
    parser.add_argument(
        "--report",
        action="store_true",
        help="measure nothing: write results.md and README.md from results.json",
    )
    return parser.parse_args(arguments)


def split(text: str, known: Iterable[str], what: str) -> set[str]:
    """Return the names in a text; a name may have a comma itself. Ends the program when one is unknown."""
    names, rest = set[str](), text.strip().replace(";", ",").strip(",")
    while rest := rest.strip(", "):
        found = [name for name in known if rest == name or rest.startswith(f"{name},")]
        if not found:
            raise SystemExit(f"unknown {what} {rest.split(',')[0]}; known: {'; '.join(sorted(known))}")
        name = max(found, key=len)
        names.add(name)
        rest = rest[len(name) :]
    return names


def chosen(only: str) -> list[Contestant]:
    """Return the contestants that `--only` names; without names all of them."""

    def names_of(contestant: Contestant) -> set[str]:
        module = contestant.module.removesuffix("_app")
        return {contestant.name, contestant.group, contestant.environment, module}

    names = split(only, set().union(*map(names_of, CONTESTANTS)), "contestant")
    return [contestant for contestant in CONTESTANTS if not names or names & names_of(contestant)]


def planned(contestants: list[Contestant], asked: argparse.Namespace) -> list[Step]:
    """Return all steps: the measures of a round in their order, and for each the contestants in random order.

    Older peers have one round, unless only they are measured.
    """
    wanted = split(asked.measures, MEASURES, "measure") or set(MEASURES)
    total = asked.rounds or (1 if asked.quick else 3)
    only_older = all(contestant.group == OLDER for contestant in contestants)
    steps: list[Step] = []
    for number in range(total):
        for name, measure in MEASURES.items():
            if name not in wanted or (measure.once and number) or (measure.slow and asked.quick):
                continue
            steps += [
                (number, name, contestant.name)
                for contestant in random.sample(contestants, len(contestants))
                if contestant.group in measure.groups
                and measure.only in ("", contestant.name)
                and contestant.skipped(name) is None
                and (number == 0 or contestant.group != OLDER or only_older)
                # Filling a queue to drain it measures the same.
                and not (name == "bulk" and "drain1" in wanted and contestant.skipped("drain1") is None)
            ]
    return steps


def stands(
    contestants: list[Contestant], server: Server, folder: Path, asked: argparse.Namespace, run: Run
) -> dict[str, Stand]:
    """Prepare the environment of each contestant; one that fails is recorded and left out."""
    found: dict[str, Stand] = {}
    for contestant in contestants:
        say(f"environment of {contestant.name}")
        try:
            python = prepare(contestant)
        except CannotPrepare as error:
            run.record.fail(run.name, contestant.name, "environment", str(error))
            say(f"{contestant.name} failed: no environment: {error}")
            continue
        scale = 0.25 if asked.quick else 1.0
        subfolder = folder / f"{contestant.environment}-{contestant.variant or len(found)}"
        subfolder.mkdir(parents=True)
        found[contestant.name] = Stand(contestant, python, server, subfolder, scale, 0.0, asked.jobs)
    return found


def measure(stand: Stand, name: str, run: Run) -> str:
    """Run one measure of one contestant, and return a line about it. A failure does not stop the run."""
    contestant = stand.contestant
    stand.limit = MEASURES[name].limit
    stand.begin()
    try:
        figures = MEASURES[name].run(stand)
    except (Failed, RedisError, OSError) as error:
        run.record.fail(run.name, contestant.name, name, str(error))
        return f"FAILED: {error}"
    run.record.keep(run.name, contestant.name, name, figures)
    return "  ".join(f"{key} {value:,.4g}" for key, value in figures.items())


def perform(steps: list[Step], ready: dict[str, Stand], run: Run, minutes: float, unfinished: Path) -> None:
    """Run all steps that are not done. A measure that failed in one round is left out in the next."""
    started, count = time.monotonic(), 0
    left = [step for step in steps if step not in run.done and step[2] in ready]
    for position, step in enumerate(left):
        number, name, contestant = step
        spent = time.monotonic() - started
        if spent > minutes * 60:
            say(f"out of time: {len(left) - position} steps are left out")
            return
        begun = time.monotonic()
        if not run.record.failed(contestant, name):
            line = measure(ready[contestant], name, run)
            count += 1
            spent = time.monotonic() - started
            rest = spent / count * (len(left) - position - 1) / 60
            say(
                f"{position + 1}/{len(left)}, {rest:.0f} min left, round {number + 1}: {name}, {contestant}: {line}"
            )
        run.done.add(step)
        run.seconds += time.monotonic() - begun
        run.save(unfinished)


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def stop(number: int, frame: object) -> None:
    """End the run on SIGTERM as on Ctrl-C, so that every child is ended."""
    raise KeyboardInterrupt


def write(record: Record, target: Path) -> None:
    """Write the record and its page to a folder; in the repository, the README, too."""
    record.save(target / "results.json")
    workflows = report.read(HERE / "results.md", report.WORKFLOWS)
    (target / "results.md").write_text(report.page(record, workflows))
    if target == HERE:
        report.fill(HERE.parent / "README.md", report.excerpt(record))
    say(f"written: {target / 'results.md'}")


def main() -> int:
    """Measure, write the results, and return the exit code."""
    asked = parse()
    unfinished = cache() / "unfinished.json"
    if asked.report:
        write(Record.load(HERE / "results.json"), HERE)
        return 0
    if asked.resume:
        run = Run.load(unfinished)
        asked = parse(run.arguments)
    else:
        run = Run(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", sys.argv[1:])
    if asked.quick and not asked.only:
        asked.only = f"{OURS},{NEW}"
    contestants = chosen(asked.only)
    steps = planned(contestants, asked)
    signal.signal(signal.SIGTERM, stop)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="celery5-bench-") as folder:
        try:
            with Server() as server:
                say(f"{len(steps) - len(run.done)} steps; the load is {load:.2f}")
                ready = stands(contestants, server, Path(folder), asked, run)
                perform(steps, ready, run, asked.limit, unfinished)
                version = server.version
        except NoServer as error:
            say(str(error))
            return 1
        except KeyboardInterrupt:
            say("stopped; go on with --resume")
            return 130
        finally:
            children.end_all()
    total = 1 + max((number for number, _, _ in run.done), default=0)
    run.record.runs[run.name] = report.machine(version, total, asked.quick, load, run.seconds)
    complete = not (asked.quick or asked.only or asked.measures or asked.jobs)
    target = HERE if complete or asked.publish else cache()
    merged = Record.load(target / "results.json")
    merged.merge(run.record)
    write(merged, target)
    unfinished.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
