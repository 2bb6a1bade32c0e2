"""Compute what breaks first when an application grows: a simulation of nodes, workers and jobs, from measured costs.

    python -m benchmarks.scale

It prints the tables of `docs/internals/scale.md`, which a test compares. Nothing is measured here: `Costs` says where
each number comes from. The model knows the load of each primary, and nothing of networks, disks and other programs.
Where queues and shards are it finds out as a cluster does, by the slots of their names.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from celery5.protocol.hash_slots import SLOTS, get_key_slot


class Costs(NamedTuple):
    """What was measured. CPU in µs of one core of a server, memory in bytes, times in seconds."""

    send: float = 13.0
    """CPU of a job that is sent by itself: docs/internals/performance.md."""
    drain: float = 8.0
    """CPU of a job that is read and settled, with others: benchmarks/results.md."""
    idle_worker: float = 6.0
    """CPU in a second, of a worker without jobs on a queue with many: heartbeats and connections, of 14 in all
    (docs/internals/performance.md)."""
    idle_app_worker: float = 8.0
    """The same on the node of the application: its reports, health checks and limits, of the same 14."""
    busy_worker: float = 60.0
    """The same of a worker with jobs, beside the jobs: three heartbeats in a lease, and reads."""
    app_worker: float = 15.0
    """CPU in a second on the node of the application: reports and limits of a worker with jobs."""
    bus_message: float = 2.0
    """CPU of a message that another node has published, where it reaches all nodes: measured on three."""
    bus_bytes: float = 400.0
    """Bytes of such a message: a small result, its channel and the header."""
    connection: float = 2_700.0
    """Memory of a connection."""
    queued_job: float = 183.0
    """Memory of a small job that waits: benchmarks/results.md."""
    scan: float = 1.0
    """CPU for each worker with jobs, of the one heartbeat that looks for jobs without a lease, for all workers."""
    long_scan: float = 11.5
    """The same where they are thousands: Lua collects its garbage then."""


COSTS = Costs()
MAX_CPU = 0.7
"""The part of a core that a primary may use: beyond that replies are late."""
MAX_CLIENTS = 10_000
"""`maxclients`, as Redis has it by default."""
MAX_MEMORY = 16e9
"""Bytes of one primary."""
MAX_BUS = 125e6
"""Bytes a second that a primary may get from the others: a tenth of a network of 10 Gbit/s."""
MAX_SCRIPT = 0.01
"""Seconds for which one script may hold up a server."""
LONG_SCAN = 2_000
"""Workers of a queue with jobs from which a look at them takes longer for each."""
BACKLOG_TIME = 600.0
"""Seconds for which jobs pile up, when no worker runs: so much must fit into memory."""


class Shape(NamedTuple):
    """An application: how large it is, and how it is divided."""

    name: str
    primaries: int
    workers: int
    jobs: float
    """Jobs in a second."""
    queues: int = 1
    shards: int = 1
    """Shards of each queue."""
    is_idle: bool = False
    """Whether the workers have no jobs."""
    sharded_messages: bool = True
    """Whether the end of a job is announced by SPUBLISH, on one node. Before Redis 7.0 it goes to all nodes."""


class Load(NamedTuple):
    """The load of the primary that has the most, each as a part of what it may have."""

    processor: float
    connections: float
    memory: float
    bus: float
    scan: float

    @property
    def first(self) -> str:
        """What breaks first; "" when nothing does."""
        worst = max(self)
        return "" if worst <= 1 else WORDS[self.index(worst)]


WORDS = ("the processor", "connections", "memory", "the bus", "the longest script")


@cache
def count_largest(queues: int, shards: int, primaries: int) -> tuple[int, int]:
    """Return how many shards the primary has that has most of them, and of how many queues they are."""
    parts, names = Counter[int](), dict[int, set[int]]()
    for queue in range(queues):
        for shard in range(shards):
            name = f"queue-{queue}#{shard}" if shard else f"queue-{queue}"
            node = get_key_slot(f"{{shop:{name}}}") * primaries // SLOTS
            parts[node] += 1
            names.setdefault(node, set()).add(queue)
    (node, most), *_ = parts.most_common(1)
    return most, len(names[node])


def compute_load(shape: Shape, costs: Costs = COSTS) -> Load:
    """Return the load of the busiest primary: the one with most of the queues, and with the keys of the application."""
    parts, queues = count_largest(shape.queues, shape.shards, shape.primaries)
    jobs = shape.jobs * parts / (shape.queues * shape.shards)
    per_queue = shape.workers / shape.queues
    # A worker of a queue reads all of its shards.
    workers_here = per_queue * queues
    scan = costs.scan if per_queue <= LONG_SCAN else costs.long_scan
    messages = 0.0 if shape.sharded_messages else shape.jobs * (1 - 1 / shape.primaries)
    processor = (
        jobs * (costs.send + costs.drain)
        + workers_here * (costs.idle_worker if shape.is_idle else costs.busy_worker)
        + shape.workers * (costs.idle_app_worker if shape.is_idle else costs.app_worker)
        + messages * costs.bus_message
    ) / 1e6
    # Calls and reads where its queues are, and messages; where the application is, calls.
    connections = workers_here * 3 + (shape.workers if shape.primaries > 1 else 0)
    memory = jobs * BACKLOG_TIME * costs.queued_job + connections * costs.connection
    return Load(
        processor / MAX_CPU,
        connections / MAX_CLIENTS,
        memory / MAX_MEMORY,
        messages * costs.bus_bytes / MAX_BUS,
        0.0 if shape.is_idle else per_queue * scan / 1e6 / MAX_SCRIPT,
    )


SHAPES = (
    Shape("one server, a small application", 1, 100, 5_000),
    Shape("one server, near its end", 1, 1_000, 25_000),
    Shape("one server, 10,000 idle workers", 1, 10_000, 0, is_idle=True),
    Shape("one server, all of it", 1, 10_000, 1_000_000, 1_000),
    Shape("100 nodes, one queue", 100, 10_000, 1_000_000),
    Shape("100 nodes, one queue in 8 shards", 100, 10_000, 1_000_000, 1, 8),
    Shape("100 nodes, one queue in 100 shards", 100, 10_000, 1_000_000, 1, 100),
    Shape("100 nodes, 50 queues in 8 shards", 100, 10_000, 1_000_000, 50, 8),
    Shape("100 nodes, 1,000 queues", 100, 10_000, 1_000_000, 1_000),
    Shape("100 nodes, 1,000 queues, 2,500 workers", 100, 2_500, 1_000_000, 1_000),
    Shape("the same, messages to all nodes", 100, 2_500, 1_000_000, 1_000, 1, sharded_messages=False),
)


def format_loads() -> Iterator[str]:
    """Yield the lines of the table of loads: each as a part of what the busiest primary may have."""
    yield "| application | jobs/s | workers | processor | connections | memory | bus | longest script | breaks first |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---|"
    for shape in SHAPES:
        load = compute_load(shape)
        cells = " | ".join(_format_part(part) for part in load)
        yield f"| {shape.name} | {shape.jobs:,.0f} | {shape.workers:,} | {cells} | {load.first or 'nothing'} |"


def format_costs() -> Iterator[str]:
    """Yield the lines of the table of costs."""
    yield "| cost | value |"
    yield "|---|---:|"
    names = (
        "a job that is sent, µs",
        "a job that is read and settled, µs",
        "an idle worker, one of many, µs a second",
        "the same, on the node of the application, µs a second",
        "a worker with jobs, beside them, µs a second",
        "the same, on the node of the application, µs a second",
        "a message from another node, µs",
        "the same, bytes",
        "a connection, bytes",
        "a small job that waits, bytes",
        "a worker with jobs, in a look for jobs without a lease, µs",
        "the same, where they are thousands, µs",
    )
    for name, value in zip(names, COSTS, strict=True):
        yield f"| {name} | {value:,g} |"


def find_most(shape: Shape, *, limit: int = 1_000_000_000) -> int:
    """Return how many jobs a second an application of this shape has at most until something breaks."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_load(shape._replace(jobs=middle)).first else (middle, high)
    return low


def format_limits() -> Iterator[str]:
    """Yield the lines of the table of how many jobs a second some clusters can have."""
    yield "| primaries | one queue | one queue in 8 shards | 1,000 queues |"
    yield "|---:|---:|---:|---:|"
    for primaries in (1, 3, 8, 30, 100):
        shape = Shape("", primaries, 1_000, 0)
        most = [
            find_most(shape._replace(queues=queues, shards=shards))
            for queues, shards in ((1, 1), (1, 8), (1_000, 1))
        ]
        yield f"| {primaries} | " + " | ".join(f"{_round(number):,}" for number in most) + " |"


def _round(number: int) -> int:
    """Return a number with two digits that count."""
    digits = max(len(str(number)) - 2, 0)
    return int(number // 10**digits * 10**digits)


def _format_part(part: float) -> str:
    return f"{part:.0%}" if part < 10 else f"{part:,.0f} times"


if __name__ == "__main__":
    for lines in (format_costs, format_loads, format_limits):
        print("\n".join(lines()), end="\n\n")
