"""List queues, pause and purge them, and show what they take in Redis (`queue`)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from celery5.cli.commands.limit import format_suspensions
from celery5.cli.commands.worker import make_worker_view, show_replies
from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group
from celery5.cli.terminal.output import echo, format_cell, format_fields, format_table, to_json, to_one_line
from celery5.cli.terminal.unknown_application import warn_of_unknown_application
from celery5.operations.queues import QUEUE_OPERATIONS, PurgeQueue
from celery5.protocol.byte_counts import format_bytes
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_duration
from celery5.protocol.observability.overview import format_rate
from celery5.protocol.observability.queue_depth import AT_LIMITS
from celery5.protocol.observability.storage import QueueStorage, ServerStorage, Storage
from celery5.protocol.shards import get_queue_of_shard

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.broker.calls.queues import QueueState
    from celery5.errors import BrokerError


def _warn_of_queues(finished: Finished) -> None:
    """Print what is suspended, what jobs wait for that no worker has, and which queues nobody reads."""
    if not finished.result:
        warn_of_unknown_application(finished.app)
    if finished.wants_json:
        return
    if suspended := format_suspensions(finished.app):
        echo(f"\nsuspended  {to_one_line(suspended)}")
    for name, text in format_missing(finished.result).items():
        echo(f"\n{name}  {to_one_line(text)}")
    if unread := format_unread_warning(finished.app, finished.result):
        echo(f"\nunread  {to_one_line(unread)}")


def format_missing(states: "Iterable[QueueState]") -> dict[str, str]:
    """Return what jobs of some queues need and no worker has, by kind: resources, and tasks in its code."""
    states = list(states)
    texts = {
        "resources": "; ".join(state.lacks for state in states if state.lacks),
        "unknown tasks": "; ".join(
            f"queue {state.queue}: {state.awaits}" for state in states if state.awaits
        ),
    }
    return {name: text for name, text in texts.items() if text}


def format_unread_warning(app: "App", states: "Sequence[QueueState]") -> str:
    """Return which queues have jobs and no worker, each with a similar queue that may have been meant; '' for none.

    Any name is a valid queue, so this is where a misspelt one shows.
    """
    from celery5.connections.brokers import find_meant_queue

    used_queues = {
        *app.brokers.used_queues(),
        *(state.queue for state in states if state.live_workers),
    }
    warnings: list[str] = []
    for state in states:
        if state.unread:
            similar = find_meant_queue(state.queue, used_queues - {state.queue})
            is_used = get_queue_of_shard(state.queue) in used_queues
            hint = f", did you mean {similar}?" if similar and not is_used else ""
            jobs = format_count(state.unread, "job")
            warnings.append(f"{state.queue} ({jobs}, no worker{hint})")
    return format_cell("; ".join(warnings))


def _format_list(states: "Sequence[QueueState]") -> str:
    return format_table(_make_rows(states, wants_json=False), empty="no queues yet: nothing was sent")


def _format_queue(state: "QueueState") -> str:
    return format_fields(_make_rows([state], wants_json=False)[0])


def _format_storage(storage: Storage) -> str:
    return "\n".join(_iterate_storage(storage))


def _iterate_storage(storage: Storage) -> Iterator[str]:
    yield format_table([_make_server_row(server) for server in storage.servers], empty="")
    for server in storage.servers:
        for finding in (server.memory, server.persistence):
            if finding is not None and finding.state != "ok":
                yield f"\n{server.broker}  {finding.state}  {finding.summary}: {finding.remedy}"
    queues = [_make_storage_row(row) for row in storage.queues]
    yield "\n" + format_table(queues, empty="no queues yet: nothing was sent")
    streams: list[dict[str, object]] = [
        {"stream": row.stream, "records": row.records, "total": format_bytes(row.total_bytes)}
        for row in storage.streams
    ]
    if streams:
        yield "\n" + format_table(streams, empty="")
    yield "\n" + ", ".join(f"{name} {format_bytes(size)}" for name, size in storage.others.items())
    if storage.queues_left_out or storage.streams_left_out:
        left_out = format_count(storage.queues_left_out, "queue")
        yield f"not shown: {left_out}, {format_count(storage.streams_left_out, 'stream')}"


def _make_server_row(server: ServerStorage) -> dict[str, object]:
    if server.unreachable:
        return {"broker": server.broker, "server": to_one_line(server.unreachable)}
    return {
        "broker": server.broker,
        "server": server.version,
        "used": format_bytes(server.used),
        "of": "no limit" if server.limit is None else format_bytes(server.limit),
        "peak": format_bytes(server.peak),
        "keys": server.keys,
        "evicted": server.evicted,
        "memory": server.memory.summary if server.memory else "",
        "persistence": server.persistence.summary if server.persistence else "",
    }


def _make_storage_row(row: QueueStorage) -> dict[str, object]:
    return {
        "queue": row.queue,
        "total": format_bytes(row.total_bytes),
        "jobs": f"{row.jobs} in {format_bytes(row.stream_bytes)}",
        "waiting": f"{row.scheduled + row.held} in {format_bytes(row.waiting_bytes)}",
        "dead": f"{row.dead} in {format_bytes(row.dead_bytes)}",
        "index": format_bytes(row.index_bytes),
    }


def format_flow(state: "QueueState", *, wants_json: bool = False) -> dict[str, object]:
    """Return how fast jobs come to a queue and leave it: cells, or a field for programs."""
    flow = state.flow
    if wants_json:
        return {"flow": flow, "idle": state.idle}
    come, leave, over = ("", "", "")
    if flow is not None:
        come, leave = format_rate(flow.incoming), format_rate(flow.outgoing)
        over = format_duration(round(flow.seconds))
    return {"in": come, "out": leave, "over": over}


def format_verdict(state: "QueueState") -> str:
    """Return in a word or two whether a queue keeps up."""
    return to_one_line(state.verdict.text.partition(":")[0])


def _format_age(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _make_rows(states: "Sequence[QueueState]", *, wants_json: bool) -> list[dict[str, object]]:
    by_priority = wants_json or any(state.high or state.low for state in states)
    any_held = any(state.held_by for state in states)
    any_node = any(state.node for state in states)
    return [
        {
            "queue": state.queue,
            "backlog": state.backlog,
            "oldest": state.oldest_waiting if wants_json else _format_age(state.oldest_waiting),
            "waiting": state.waiting,
            **({"high": state.high, "low": state.low} if by_priority else {}),
            **format_flow(state, wants_json=wants_json),
            "running": state.running,
            "held" if wants_json else AT_LIMITS: state.held,
            **(
                {"held_by": state.held_by}
                if wants_json
                else {"held by": to_one_line(state.held_by)}
                if any_held
                else {}
            ),
            "scheduled": state.scheduled,
            **({"overdue": state.overdue} if wants_json else {}),
            "dead": state.dead,
            **({"workers": state.live_workers} if wants_json else {}),
            **({"lacks": state.lacks, "awaits": state.awaits} if wants_json else {}),
            "verdict": state.verdict if wants_json else format_verdict(state),
            "paused": state.paused if wants_json else "yes" if state.paused else "",
            **({"node": state.node} if any_node else {}),
            **({"documents": state.documents} if wants_json and state.documents else {}),
        }
        for state in states
    ]


def _describe_purge(asked: PurgeQueue) -> str:
    return f"revoke all jobs that wait on {asked.queue}"


def _show_paused(state: str, finished: Finished) -> None:
    """Print what came of it in one line; without workers, that those which start later will find this state."""
    if finished.result.value and finished.wants_json:
        show_replies("", finished)
        return
    if finished.result.value:
        if finished.result.count:
            echo(to_one_line(finished.result.summary))
        return
    if finished.wants_json:
        echo(to_json([]))
    text = f"no worker of this application is running; workers that start later find {finished.asked.queue} {state}"
    echo(format_cell(text), err=finished.wants_json)


def _check_broker(app: "App", asked: Any, errors: "Mapping[str, BrokerError]") -> None:
    """Raise the error of the queue's broker: whether a queue is paused is stored there."""
    if not asked.to:
        app.control.workers()
        for name, error in errors.items():
            if name == app.brokers.broker_of_queue(asked.queue):
                raise error


queue = make_group(
    "queue",
    "Queues hold jobs until a worker takes them.",
    QUEUE_OPERATIONS,
    {
        "list": CommandView(
            text=_format_list,
            value=lambda states: _make_rows(states, wants_json=True),
            after=_warn_of_queues,
            skips_unreachable=True,
            help="""Show each queue: its backlog and the age of its oldest job, waiting, running, held, scheduled and
dead jobs, and whether it is paused for all workers; also what holds jobs, and which queues have jobs and no worker.

The backlog is what could run by now: jobs that wait, that limits hold, and scheduled ones that are overdue. Of the
waiting ones, `high` and `low` have such a priority. `in` and `out` are how fast jobs come and leave,
measured over the time `over` up to now.

With --shards it shows each shard of a sharded queue by itself, those included that remain from an earlier number;
on a Redis Cluster also the `node` that has each queue.""",
        ),
        "show": CommandView(text=_format_queue, value=lambda state: _make_rows([state], wants_json=True)[0]),
        "pause": make_worker_view(
            "pause", CommandView(show=partial(_show_paused, "paused"), before=_check_broker)
        ),
        "resume": make_worker_view(
            "resume", CommandView(show=partial(_show_paused, "resumed"), before=_check_broker)
        ),
        "purge": CommandView(
            would=_describe_purge,
            skips_unreachable=True,
            help="""Revoke all jobs that wait on QUEUE, also scheduled and held ones. Running and dead jobs stay.

Pause the queue first (celery5 queue pause): a job that begins meanwhile is stopped.""",
        ),
        "storage": CommandView(
            text=_format_storage,
            help="""Show what Redis holds: its memory and settings, and what each queue and stream takes.

Bytes are estimates from a few entries of each key. Of queues the 200 with the most entries are shown.""",
        ),
    },
)
