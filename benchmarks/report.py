"""Make the tables from the record; nothing in them is written by hand."""

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from contestants import (
    BOXED,
    CONTESTANTS,
    NEITHER,
    NEW,
    NO_HISTORY,
    NO_LOG,
    OLD_PYTHON,
    OLDER,
    OURS,
    OWN,
    PYTHON,
    TRIO,
    Contestant,
)
from goals import LESS_IS_BETTER, Goal, Medians, best, budgets, goals
from record import Record

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
WORKFLOWS = "<!-- workflows:start -->", "<!-- workflows:end -->"

# Of each figure: the measure that it comes from, and its name.
SPEED = {
    "enqueue": ("enqueue", "send one by one, jobs/s"),
    "bulk": ("drain1", "send in bulk, jobs/s"),
    "drain1": ("drain1", "drain, 1 process, jobs/s"),
    "drain2": ("drain2", "drain, 2 processes, jobs/s"),
    "cpu_us1": ("drain1", "worker + Redis CPU, 1 process, µs a job"),
    "cpu_us2": ("drain2", "worker + Redis CPU, 2 processes, µs a job"),
    "p50": ("latency", "round trip p50, ms"),
    "p99": ("latency", "round trip p99, ms"),
    "naps": ("naps", "5,000 x 50 ms at 100, s"),
    "work": ("work", "realistic jobs/s, 1 process"),
    "echo1k": ("echo", "1 KiB and back, jobs/s, 1 process"),
    "echo100k": ("echo", "100 KiB and back, jobs/s, 1 process"),
    "spread": ("spread", "drain of 20 queues, jobs/s, 1 process"),
    "startup1": ("drain1", "start to first job, s"),
    "recovery": ("kill", "all done after SIGKILL, s"),
    "bytes": ("enqueue", "bytes of Redis a queued job"),
    "pss": ("idle", "idle worker, PSS, MiB"),
}
README_SPEED = [
    *("enqueue", "bulk", "drain1", "cpu_us1", "p50", "p99", "work", "echo100k", "startup1", "recovery"),
    *("bytes", "pss"),
]
"""The figures of the README: one of each kind, those in which a peer is better included."""
COST = {
    "worker_cpu_us1": ("drain1", "worker CPU, 1 process, µs a job"),
    "server_cpu_us1": ("drain1", "Redis CPU, 1 process, µs a job"),
    "worker_cpu_us2": ("drain2", "worker CPU, 2 processes, µs a job"),
    "server_cpu_us2": ("drain2", "Redis CPU, 2 processes, µs a job"),
    "enqueue_cpu_us": ("enqueue", "producer CPU one by one, µs a job"),
    "bulk_cpu_us": ("drain1", "producer CPU in bulk, µs a job"),
    "commands": ("commands", "requests a job, worker"),
    "rss": ("idle", "idle worker, RSS, MiB"),
    "idle_commands": ("idle", "idle worker, requests/s"),
    "idle_cpu_ms": ("idle", "idle worker, CPU, ms/s"),
}
OLDER_SPEED = (
    "enqueue",
    "bulk",
    "drain1",
    "drain2",
    "cpu_us1",
    "p50",
    "p99",
    "naps",
    "startup1",
    "bytes",
    "pss",
)
NOTES = """\
How to read it. Every contestant ran as whole processes against one Redis without persistence, over TCP on loopback,
in its own environment. Rounds are interleaved, the order of the contestants changes, figures are medians.
Older peers have one round in a full run, the others three.

- *Drain*: the queue is filled first. The rate counts from the moment when the last process began its first job to the
  last job, by time stamps that the jobs write to shared memory; start-up does not count. Two processes share two cores
  with Redis. Concurrency of each peer: the one at which it drained fastest when tried (`benchmarks/contestants.py`).
- Peers keep **no results** while draining (celery `ignore_result`, rq and arq with a time of 0, saq `ttl=-1`, streaq
  `ttl=0`, dramatiq, huey and taskiq without a result store). celery5 stores every outcome, logs every job, renews its
  leases and has its breakers on. For round trips all of them store results.
- celery acknowledges a job before it runs, huey and taskiq's list take it off the queue: a killed worker loses those
  jobs. dramatiq, rq, arq, saq, taskiq's streams, streaq and celery5 acknowledge afterwards. celery5 settles jobs in
  batches, so at the last stamp its last batch is still to be settled. taskiq's streams are never trimmed.
- Asynchronous peers run coroutines. celery, dramatiq, huey and rq run plain functions in threads or processes, their
  native way; a sleeping job of theirs holds a thread.
- *Bulk*: 1,000 jobs a call for celery and dramatiq (`group`), rq and streaq (`enqueue_many`), celery5 (`send_many`) and
  redis-py (a pipeline). huey's `map` sends one by one. arq, saq and taskiq have no call for many:
  many coroutines at once.
- *Round trip*: by each peer's documented way of waiting. arq, saq and taskiq poll for results (here every 1 ms),
  dramatiq and rq block on a key, huey on its notification; celery and streaq wait for a published message. streaq
  spends 100 ms on closing its subscription.
- arq's worker polls its queue every 10 ms here; its default of 500 ms would cap the drain. Its idle requests show it.
- *Requests per job* are what MONITOR shows less the commands inside scripts, start-up included, over at most 5,000 jobs
  in its own pass. A pipeline of ten commands counts as ten requests, one script over a hundred jobs as one.
- *RSS* sums all processes of one worker, parents included, and counts pages that they share in each.
- *Bytes per queued job*: growth of the server's `used_memory` over the jobs sent one by one.
- *Left when all results expired*: what 5,000 jobs leave in the server beyond what ten leave, with results kept for 1 s.
- *Moving a due job*: jobs of one trip, in the median trip of 40, as the client sees it; the jobs that wait an hour
  ahead are written with bare commands (`benchmarks/due.py`).
- *Concurrency keys*: one worker, jobs of 2 ms, limit=1; 10,000 jobs with 1,000 keys. Commands are those that the server
  makes in scripts and outside, start-up and heartbeats included; the slowest script is what its slow log says, which on
  a machine that does something else counts that, too (`benchmarks/gates.py`).
- *CPU a job* is what the processes of the worker, its parents and supervisors included, and the server used from the
  first job to the last, start-up excluded. It differs less from machine to machine than a rate does.
- *Realistic job*: 1 ms of computing, 5 ms of waiting, 1 KiB of argument and of result; 100 at once. One process can do
  1,000 a second at most, since it computes on one core at a time.
- *1 KiB and back*, *100 KiB and back*: a job that returns its argument; every peer stores the result for a minute.
- *20 queues*: the jobs are in 20 queues in equal numbers, which one worker serves. ArdiQ has lanes of one queue, here
  of equal weight.
- *All done after SIGKILL*: two workers at a concurrency of 100, 1,500 jobs of 50 ms; one of them is killed with its
  children after 1,000 jobs, and started again 0.5 s later. The time is from the kill until every job has ended. Where a
  lost worker's jobs run again after a time that can be set, it is 10 s.
- *PSS* of one worker sums all of its processes; a page that several processes share counts once.
- *The new generation*: BlitzQ 1.1 in reliable mode, its asynchronous calls, as many threads as jobs at once; ArdiQ with
  prepared calls; mayu with threads (its default on a Python with a GIL is one process for each job); tarsk's build for
  Redis with coroutines. None of them documents uvloop, and none has it here. mayu and tarsk send one by one only. mayu
  runs on Python 3.13 and above only, BlitzQ and ArdiQ on 3.12 and above, so all contestants run on 3.13.
- *Boxed*: a no-op `def` with `boxed=True`, `--cpu-slots 1`: the whole time that a job takes when the next one waits for
  its end, the hand-over to a warm process and back included.
- *No log* is `--log-level error`, *no history* is `job_history=0`. There is no switch for breakers and leases: they are
  part of every figure.
"""


def machine(server: str, rounds: int, quick: bool, load: float, seconds: float) -> dict[str, str]:
    """Return where and when the measurement took place."""
    model = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "CPU": f"{model}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "Python": f"CPython {PYTHON}",
        "server": server,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "rounds": f"{rounds}{', quick: figures are rough' if quick else ''}",
        "load before": f"{load:.2f}",
        "took": f"{seconds / 60:.1f} minutes",
    }


def number(value: float | None) -> str:
    """Return a number with three significant digits."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def of_groups(*groups: str) -> list[Contestant]:
    """Return the contestants of some groups, in their order."""
    return [contestant for group in groups for contestant in CONTESTANTS if contestant.group == group]


class Reasons:
    """Numbers the reasons why cells are empty, for the notes below a table."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._numbers: dict[str, int] = {}

    def cell(self, contestant: Contestant, measure: str) -> str:
        """Return what stands in an empty cell: a dash, or the number of the reason."""
        reason = self._record.failed(contestant.name, measure) or self._record.failed(
            contestant.name, "environment"
        )
        reason = f"failed: {reason}" if reason else contestant.skipped(measure) or ""
        if not reason:
            return "-"
        return f"- ({self._numbers.setdefault(f'{contestant.name}: {reason}', len(self._numbers) + 1)})"

    def listed(self) -> str:
        """Return the reasons, with their numbers."""
        return "\n".join(f"({number}) {reason}  " for reason, number in self._numbers.items())


def table(
    record: Record,
    contestants: Sequence[Contestant],
    figures: Mapping[str, tuple[str, str]],
    *,
    turned: bool = False,
    older: bool = False,
) -> str:
    """Return a table with a column for each contestant, or with a row for each when it is `turned`.

    The best figure of all is bold. With `older`, the last column is the best older peer.
    """
    medians, reasons = record.medians(), Reasons(record)
    contestants = [contestant for contestant in contestants if contestant.name in record.entries]
    names = [
        f"**{contestant.name}**" if contestant.group == OURS else contestant.name
        for contestant in contestants
    ]
    grid = [["", *names, *(["best older peer"] if older else [])]]
    for figure, (measure, label) in figures.items():
        values = {contestant.name: medians.get(contestant.name, {}).get(figure) for contestant in contestants}
        older_best = best(medians, figure, (OLDER,)) if older else None
        known = [value for value in values.values() if value is not None]
        known += [older_best[0]] if older_best else []
        top = (min if figure in LESS_IS_BETTER else max)(known, default=None)
        cells = [
            reasons.cell(contestant, measure)
            if (value := values[contestant.name]) is None
            else _bold(number(value), value == top)
            for contestant in contestants
        ]
        if older:
            cells.append(
                f"{_bold(number(older_best[0]), older_best[0] == top)} {older_best[1]}" if older_best else "-"
            )
        grid.append([label, *cells])
    rows = [list(row) for row in zip(*grid, strict=True)] if turned else grid
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"|---|{'---:|' * (len(rows[0]) - 1)}")
    listed = reasons.listed()
    return "\n".join(lines) + (f"\n\n{listed}" if listed else "")


def _bold(text: str, is_best: bool) -> str:
    return f"**{text}**" if is_best else text


def own_rows(medians: Medians) -> str:
    """Return what the log, the history, an older Python and boxes cost."""
    base = medians.get(TRIO, {})
    lines = [
        "| | drain, 1 process, jobs/s | worker + Redis CPU, µs a job | CPU, share of Trio's |",
        "|---|---:|---:|---:|",
    ]
    for name in (TRIO, NO_LOG, NO_HISTORY, NEITHER, OLD_PYTHON, BOXED):
        figures = medians.get(name, {})
        used, whole = figures.get("cpu_us1"), base.get("cpu_us1")
        share = f"{used / whole:.0%}" if used is not None and whole else "-"
        lines.append(f"| {name} | {number(figures.get('drain1'))} | {number(used)} | {share} |")
    return "\n".join(lines)


def goals_table(reached: Sequence[Goal]) -> str:
    """Return a table of goals."""
    lines = ["| goal | asked | measured | |", "|---|---:|---:|---|"]
    lines += [
        f"| {goal.label} | {goal.sign} {goal.limit:g} | {number(goal.value)} | {goal.verdict} |"
        for goal in reached
    ]
    return "\n".join(lines)


def spread(record: Record, contestants: Sequence[Contestant], figures: Sequence[str]) -> str:
    """Return the lowest and the highest sample of figures."""
    samples = record.samples()
    shown = [contestant.name for contestant in contestants if contestant.name in samples]
    lines = [f"| | {' | '.join(shown)} |", f"|---|{'---|' * len(shown)}"]
    for figure in figures:
        cells = [
            f"{number(min(values))} to {number(max(values))}"
            if (values := samples[name].get(figure))
            else "-"
            for name in shown
        ]
        lines.append(f"| {SPEED[figure][1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def described(facts: Mapping[str, str]) -> str:
    """Return the machine in one line."""
    return "; ".join(f"{key}: {value}" for key, value in facts.items())


def provenance(record: Record) -> str:
    """Return where and when it was measured, and what comes from which run when there were several."""
    lines = []
    for run, facts in sorted(record.runs.items()):
        parts = [
            f"{name} ({', '.join(measures)})"
            for name, entries in record.entries.items()
            if (measures := [measure for measure, entry in entries.items() if entry.run == run])
        ]
        what = "" if len(record.runs) == 1 else f" Of this run: {'; '.join(parts)}."
        lines.append(f"{described(facts)}.{what}")
    several = "Figures of different runs compare less well than those of one.\n\n" if len(lines) > 1 else ""
    return several + "\n\n".join(lines)


def failures(record: Record) -> str:
    """Return a line for each measure that failed, or failed once in several rounds."""
    lines = [
        f"- **{name}, {measure}**: {entry.failure}"
        for name, entries in record.entries.items()
        for measure, entry in entries.items()
        if entry.failure
    ]
    return "\n".join(lines) or "None."


def page(record: Record, workflows: str) -> str:
    """Return the whole text of results.md. `workflows` is its part that is measured apart."""
    medians, modern, older = record.medians(), of_groups(OURS, NEW), of_groups(OLDER)
    versions = ", ".join(
        dict.fromkeys(contestant.packages[0] for contestant in CONTESTANTS if "==" in contestant.packages[0])
    )
    older_speed = {figure: SPEED[figure] for figure in OLDER_SPEED}
    parts = [
        "# Measured",
        f"Made by `nox -s bench`; do not edit. {provenance(record)}",
        f"Versions: {versions}. The best figure of a row, or of a column of older peers, is bold.",
        "## Speed, and what it costs",
        table(record, modern, SPEED, older=True),
        table(record, modern, COST),
        "## Older peers",
        table(record, older, older_speed, turned=True),
        table(record, older, COST, turned=True),
        "## The log, the history, boxes, and the bare limits",
        own_rows(medians),
        table(
            record,
            [c for c in of_groups(OWN) if not c.only & {"drain1"}],
            {"enqueue": SPEED["enqueue"], "bulk": ("bulk", SPEED["bulk"][1])},
            turned=True,
        ),
        "## Goals",
        goals_table(goals(medians)),
        "## Budgets",
        goals_table(budgets(medians)),
        "## Notes",
        NOTES.strip(),
        "## Workflows",
        f"{WORKFLOWS[0]}\n{workflows}\n{WORKFLOWS[1]}",
        "## Ordered streams",
        "They are on [a page of their own](streams.md).",
        "## Failures",
        failures(record),
        "## Spread: lowest to highest sample",
        spread(record, modern, list(SPEED)),
        spread(record, older, OLDER_SPEED),
    ]
    return "\n\n".join(parts) + "\n"


def excerpt(record: Record) -> str:
    """Return the text for the README."""
    facts = record.runs[max(record.runs)]
    setup = f"{facts['CPU']}; {facts['Python']}; {facts['server']}; {facts['date']}"
    one = "one run" if len(record.runs) == 1 else f"{len(record.runs)} runs"
    reached = goals(record.medians())
    met = sum(goal.verdict == "met" for goal in reached)
    parts = [
        table(record, of_groups(OURS, NEW), {figure: SPEED[figure] for figure in README_SPEED}, older=True),
        f"Medians of {facts['rounds']} interleaved rounds of {one} (older peers: of one), Redis on the same host; the "
        "best of each row is bold, whoever it is. CPU a job differs less from machine to machine than rates do. All "
        f"contestants run on one Python, since some peers run on no older one. {setup}.",
        "How it was measured, all figures with the lowest and highest samples, older peers one by one, and our own "
        f"goals, of which {met} of {len(reached)} are met: [benchmarks/results.md](benchmarks/results.md).",
    ]
    return "\n\n".join(parts)


def read(document: Path, marks: tuple[str, str] = (START, END)) -> str:
    """Return the text between the marks of a document; "" when it has none."""
    text = document.read_text() if document.exists() else ""
    return text.partition(marks[0])[2].partition(marks[1])[0].strip()


def fill(document: Path, text: str, marks: tuple[str, str] = (START, END)) -> None:
    """Write `text` between the marks of a document, if it has them."""
    if not document.exists():
        return
    old, (start, end) = document.read_text(), marks
    if start in old and end in old:
        head, _, rest = old.partition(start)
        document.write_text(f"{head}{start}\n{text}\n{end}{rest.partition(end)[2]}")
