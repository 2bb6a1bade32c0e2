"""Make the tables from the samples; nothing in them is written by hand."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from contestants import BARE, CONTESTANTS, OURS, PEERLESS, SILENT

Samples = dict[str, dict[str, list[float]]]
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
WORKFLOWS = "<!-- workflows:start -->", "<!-- workflows:end -->"

SPEED = {
    "enqueue": "enqueue/s, one by one",
    "bulk": "enqueue/s, bulk",
    "drain1": "drain jobs/s, 1 process",
    "drain2": "drain jobs/s, 2 processes",
    "p50": "round trip p50, ms",
    "p99": "p99, ms",
    "naps": "5,000 x 50 ms at 100, s",
    "startup1": "start to first job, s",
}
COST = {
    "commands": "requests per job, worker",
    "worker_cpu_us1": "worker CPU µs per job",
    "server_cpu_us1": "server CPU µs per job",
    "enqueue_cpu_us": "producer CPU µs per job, one by one",
    "bytes": "bytes per queued job",
    "rss": "idle worker RSS, MiB",
    "idle_commands": "idle requests/s",
    "idle_cpu_ms": "idle CPU ms/s",
    "logged": "share of jobs logged",
}
GATED = (
    ("commands", "commands per job with a concurrency key", 20.0),
    ("script_ms", "slowest script with concurrency keys, ms", 2.0),
    ("pause_ms", "end of a job to the next start of its key, p50, ms", 3.0),
)
LESS_IS_BETTER = {"p50", "p99", "naps", "startup1", *COST} - {"logged"}
NOTES = """\
How to read it. Every contestant ran as whole processes against one Redis without persistence, over TCP on loopback,
in its own environment. Rounds are interleaved, the order of the contestants changes, figures are medians.

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
- *Log off* is `--log-level error`. There is no switch for breakers and leases: they are part of every figure.
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
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "server": server,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "rounds": f"{rounds}{', quick: figures are rough' if quick else ''}",
        "load before": f"{load:.2f}",
        "took": f"{seconds / 60:.1f} minutes",
    }


def medians(figures: Samples) -> dict[str, dict[str, float]]:
    """Return the median of each figure."""
    return {name: {key: median(values) for key, values in kept.items()} for name, kept in figures.items()}


def number(value: float | None) -> str:
    """Return a number with three significant digits."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def best(told: dict[str, dict[str, float]], figure: str) -> float | None:
    """Return the best figure of all peers."""
    values = [figures[figure] for name, figures in told.items() if name not in PEERLESS and figure in figures]
    if not values:
        return None
    return min(values) if figure in LESS_IS_BETTER else max(values)


def table(told: dict[str, dict[str, float]], columns: dict[str, str]) -> str:
    """Return a row for each contestant, with the best peer of each column in bold."""
    lines = ["| | " + " | ".join(columns.values()) + " |", "|---|" + "---:|" * len(columns)]
    bests = {figure: best(told, figure) for figure in columns}
    for contestant in CONTESTANTS:
        if contestant.name not in told:
            continue
        cells = []
        for figure in columns:
            value = told[contestant.name].get(figure)
            shown = number(value)
            is_best = value is not None and value == bests[figure] and contestant.name not in PEERLESS
            cells.append(f"**{shown}**" if is_best else shown)
        name = f"**{contestant.name}**" if contestant.name == OURS else contestant.name
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def budgets(told: dict[str, dict[str, float]]) -> str:
    """Return a table of celery5's figures and the limits of part 8 of DESIGN."""
    ours = told.get(OURS, {})
    bare = told.get(BARE, {}).get("enqueue")
    rows = (
        (
            "drain, 1 process, times the best peer",
            _ratio(ours.get("drain1"), best(told, "drain1")),
            ">=",
            10.0,
        ),
        (
            "drain, 2 processes, times the best peer",
            _ratio(ours.get("drain2"), best(told, "drain2")),
            ">=",
            8.0,
        ),
        ("requests per job on the worker's side", ours.get("commands"), "<=", 0.2),
        ("round trip p50, share of the best peer's", _ratio(ours.get("p50"), best(told, "p50")), "<=", 0.6),
        ("5,000 x 50 ms at 100, s", ours.get("naps"), "<=", 2.6),
        ("enqueue one by one, share of bare XADD", _ratio(ours.get("enqueue"), bare), ">=", 0.8),
        ("bulk enqueue, times the best peer", _ratio(ours.get("bulk"), best(told, "bulk")), ">=", 6.0),
        ("bytes per queued job", ours.get("bytes"), "<=", 300.0),
        ("bytes left when all results expired", ours.get("left"), "<=", 0.0),
        ("keys left when all results expired", ours.get("left_keys"), "<=", 0.0),
        ("idle worker, RSS MiB", ours.get("rss"), "<=", 60.0),
        ("idle worker, requests/s", ours.get("idle_commands"), "<=", 1.0),
        *(
            (f"{label}, {keys} keys", ours.get(f"gated_{figure}_{keys}"), "<=", bound)
            for figure, label, bound in GATED
            for keys in (("1", "12") if figure == "pause_ms" else ("1", "12", "1000"))
        ),
        ("moving a due job, a million waiting, times a thousand waiting", ours.get("due_flat"), "<=", 2.0),
        (
            "drain with the log on, share of off",
            _ratio(ours.get("drain1"), told.get(SILENT, {}).get("drain1")),
            ">=",
            0.85,
        ),
    )
    lines = ["| budget | asked | measured | |", "|---|---:|---:|---|"]
    for label, value, sign, limit in rows:
        if value is None:
            verdict = "not measured"
        else:
            verdict = "met" if (value >= limit if sign == ">=" else value <= limit) else "**missed**"
        lines.append(f"| {label} | {sign} {limit:g} | {number(value)} | {verdict} |")
    return "\n".join(lines)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def spread(figures: Samples) -> str:
    """Return the lowest and the highest sample of the figures in SPEED."""
    lines = ["| | " + " | ".join(SPEED.values()) + " |", "|---|" + "---|" * len(SPEED)]
    for contestant in CONTESTANTS:
        if samples := figures.get(contestant.name):
            cells = [
                f"{number(min(samples[key]))} to {number(max(samples[key]))}" if key in samples else "-"
                for key in SPEED
            ]
            lines.append(f"| {contestant.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def missing(failures: dict[str, dict[str, str]]) -> str:
    """Return why cells are empty."""
    lines = [
        f"- {contestant.name}, {measure}: {reason}"
        for contestant in CONTESTANTS
        for measure, reason in contestant.skips.items()
    ]
    for name, measures in failures.items():
        lines += [
            f"- **{name}, {measure} failed**: {' '.join(reason.split())}"
            for measure, reason in measures.items()
        ]
    return "\n".join(lines)


def described(facts: dict[str, str]) -> str:
    """Return the machine in one line."""
    return "; ".join(f"{key}: {value}" for key, value in facts.items())


def page(facts: dict[str, str], figures: Samples, failures: dict[str, dict[str, str]], workflows: str) -> str:
    """Return the whole text of results.md. `workflows` is its part that is measured apart."""
    medians_by_name = medians(figures)
    versions = ", ".join(
        dict.fromkeys(contestant.packages[0] for contestant in CONTESTANTS if "==" in contestant.packages[0])
    )
    parts = [
        "# Measured",
        f"Made by `python benchmarks/run.py`; do not edit. {described(facts)}.",
        f"Versions: {versions}. The best peer of a column is bold.",
        table(medians_by_name, SPEED),
        table(medians_by_name, COST),
        "## Budgets",
        budgets(medians_by_name),
        "## Notes",
        NOTES.strip(),
        "## Workflows",
        f"{WORKFLOWS[0]}\n{workflows}\n{WORKFLOWS[1]}",
        "## Ordered streams",
        "They are on [a page of their own](streams.md).",
        "## Empty cells",
        missing(failures),
        "## Spread: lowest to highest sample",
        spread(figures),
    ]
    return "\n\n".join(parts) + "\n"


def excerpt(facts: dict[str, str], figures: Samples) -> str:
    """Return the text for the README."""
    medians_by_name = medians(figures)
    columns = {key: SPEED[key] for key in ("enqueue", "bulk", "drain1", "drain2", "p50", "naps")}
    setup = f"{facts['CPU']}; {facts['Python']}; {facts['server']}; {facts['date']}"
    method = f"Medians of {facts['rounds']} rounds, Redis on the same host; the best peer is bold"
    return f"{table(medians_by_name, columns)}\n\n{setup}. {method}. How it was measured: `benchmarks/results.md`."


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
