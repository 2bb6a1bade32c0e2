"""Measure workflows beside those of the peers, and what ours cost against jobs without a workflow.

    python benchmarks/workflows.py                            three rounds of everything
    python benchmarks/workflows.py --rounds 1 --only celery5  ours alone
    python benchmarks/workflows.py --measures pair,large

celery5 must be importable: run it in its environment. Peers get environments of their own. Each round measures all of
them in turn on one server, and medians count: the machine's own speed changes between rounds. With `--publish` the
tables go to `results.md`.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import children
import report
from contestants import CONTESTANTS, TRIO, Contestant
from environments import CannotPrepare, prepare
from measures import Failed, Figures
from redis.exceptions import RedisError
from server import Server
from workflow_limits import GOALS, LIMITS
from workflow_stand import WorkflowStand

from celery5.errors import CeleryError

MEMBERS = 1_000
HOPS = 100
CHAINS, LINKS = 1_000, 10
LAPS = 3
LIMIT = 120.0
STARTED_AFTER = 1.5
OURS = "celery5"
PEERS = ("celery", "celery, threads", "dramatiq", "taskiq, streams", "taskiq, list", "streaq", OURS)
GROUP = "celery5, group of calls"
COLUMNS = {
    "fan_in_ms": f"{MEMBERS:,} members and a body, ms",
    "members": "members/s",
    "hop_ms": f"chain of {HOPS}, ms a hop",
    "hops": f"{CHAINS:,} chains of {LINKS}, hops/s",
}
HIGHEST = ("script_ms", "plain_script_ms")
"""Figures of which the highest counts instead of the median."""
LESS_IS_BETTER = ("fan_in_ms", "hop_ms")


def fan_in(stand: WorkflowStand) -> Figures:
    """Run members and a body, from the start to the body's result."""
    with stand.with_worker():
        time.sleep(STARTED_AFTER)
        lap = median(stand.run_workflows("fan_in", MEMBERS, LAPS)["laps"])
    return {"fan_in_ms": lap, "members": MEMBERS / lap * 1000}


def chain(stand: WorkflowStand) -> Figures:
    """Run a chain, from the start to the last job's result."""
    with stand.with_worker():
        time.sleep(STARTED_AFTER)
        return {"hop_ms": median(stand.run_workflows("chain", HOPS, LAPS)["laps"]) / HOPS}


def chains(stand: WorkflowStand) -> Figures:
    """Run many chains, from the start of the first to the last job of all."""
    with stand.with_worker() as workers:
        time.sleep(STARTED_AFTER)
        began = stand.run_workflows("chains", CHAINS, LINKS)["began"]
        last = stand.drained(CHAINS * LINKS, workers).last()
    return {"hops": CHAINS * LINKS / (last - began) * 1e9}


CONTEST: dict[str, Callable[[WorkflowStand], Figures]] = {
    "fan_in": fan_in,
    "chain": chain,
    "chains": chains,
}

NOTES = """\
Each contestant has one worker on one Redis without persistence. The body gets the results of its members with Celery,
taskiq and celery5; with Dramatiq and streaQ it does not. taskiq's map polls every 10 ms here; its default is 500 ms.
*celery5* maps a task over a range; *group of calls* has each call made by itself, as streaQ and Dramatiq do."""
OWN_NOTES = """\
One worker process. Times of scripts are by the slow log, of the wall clock, on two cores that worker, producer and
Redis share; the first script of each measure is compiled in it."""


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure workflows.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contestants, separated by semicolons")
    parser.add_argument("--measures", default="", help=f"of {','.join([*CONTEST, *LIMITS])}")
    parser.add_argument("--publish", action="store_true", help="write results.md")
    return parser.parse_args()


def stands(only: set[str], server: Server, folder: Path) -> list[WorkflowStand]:
    """Return the contestants whose environment could be made."""
    known = {contestant.name: contestant for contestant in CONTESTANTS}
    known[OURS] = replace(known[TRIO], name=OURS)
    group = replace(known[OURS], name=GROUP, variant="group")
    found = []
    for contestant in (*(known[name] for name in PEERS), group):
        if only and contestant.name not in only:
            continue
        try:
            python = Path(sys.executable) if contestant.environment == "celery5" else prepare(contestant)
        except CannotPrepare as error:
            say(f"{contestant.name}: no environment: {error}")
            continue
        subfolder = folder / contestant.module / (contestant.variant or "plain")
        subfolder.mkdir(parents=True)
        found.append(WorkflowStand(contestant, python, server, subfolder, 1.0, LIMIT))
    return found


def measure(contestant: Contestant, name: str, run: Callable[[], Figures], samples: report.Samples) -> None:
    """Run a measure and keep its figures. A failure is printed, and does not stop the run."""
    try:
        figures = run()
    except (Failed, RedisError, CeleryError, OSError) as error:
        say(f"  {contestant.name:24} {name:9} failed: {type(error).__name__}: {error}")
        return
    for figure, value in figures.items():
        samples[contestant.name][figure].append(value)
    shown = "  ".join(f"{key} {value:,.4g}" for key, value in figures.items())
    say(f"  {contestant.name:24} {name:9} {shown}  (load {os.getloadavg()[0]:.1f})")


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def rounds(all_stands: list[WorkflowStand], asked: argparse.Namespace, samples: report.Samples) -> None:
    """Run all measures for all contestants in turn, in random order."""
    wanted = set(filter(None, asked.measures.split(","))) or {*CONTEST, *LIMITS}
    for number in range(asked.rounds):
        for name, how in CONTEST.items():
            for stand in random.sample(all_stands, len(all_stands)) if name in wanted else ():
                if stand.contestant.name != GROUP or name == "fan_in":
                    measure(stand.contestant, name, lambda s=stand, h=how: h(s), samples)
        ours = next((stand for stand in all_stands if stand.contestant.name == OURS), None)
        for name, (limit, every_round) in LIMITS.items():
            if ours and name in wanted and (every_round or number == 0):
                measure(ours.contestant, name, lambda s=ours, h=limit: h(s), samples)


def table(samples: report.Samples) -> str:
    """Return the table of all contestants, with how many times the best peer ours is."""
    told = report.medians(samples)
    lines = [
        "| | " + " | ".join(COLUMNS.values()) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name, figures in told.items():
        cells = " | ".join(report.number(figures.get(figure)) for figure in COLUMNS)
        lines.append(f"| {f'**{name}**' if name == OURS else name} | {cells} |")
    cells = []
    for figure in COLUMNS:
        peers = [f[figure] for name, f in told.items() if name not in (OURS, GROUP) and figure in f]
        ours = told.get(OURS, {}).get(figure)
        if not peers or not ours:
            cells.append("-")
            continue
        less = figure in LESS_IS_BETTER
        cells.append(report.number(min(peers) / ours if less else ours / max(peers)))
    lines.append(f"| times the best peer | {' | '.join(cells)} |")
    return "\n".join(lines)


def goals(samples: report.Samples) -> str:
    """Return the table of our own figures beside their goals."""
    lines = ["| | goal | measured | lowest to highest | |", "|---|---:|---:|---:|---|"]
    for figure, (text, goal) in GOALS.items():
        values = samples.get(OURS, {}).get(figure)
        if not values:
            continue
        middle = max(values) if figure in HIGHEST else median(values)
        verdict = asked = ""
        if goal:
            asked = f"{'>=' if goal > 0 else '<='} {abs(goal):g}"
            met = middle >= goal if goal > 0 else middle <= -goal
            verdict = "met" if met else "**missed**"
        spread = f"{report.number(min(values))} to {report.number(max(values))}"
        lines.append(f"| {text} | {asked} | {report.number(middle)} | {spread} | {verdict} |")
    return "\n".join(lines)


def page(facts: dict[str, str], samples: report.Samples) -> str:
    """Return the part of results.md."""
    parts = [
        f"Made by `nox -s bench -- workflows --rounds {facts['rounds']} --publish`; do not edit. "
        f"{report.described(facts)}. Medians.",
        NOTES,
        table(samples),
        "### Against our goals",
        OWN_NOTES,
        goals(samples),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Measure, and print the tables."""
    asked, start, load = options(), time.time(), os.getloadavg()[0]
    samples: report.Samples = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="celery5-bench-") as folder, Server() as server:
        only = set(filter(None, asked.only.split(";")))
        machine = report.machine(server.version, asked.rounds, False, load, 0)
        try:
            rounds(stands(only, server, Path(folder)), asked, samples)
        except KeyboardInterrupt:
            say("stopped: what was measured follows")
        finally:
            children.end_all()
    machine["took"] = f"{(time.time() - start) / 60:.1f} minutes"
    machine["load after"] = f"{os.getloadavg()[0]:.2f}"
    text = page(machine, samples)
    print(text)
    if asked.publish:
        report.fill(Path(__file__).parent / "results.md", text, report.WORKFLOWS)
    print("\n" + json.dumps(samples), file=sys.stderr)


if __name__ == "__main__":
    main()
