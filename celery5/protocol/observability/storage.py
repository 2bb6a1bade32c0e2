"""What Redis holds for an application: the servers, and the bytes and entries of queues and streams."""

from collections.abc import Iterable, Mapping

import msgspec

from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.byte_counts import format_bytes
from celery5.protocol.health.broker_diagnosis import (
    Finding,
    describe_server,
    diagnose_eviction,
    diagnose_persistence,
)
from celery5.protocol.health.server_memory import ServerMemory, read_server_memory
from celery5.protocol.observability.families import MetricFamily, make_gauge
from celery5.protocol.shards import get_queue_of_shard


class ServerStorage(msgspec.Struct, frozen=True, kw_only=True):
    """The server of one broker."""

    broker: str
    # Its kind and version.
    version: str = ""
    # Bytes: what it uses, the most that it has used, and what it may use; None for no limit.
    used: int = 0
    peak: int = 0
    limit: int | None = None
    # Bytes of memory of its machine; None where it does not say.
    machine: int | None = None
    # How much more memory it has from the system than it uses; None where it does not say.
    fragmentation: float | None = None
    # Keys that it has thrown away since it started.
    evicted: int = 0
    # Keys in the database, of all applications, and how many of those have a time to live.
    keys: int = 0
    expiring: int = 0
    clients: int = 0
    # Seconds since it started.
    uptime: int = 0
    # Whether it throws jobs away when memory is full, and whether jobs outlive it; None when it is unreachable.
    memory: Finding | None = None
    persistence: Finding | None = None
    # Why it cannot be reached; '' when it can.
    unreachable: str = ""

    @property
    def used_share(self) -> float | None:
        """The share of the memory that it may use; None when there is no limit."""
        return self.used / self.limit if self.limit else None


class QueueStorage(msgspec.Struct, frozen=True, kw_only=True):
    """What one queue takes. Bytes are estimates, and None where the server does not say."""

    queue: str
    broker: str
    # Jobs on its streams, those that workers have included.
    jobs: int
    # Jobs that wait for their time.
    scheduled: int
    # Jobs that wait at limits.
    held: int
    dead: int
    # All of the following.
    total_bytes: int | None = None
    # The streams of all lanes.
    stream_bytes: int | None = None
    # The Commands of jobs that wait for their time or at limits.
    waiting_bytes: int | None = None
    dead_bytes: int | None = None
    # Where each job is, leases, slots, keys of unique jobs, and the lists of runs.
    index_bytes: int | None = None


def merge_shards(rows: Iterable[QueueStorage]) -> list[QueueStorage]:
    """Return the storage of queues, with shards merged. A value that one shard lacks is unknown for its queue."""
    groups: dict[str, list[QueueStorage]] = {}
    for row in rows:
        groups.setdefault(get_queue_of_shard(row.queue), []).append(row)
    return [
        QueueStorage(
            queue=queue,
            broker=parts[0].broker,
            jobs=sum(part.jobs for part in parts),
            scheduled=sum(part.scheduled for part in parts),
            held=sum(part.held for part in parts),
            dead=sum(part.dead for part in parts),
            total_bytes=_add(part.total_bytes for part in parts),
            stream_bytes=_add(part.stream_bytes for part in parts),
            waiting_bytes=_add(part.waiting_bytes for part in parts),
            dead_bytes=_add(part.dead_bytes for part in parts),
            index_bytes=_add(part.index_bytes for part in parts),
        )
        for queue, parts in groups.items()
    ]


def _add(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


class StreamStorage(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of one stream take."""

    stream: str
    broker: str
    partitions: int
    records: int
    # An estimate, from the first partitions where there are many; None where the server does not say.
    total_bytes: int | None = None


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis holds for an application."""

    servers: tuple[ServerStorage, ...]
    # Those with the most entries first.
    queues: tuple[QueueStorage, ...]
    streams: tuple[StreamStorage, ...]
    # Bytes of the history of metrics, of the audit trail, and of what else belongs to no queue; None where the server
    # does not say.
    others: dict[str, int | None] = {}
    # Bytes of the results of jobs, by broker: an estimate from a sample; None where the server does not say.
    results: dict[str, int | None] = {}
    # Queues and streams that are not shown.
    queues_left_out: int = 0
    streams_left_out: int = 0


def describe_storage(
    broker: str, info: Mapping[str, str], config: Mapping[str, str] | None, *, database: int
) -> ServerStorage:
    """Return the state of a server.

    Args:
        broker: The name of the broker.
        info: Its `INFO`; empty where that is not permitted.
        config: Its parameters; None where they cannot be read.
        database: The number of the database.
    """
    keyspace = dict(
        part.split("=", 1) for part in info.get(f"db{database}", "").split(",") if "=" in part
    )  # keys=12,expires=3,avg_ttl=0
    ratio = info.get("mem_fragmentation_ratio", "")
    memory = read_server_memory(broker, info)
    return ServerStorage(
        broker=broker,
        version=describe_server(info),
        used=memory.used if memory else 0,
        peak=_count(info.get("used_memory_peak")),
        limit=memory.limit if memory else None,
        machine=_count(info.get("total_system_memory")) or None,
        fragmentation=float(ratio) if ratio.replace(".", "", 1).isdigit() else None,
        evicted=_count(info.get("evicted_keys")),
        keys=_count(keyspace.get("keys")),
        expiring=_count(keyspace.get("expires")),
        clients=_count(info.get("connected_clients")),
        uptime=_count(info.get("uptime_in_seconds")),
        memory=diagnose_eviction(info, config),
        persistence=diagnose_persistence(info, config),
    )


MAX_FILLING = 3
"""Things that are named of what fills a server."""


def describe_filling(storage: Storage, broker: str) -> str:
    """Return what takes the most of a server's memory, in words; '' where nothing is known."""
    sizes = {f"queue {row.queue}": row.total_bytes or 0 for row in storage.queues if row.broker == broker}
    sizes |= {f"stream {row.stream}": row.total_bytes or 0 for row in storage.streams if row.broker == broker}
    sizes["results"] = storage.results.get(broker) or 0
    if storage.servers and storage.servers[0].broker == broker:  # the default broker
        sizes |= {
            f"history of {name}" if name in ("metrics", "jobs") else name: size or 0
            for name, size in storage.others.items()
            if name != "results"
        }
    largest = sorted(((size, name) for name, size in sizes.items() if size), reverse=True)[:MAX_FILLING]
    return ", ".join(f"{name} {format_bytes(size)}" for size, name in largest)


def estimate_bytes(measured: int, measured_records: int, records: int) -> int:
    """Return the bytes of all records of a stream, from those of some of its partitions."""
    return measured if measured_records in (0, records) else measured * records // measured_records


def _count(text: str | None) -> int:
    return read_whole(text or "")


def make_memory_metrics(memories: Iterable[ServerMemory]) -> list[MetricFamily]:
    """Return the metrics of the memory of servers: those of a process and those of the cluster are the same."""
    known = list(memories)
    limited = [memory for memory in known if memory.limit]
    used = [(float(memory.used), {"broker": memory.broker}) for memory in known]
    limits = [(float(memory.limit or 0), {"broker": memory.broker}) for memory in limited]
    shares = [(memory.share, {"broker": memory.broker}) for memory in limited]
    families = [
        make_gauge(
            "celery5_broker_memory_used_bytes",
            "Memory of the broker's server that counts against its limit, in bytes.",
            *used,
            merge="",
        ),
        make_gauge(
            "celery5_broker_memory_limit_bytes",
            "The limit of that memory, maxmemory, in bytes; missing where there is none.",
            *limits,
            merge="",
        ),
        make_gauge(
            "celery5_broker_memory_used_share",
            "The share of the limit that is used, 1 when the server is full; missing where there is no limit.",
            *shares,
            merge="",
        ),
    ]
    return [family for family in families if family.samples]
