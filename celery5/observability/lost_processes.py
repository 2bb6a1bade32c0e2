"""Lost processes of an application, and whether each loss is repaired: what every surface and the alerts show."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from celery5.broker.calls.cluster import LostLease
from celery5.broker.calls.queues import QueueState
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.observability.overview import LostWorker, judge_repair, merge_lost
from celery5.protocol.process.standing import LOST_SHOWN, has_successor, make_lost


def list_lost(
    queues: Iterable[QueueState],
    events: QueueState,
    over: Mapping[str, Mapping[str, LostLease]],
    live: Mapping[str, Collection[str]],
    *,
    brokers: Collection[str],
    now: float,
) -> list[LostWorker]:
    """Return the processes that were lost in the last hour, the last ones first, each with whether it is repaired.

    Args:
        queues: The queues of which processes are looked for.
        events: The queue of events, whose workers are Routers.
        over: For each kind of other processes those that were lost.
        live: The whole names of live processes beside workers and Routers, by kind.
        brokers: The names of all brokers.
        now: The time, in seconds since 1970.
    """
    queues = tuple(queues)
    working = {worker.name for queue in (*queues, events) for worker in queue.workers if worker.alive}
    others = (name for found in live.values() for name in found)
    names = {get_process_name(process, brokers) for process in (*working, *others)}
    lost: dict[str, LostWorker] = {}
    for queue in (*queues, events):
        for part in _list_lost_of(queue, "router" if queue is events else "worker", now):
            before = lost.get(part.worker)
            lost[part.worker] = part if before is None else merge_lost(before, part)
    found = [
        msgspec.structs.replace(process, name=name, is_back=name in names)
        for worker, process in lost.items()
        if worker not in working
        for name in (get_process_name(worker, brokers),)
    ]
    for kind, leases in over.items():
        live_names = {get_process_name(name, brokers) for name in live.get(kind, ())}
        found += [
            LostWorker(
                worker=process,
                name=get_process_name(process, brokers),
                kind=kind,
                at=now - lease.seconds,
                health=make_lost(lease.seconds).text,
                is_back=has_successor(get_process_name(process, brokers), live_names),
                repaired_at=None if lease.repaired is None else now - lease.repaired,
            )
            for process, lease in leases.items()
        ]
    return sorted(map(judge_repair, found), key=lambda process: -process.at)


def get_process_name(process: str, brokers: Collection[str]) -> str:
    """Return the name of the inbox of a process by its whole name, without that of its broker."""
    inbox = get_inbox_name(process)
    name, at, broker = inbox.rpartition("@")
    return name if at and broker in brokers else inbox


def _list_lost_of(queue: QueueState, kind: str, now: float) -> Iterator[LostWorker]:
    """Yield the workers of a queue that were lost, those included whose jobs nobody has put back yet."""
    queues = () if kind == "router" else (queue.queue,)
    for record in queue.lost:
        yield LostWorker(
            worker=record.worker,
            kind=kind,
            queues=queues,
            at=record.at,
            health=make_lost(now - record.at).text,
            why=record.why,
            put_back=record.put_back,
            dead=record.dead,
            dead_left=min(record.dead, queue.dead) if record.has_dead_left else 0,
            jobs=record.jobs,
            tasks=record.tasks,
            repaired_at=record.repaired_at,
        )
    for worker in queue.workers:
        if worker.lapsed is not None and (worker.lapsed <= LOST_SHOWN or worker.running):
            yield LostWorker(
                worker=worker.name,
                kind=kind,
                queues=queues,
                at=now - worker.lapsed,
                health=make_lost(worker.lapsed).text,
                held=worker.running,
            )
