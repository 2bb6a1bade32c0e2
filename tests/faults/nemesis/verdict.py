"""Verdict: what must be true of a recorded run, whatever struck it. Pure.

Which doubles are allowed: a job may run again when the worker of its earlier run was killed after that had begun, or
was stopped or cut off from Redis by itself, for so long that its lease may have lapsed. What struck Redis, and so all
workers alike, excuses nothing, but for a job with a limit: a worker cancels that when its own clock says that its lease
is over. Each excuse is kept with its reason.

A failover excuses more, for Redis replicates after it has answered: what was written in the moment before it may be
lost. So a job whose outcome was written then may run again, and what was sent then without waiting for a replica may be
missing. Jobs are sent with `replicas=1`, so one that was accepted is never lost. A primary that is cut off from the
other servers only loses what it has accepted since then: in a cluster until another one has taken over, at the latest.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.faults.nemesis.application import MEMBERS, RATE
from tests.faults.nemesis.schedule import SERVERS

RECONNECT = 2.0
"""Seconds that a connection may take to be there again after a fault has ended."""
LAPSE = 0.6
"""Part of a lease after which it may have lapsed: it is renewed three times in each."""
MOMENT = 0.05
"""Seconds of overlap that are put down to the clock."""
LATE = 0.6
"""Seconds that a worker which is cut off may take to cancel what it must not run any more; it is a busy machine."""
STOPS = ("stop shortly", "stop", "stop with sidecar", "stop attendant", "stop while memory is full")
CUTS = (
    "partition shortly",
    "partition",
    "partition attendant",
    "refuse connections",
    "slow network",
    "lose a reply of a member",
)
FAILOVERS = ("kill primary", "freeze primary", "cut off primary", "change primary")
"""What makes a replica a primary."""
LAG = 1.0
"""Seconds by which a replica may be behind its primary, on a busy machine."""
RESTART_LIMIT = 10.0
"""Seconds after a failover within which jobs must have ended again."""
LIMITS = {"one": 1, "two": 2, "keyed": 1}
TAKEN = ("first", "second")
"""The steps of a workflow that are undone when it fails."""
STEPS = (*TAKEN, *map(str, range(MEMBERS)), "last")
TERMINAL = {"SUCCESS", "DEAD", "REJECTED", "REVOKED", "EXPIRED"}


@dataclass(frozen=True)
class Sent:
    """What a producer sent: `outcome` is accepted, maybe or refused. `states` are those that it may end in."""

    label: str
    kind: str
    outcome: str
    id: str = ""
    states: frozenset[str] = frozenset({"SUCCESS"})
    not_before: float = 0.0
    revoked: bool = False
    at: float = 0.0
    """When its sending returned."""


@dataclass(frozen=True)
class Run:
    """One run of a job, from the history. `ended` is None when nothing was written: its process was killed."""

    label: str
    job: str
    attempt: int
    pid: int
    began: float
    ended: float | None = None
    whole: bool = False


@dataclass(frozen=True)
class Struck:
    """A fault as it was: its kind, the name and process that it struck, from when to when."""

    kind: str
    name: str
    pid: int
    began: float
    ended: float


@dataclass
class Life:
    """One process: `killed` by us, `ready` when it had come up once, `code` when it has ended."""

    name: str
    pid: int
    began: float
    ended: float | None = None
    killed: bool = False
    ready: bool = False
    code: int | None = None


@dataclass(frozen=True)
class Output:
    """An output of the processor, those of a customer in their order."""

    customer: str
    number: int
    total: int
    at: float = 0.0
    """When it was delivered."""


@dataclass
class Record:
    """All that is known of a run."""

    lease: float
    sent: list[Sent] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    healed: float = 0.0
    stopping: float = float("inf")
    first_begins: dict[str, float] = field(default_factory=dict)
    fire_times: list[str] = field(default_factory=list)
    # The state of each run of a workflow, by its id; the outputs of the processor, and its sum for each customer.
    run_states: dict[str, str] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)
    excuses: list[str] = field(default_factory=list)


def runs_of(history: str) -> list[Run]:
    """Read the history, as far as it is written: the end of the last line may be on its way."""
    found: list[Run] = []
    running: dict[tuple[str, str, str], int] = {}
    for line in history[: history.rfind("\n") + 1].splitlines():
        label, what, pid, attempt, job, at = line.split()
        key = (job, pid, attempt)
        if what == "begin":
            running[key] = len(found)
            found.append(Run(label, job, int(attempt), int(pid), float(at)))
        elif key in running:
            begun = found[place := running.pop(key)]
            found[place] = Run(
                begun.label, job, begun.attempt, begun.pid, begun.began, float(at), what == "end"
            )
    return found


def violations(record: Record) -> list[str]:
    """Return what is wrong, in one line each; `record.excuses` then has what was allowed and why."""
    return [
        *lost(record),
        *published_though_refused(record),
        *doubled(record),
        *attempts(record),
        *early(record),
        *beyond_limits(record),
        *too_fast(record),
        *events(record),
        *fire_times(record),
        *workflows(record),
        *outputs(record),
        *ended_by_themselves(record),
    ]


def lost(record: Record) -> Iterator[str]:
    """Every accepted job ends in one of the states that it may end in."""
    for entry in record.sent:
        if entry.outcome != "accepted" or not entry.id:
            continue
        state = record.states.get(entry.id, "UNKNOWN")
        if (
            entry.revoked
            and state == "SUCCESS"
            and excused(record, f"{entry.label} ran though revoked", entry.at)
        ):
            continue
        if state not in entry.states:
            yield f"lost: {entry.label} ({entry.kind}, {entry.id}) is {state}, not {' or '.join(sorted(entry.states))}"


def published_though_refused(record: Record) -> Iterator[str]:
    """What a producer was told was not sent never runs."""
    ran = {run.label.partition("/")[0] for run in record.runs}
    for entry in record.sent:
        if entry.outcome == "refused" and entry.label in ran:
            yield f"maybe_done: {entry.label} ({entry.kind}) ran, and its producer was told that nothing was sent"


def doubled(record: Record) -> Iterator[str]:
    """An attempt of a job begins once, unless each run before the last has an excuse."""
    groups: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in record.runs:
        groups[run.job, run.attempt].append(run)
    for runs in groups.values():
        for before, after in pairwise(sorted(runs, key=lambda run: run.began)):
            why = excuse(record, before, after.began) or excuse_of_late(record, before, after)
            text = f"{before.label} (job {before.job}, attempt {before.attempt}) ran in {name_of(record, before.pid)}"
            text = f"{text} at {before.began:.2f} and in {name_of(record, after.pid)} at {after.began:.2f}"
            if why:
                record.excuses.append(f"{text}: {why}")
            else:
                yield f"double: {text}"


def excuse(record: Record, run: Run, again: float) -> str:
    """Return why a run may be repeated that began again at that time; '' when it may not."""
    life = life_of(record, run.pid)
    if life is None or (life.killed and life.ended is not None and life.ended <= again + MOMENT):
        return "its process was killed"
    if run.ended is not None and not run.whole and again > run.ended and run.ended >= record.stopping:
        return "its worker was stopped in order"
    for own, began, ended in cut_off(record, run.pid):
        if own <= again and ended - began >= LAPSE * record.lease and ended >= run.began:
            return f"its worker was cut off or stopped from {began:.2f} to {ended:.2f}"
    if run.ended is not None and not run.whole and run.label.partition(":")[0] in LIMITS:
        for began, ended in outages(record):
            if ended - began >= LAPSE * record.lease and began <= run.ended <= ended:
                return f"it has a limit and was cancelled: Redis was away from {began:.2f} to {ended:.2f}"
    for began, ended in record.stalls:
        if began <= again and ended >= run.began:
            return f"the machine stood still from {began:.2f} to {ended:.2f}"
    return failover_between(record, run.began, again if run.ended is None else run.ended)


def failover_between(record: Record, first: float, last: float) -> str:
    """Return the failover that may have lost writes between these times; '' for none."""
    for blow in record.struck:
        if blow.kind in FAILOVERS and blow.began - LAG <= last and blow.ended + RECONNECT >= first:
            return f"{blow.kind} {blow.name} from {blow.began:.2f} to {blow.ended:.2f}"
    return ""


def excused(record: Record, text: str, first: float, last: float | None = None) -> bool:
    """Return whether a failover excuses lost writes at this time, or between two times; record the excuse."""
    why = failover_between(record, first, first if last is None else last)
    if why:
        record.excuses.append(f"{text}: {why}")
    return bool(why)


def excuse_of_late(record: Record, run: Run, later: Run) -> str:
    """Return why a job may begin after it ran elsewhere; '' when it may not.

    A worker that had it and was stopped or cut off, so that it went to another one, does not know that yet.
    """
    for _, began, ended in cut_off(record, later.pid):
        if began + LAPSE * record.lease <= run.began and later.began <= ended:
            return f"the worker of the later run was cut off or stopped from {began:.2f} to {ended:.2f}"
    return ""


def cut_off(record: Record, pid: int) -> list[tuple[float, float, float]]:
    """Return when a worker itself could not reach Redis: since when of its own, and from when to when in all.

    That has the time that a new connection takes, and each outage of Redis that meets it: nobody can tell in which of
    them the lease lapsed.
    """
    found: list[tuple[float, float, float]] = []
    for blow in record.struck:
        if blow.pid == pid and blow.kind in STOPS + CUTS:
            began, ended = blow.began, blow.ended + RECONNECT
            for first, last in outages(record):
                if first <= ended and last >= began:
                    began, ended = min(first, began), max(last, ended)
            found.append((blow.began, began, ended))
    return found


def outages(record: Record) -> list[tuple[float, float]]:
    """Return when nobody could use Redis, with the time that new connections take."""
    return merged((blow.began, blow.ended + RECONNECT) for blow in record.struck if blow.name in SERVERS)


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return these spans of time with those joined that meet."""
    found: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def attempts(record: Record) -> Iterator[str]:
    """Faults use up no attempt: a flaky job ends with as many as it was to fail, and one."""
    last: dict[str, int] = defaultdict(int)
    for run in record.runs:
        last[run.label] = max(last[run.label], run.attempt)
    for entry in record.sent:
        wanted = {
            "flaky": int(entry.label.rpartition(":")[2]) + 1 if entry.kind == "flaky" else 0,
            "dead": 2,
        }.get(entry.kind)
        if wanted and entry.outcome == "accepted" and last[entry.label] != wanted:
            yield f"attempts: {entry.label} ({entry.kind}) had {last[entry.label]} attempts, not {wanted}"


def early(record: Record) -> Iterator[str]:
    """No countdown is cut short, and nothing begins that was revoked in time."""
    began: dict[str, float] = {}
    for run in record.runs:
        began[run.label] = min(run.began, began.get(run.label, run.began))
    for entry in record.sent:
        if entry.label in began and began[entry.label] < entry.not_before - MOMENT:
            yield f"early: {entry.label} began {entry.not_before - began[entry.label]:.2f} s before its time"
        if entry.label in began and entry.revoked and not failover_between(record, entry.at, entry.at):
            yield f"revoked: {entry.label} ran although it was revoked before its time"


def beyond_limits(record: Record) -> Iterator[str]:
    """No more run at once than the limit says. One that is stopped does not run; one that is cut off must not."""
    groups: dict[str, list[tuple[float, float, Run]]] = defaultdict(list)
    for run in record.runs:
        kind = run.label.partition(":")[0]
        if kind in LIMITS:
            gate = run.label.partition("/")[2] if kind == "keyed" else ""
            groups[f"{kind} {gate}".strip()] += [(*span, run) for span in running(record, run)]
    for gate, spans in groups.items():
        limit = LIMITS[gate.partition(" ")[0]]
        for at, together in crowds(spans):
            if len({run.job for run in together}) > limit or len(together) > limit:
                who = ", ".join(f"{run.label} in {name_of(record, run.pid)}" for run in together)
                text = f"limit: {len(together)} of {gate} ran at {at:.2f}, {limit} may: {who}"
                if excused(record, text, min(run.began for run in together), at):
                    continue
                yield text
                break


def running(record: Record, run: Run) -> Iterator[tuple[float, float]]:
    """Yield when a run really ran: without the time in which its process was stopped, and a moment after that."""
    life = life_of(record, run.pid)
    ended = (
        run.ended if run.ended is not None else (life.ended if life and life.ended is not None else run.began)
    )
    struck = any(own <= ended and late >= run.began for own, _, late in cut_off(record, run.pid))
    ended -= LATE if struck else MOMENT
    stops = merged(
        (blow.began, blow.ended + LATE)
        for blow in record.struck
        if blow.pid == run.pid and blow.kind in STOPS
    )
    began = run.began
    for first, last in stops:
        if first < ended and last > began:
            if first > began:
                yield began, first
            began = last
    if began < ended:
        yield began, ended


def crowds(spans: Sequence[tuple[float, float, Run]]) -> Iterator[tuple[float, list[Run]]]:
    """Yield who runs at each beginning."""
    for at, _, _ in spans:
        yield at, [run for began, ended, run in spans if began <= at < ended]


def too_fast(record: Record) -> Iterator[str]:
    """No more jobs with a rate begin in one second than the rate says."""
    begins = sorted(run.began for run in record.runs if run.label.startswith("paced:"))
    for first, later in zip(begins, begins[RATE:], strict=False):
        text = f"rate: {RATE + 1} of paced began between {first:.2f} and {later:.2f}"
        if later - first < 1.0 and not excused(record, text, first, later):
            yield text
            return


def events(record: Record) -> Iterator[str]:
    """Each event comes to each subscriber, as one job; one that was refused comes to nobody."""
    jobs: dict[str, set[str]] = defaultdict(set)
    for run in record.runs:
        if run.label.startswith("event-") and (run.whole or run.ended is None):
            jobs[run.label].add(run.job)
    for entry in record.sent:
        if entry.kind != "event":
            continue
        counts = [len(jobs[f"{entry.label}/{task}"]) for task in ("smell", "taste")]
        right = {"accepted": ([1, 1],), "refused": ([0, 0],)}.get(entry.outcome, ([0, 0], [1, 1]))
        text = f"event: {entry.label} ({entry.outcome}) came {counts[0]} and {counts[1]} times to its subscribers"
        if counts not in right and not excused(record, text, entry.at):
            yield text


def fire_times(record: Record) -> Iterator[str]:
    """Each fire time between the first and the last that ran has had its job. Twice is told of by `doubled`."""
    ran = {run.job for run in record.runs if run.label == "tick"}
    places = [place for place, job in enumerate(record.fire_times) if job in ran]
    if not places:
        yield "fire times: the schedule never fired"
        return
    missing = [job for job in record.fire_times[places[0] : places[-1]] if job not in ran]
    if missing:
        yield f"fire times: {len(missing)} of {places[-1] - places[0] + 1} never ran"
    if strangers := ran - set(record.fire_times):
        yield f"fire times: {len(strangers)} jobs are of none"


def workflows(record: Record) -> Iterator[str]:
    """Each run comes to its end, with each step once; one that fails is undone once, and no other."""
    jobs: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in record.runs:
        if run.label.startswith("run-"):
            name, _, step = run.label.partition("/")
            jobs[name][step].append(run)
    for entry in record.sent:
        state = record.run_states.get(entry.label, "UNKNOWN")
        if entry.kind != "run" or (state == "UNKNOWN" and entry.outcome != "accepted"):
            continue
        if state == "UNKNOWN" and excused(record, f"run: {entry.label} is not there", entry.at):
            continue
        if state not in entry.states:
            yield f"run: {entry.label} is {state}, not {' or '.join(sorted(entry.states))}"
        steps = {*STEPS, *(f"{step}/undo" for step in TAKEN if state == "FAILED")}
        yield from (f"run: {entry.label} ({state}): {why}" for why in wrong_steps(jobs[entry.label], steps))


def wrong_steps(jobs: Mapping[str, list[Run]], steps: set[str]) -> Iterator[str]:
    """Yield what is wrong with the steps of a run: each of them is one job, which ran to its end. No other ran."""
    for step in sorted({*jobs, *steps}):
        runs = jobs.get(step, [])
        if step not in steps:
            yield f"{step} ran"
        elif not any(run.whole for run in runs):
            yield f"{step} never ran to its end"
        if len({run.job for run in runs}) > 1:
            yield f"{step} was {len({run.job for run in runs})} jobs"


def outputs(record: Record) -> Iterator[str]:
    """Each record has one output, in the order of its customer, with the sum of all numbers up to it."""
    found: dict[str, list[Output]] = defaultdict(list)
    for output in record.outputs:
        found[output.customer].append(output)
    sent: dict[str, dict[int, Sent]] = defaultdict(dict)
    for entry in record.sent:
        if entry.kind == "record":
            name, _, customer = entry.label.partition("/")
            sent[customer][int(name.partition("-")[2])] = entry
    for customer in sorted({*found, *sent}):
        yield from wrong_numbers(record, customer, found[customer], sent[customer])
        yield from wrong_sums(record, customer, found[customer], sent[customer])


def wrong_numbers(
    record: Record, customer: str, found: Sequence[Output], sent: Mapping[int, Sent]
) -> Iterator[str]:
    """Yield which records of a customer have no output, or several, or in another order."""
    numbers = [output.number for output in found]
    accepted = [number for number, entry in sent.items() if entry.outcome == "accepted"]
    known = {number for number, entry in sent.items() if entry.outcome != "refused"}
    for number in sorted({*accepted} - {*numbers}):
        text = f"record: {customer} {number} has no output"
        if not excused(record, text, sent[number].at):
            yield text
    yield from (f"record: {customer} {number} was not sent" for number in sorted({*numbers} - known))
    times: dict[int, list[float]] = defaultdict(list)
    for output in found:
        times[output.number].append(max(output.at, sent[output.number].at if output.number in sent else 0.0))
    # The commit of a record may be lost after its output was delivered: the record may have waited for a worker.
    several = [(delivered[0], delivered[-1]) for delivered in times.values() if len(delivered) > 1]
    text = f"record: {len(several)} of {customer} have several outputs"
    if not all(excused(record, text, first, last) for first, last in several):
        yield text
    ordered = [number for number in accepted if number in set(numbers)]
    if [number for number in dict.fromkeys(numbers) if number in set(accepted)] != ordered:
        yield f"record: the outputs of {customer} are not in the order in which they were sent"


def wrong_sums(
    record: Record, customer: str, found: Sequence[Output], sent: Mapping[int, Sent]
) -> Iterator[str]:
    """Yield where the sum of a customer differs from its earlier numbers, and whether it still does in the end."""
    total, before = 0, 0.0
    for output in found:
        total += output.number
        if output.total != total:
            text = f"record: {customer} {output.number} has the sum {output.total}, not {total}"
            if not excused(record, text, before, max(output.at, sent[output.number].at)):
                yield text
                break
            total = output.total  # an output between these two was lost, or came twice
        before = sent[output.number].at
    text = f"record: {customer} has the sum {record.sums.get(customer)} in the end, not {total}"
    last = max((entry.at for entry in sent.values()), default=0.0)
    if record.sums.get(customer, 0) != total and not excused(record, text, before, last):
        yield text


def ended_by_themselves(record: Record) -> Iterator[str]:
    """No process ends that was not killed. One that never came up may, as documented, while Redis is away or full."""
    for life in record.lives:
        if life.code is None or life.killed:
            continue
        ended = life.ended or 0.0
        if ended >= record.stopping:
            if life.code != 0:
                yield f"stop: {life.name} ({life.pid}) was stopped in order and ended with {life.code}"
            continue
        near = any(
            struck.name in (*SERVERS, life.name)
            and struck.began <= ended
            and struck.ended + RECONNECT >= life.began
            for struck in record.struck
        )
        text = f"{life.name} ({life.pid}) ended by itself with {life.code} at {ended:.2f}"
        if not life.ready and near:
            record.excuses.append(f"{text}: it was starting, and Redis could not be used")
        else:
            yield f"process: {text}"


def list_pauses(record: Record, first: float, last: float) -> list[float]:
    """Return the seconds between two jobs that ended, between these times, in order of time."""
    ends = sorted(run.ended for run in record.runs if run.whole and run.ended and first <= run.ended <= last)
    return [after - before for before, after in pairwise([first, *ends])]


def find_restarts(record: Record, kind: str, name: str) -> list[float]:
    """Return how many seconds after each such fault jobs ended again: when the longest pause was over that began before
    another server had taken over. A later one is of another fault.
    """
    found: list[float] = []
    for blow in record.struck:
        if blow.kind == kind and blow.name == name:
            last = blow.ended + RESTART_LIMIT
            ends = sorted(
                run.ended for run in record.runs if run.whole and run.ended and blow.began < run.ended <= last
            )
            pauses = [
                (after - before, after)
                for before, after in pairwise([blow.began, *ends, last])
                if before <= blow.ended
            ]
            found.append(max(pauses)[1] - blow.began)
    return found


def life_of(record: Record, pid: int) -> Life | None:
    """Return the process of that id."""
    return next((life for life in record.lives if life.pid == pid), None)


def name_of(record: Record, pid: int) -> str:
    """Return the name of the process of that id, and the id."""
    life = life_of(record, pid)
    return f"{life.name if life else '?'} ({pid})"
