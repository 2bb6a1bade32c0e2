"""Build the calls for shared health checks, for `celery5 doctor`, and to erase an application."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, script_call, to_ms
from celery5.broker.connection.exchange import ReplyError, pack_commands
from celery5.broker.connection.sentinel import list_questions, read_primary
from celery5.broker.connection.socket_link import ask_sentinel, dial
from celery5.broker.endpoint import Endpoint, format_node
from celery5.broker.keys import EVENTS, Keys, QueueKeys
from celery5.broker.timing import Timing
from celery5.broker.translate import ASK_MEMORY, parse_info
from celery5.errors import BrokerError
from celery5.protocol.hash_slots import NodeAddress, SlotMap, parse_slot_map
from celery5.protocol.health.broker_diagnosis import SentinelView
from celery5.protocol.health.readings import CheckReading
from celery5.protocol.health.server_memory import find_fullest
from celery5.protocol.observability.rollup import CLUSTER

TURN_SHARE = 0.9
"""The share of a period for which one worker's turn lasts: it is over when the next look is due."""
MAX_STATE_TTL = 7 * 86400.0
"""Seconds for which a state is kept that is never stale."""

_DECODER = msgspec.json.Decoder(CheckReading)


def claim_turn(keys: Keys, check: str, period: float, *, group: str = "") -> Call[bool]:
    """Return whether it is the caller's turn to run a check for all workers, or for those of its group.

    A repeated call may return False: then nobody runs the check this time.
    """
    ms = max(1, to_ms(TURN_SHARE * period))
    return Call(
        ("SET", keys.check_turn(_add_group(check, group)), "1", "NX", "PX", ms), bool, repeatable=True
    )


def claim_notice(keys: Keys, check: str, period: float) -> Call[bool]:
    """Return whether it is the caller's turn to notify all workers that the period of a check has lapsed."""
    ms = max(1, to_ms(TURN_SHARE * period))
    return Call(("SET", keys.check_notice(check), "1", "NX", "PX", ms), bool, repeatable=True)


def read_state(keys: Keys, check: str, *, group: str = "") -> Call[CheckReading | None]:
    """Return the state of a check, for all workers or for a group; None when nobody has checked lately."""
    return Call(("GET", keys.check(_add_group(check, group))), _reading, repeatable=True)


def write_state(keys: Keys, reading: CheckReading, *, ttl: float) -> Call[bool]:
    """Store the state of a check for `ttl` seconds, for all workers or for the group of the reading."""
    ms = int(1000 * (MAX_STATE_TTL if math.isinf(ttl) else ttl))
    key = keys.check(_add_group(reading.check, reading.group))
    return Call(("SET", key, msgspec.json.encode(reading), "PX", ms), bool, repeatable=True)


def _add_group(check: str, group: str) -> str:
    """Return the part of a key for a check of a group; names of checks have no spaces."""
    return f"{check} {group}" if group else check


def _reading(reply: bytes | None) -> CheckReading | None:
    try:
        return None if reply is None else _DECODER.decode(reply)
    except (msgspec.DecodeError, RecursionError):
        return None


PROBE_PERMISSIONS = Script.load("diagnosis/probe_permissions")

PARAMETERS = ("appendonly", "appendfsync", "save", "maxmemory-policy", "min-replicas-to-write")


class PermissionProbe(msgspec.Struct, frozen=True):
    """Return how many commands were tried, and the server's words on each that the user may not."""

    tried: int
    refused: dict[str, str]


def get_slot_map(endpoint: Endpoint) -> Call[SlotMap]:
    """Return which node of a Redis Cluster is the primary of which slot."""
    asked = NodeAddress(*endpoint.nodes[0])
    return Call(("CLUSTER", "SLOTS"), lambda raw: parse_slot_map(raw, asked), repeatable=True)


def get_server_info() -> Call[dict[str, str]]:
    """Return the server's INFO."""
    return Call(("INFO",), parse_info, repeatable=True)


def get_memory_info() -> Call[dict[str, str]]:
    """Return the server's INFO on memory; on a cluster, the INFO of the primary with the least memory left."""
    return Call(ASK_MEMORY, parse_info, repeatable=True, merge=find_fullest)


def get_replication_info() -> Call[dict[str, str]]:
    """Return the server's INFO on replication."""
    return Call(("INFO", "replication"), parse_info, repeatable=True)


def get_parameter(name: str) -> Call[str | None]:
    """Return one parameter of the server; None where it has none of that name."""
    return Call(("CONFIG", "GET", name), _parameter, repeatable=True)


def probe_permissions(key: str, channel: str) -> Call[PermissionProbe]:
    """Try the commands that celery5 uses, on a key that nobody uses, which must not outlive the moment."""
    return script_call(PROBE_PERMISSIONS, (key,), (channel,), _attempted, repeatable=True)


def scan_keys(cursor: int, pattern: str, *, count: int) -> Call[tuple[int, list[str]]]:
    """Return some keys that fit a pattern, and where to go on; 0 at the end."""
    return Call(("SCAN", cursor, "MATCH", pattern, "COUNT", count), _scanned, repeatable=True)


def get_ttl(key: str) -> Call[int]:
    """Return the time to live in ms; -1 for a key without one, -2 for a missing key."""
    return Call(("PTTL", key), int, repeatable=True)


def get_type(key: str) -> Call[str]:
    """Return the type of a key, such as `hash`; `none` for a missing key."""
    return Call(("TYPE", key), _decode_type, repeatable=True)


def _decode_type(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()


def probe_unblock() -> Call[int]:
    """End the wait of a connection that there is not: whether that is permitted."""
    return Call(("CLIENT", "UNBLOCK", 0), int, repeatable=True)


def probe_subscribe(endpoint: Endpoint, channel: str, timing: Timing) -> str:
    """Subscribe to a channel for a moment, on its own connection. Return the server's error if that is refused."""
    with closing(dial(endpoint, timing, resp=2, name="celery5-doctor")) as link:
        is_sharded = endpoint.topology == "cluster" and link.greeting and link.greeting.has_sharded_channels
        link.send(pack_commands([("SSUBSCRIBE" if is_sharded else "SUBSCRIBE", channel)]))
        answer = link.receive()
        is_elsewhere = str(answer).startswith("MOVED ")  # on a cluster any node is asked
        return str(answer) if isinstance(answer, ReplyError) and not is_elsewhere else ""


def probe_sentinels(endpoint: Endpoint) -> list[SentinelView]:
    """Ask each sentinel of a broker which server is the primary."""
    views: list[SentinelView] = []
    for question in list_questions(endpoint):
        name = format_node(question.endpoint.host, question.endpoint.port)
        try:
            answer = read_primary(ask_sentinel(question, name="celery5-doctor"), question.endpoint)
        except BrokerError as error:
            answer = error
        if isinstance(answer, BrokerError):
            views.append(SentinelView(name, error=str(answer).removeprefix(f"broker sentinel {name} ")))
        else:
            primary = format_node(*answer.node) if answer.node else ""
            views.append(SentinelView(name, primary=primary, no_quorum=answer.no_quorum))
    return views


def _parameter(raw: Any) -> str | None:
    values: list[bytes] = list(raw)
    return values[1].decode(errors="replace") if len(values) > 1 else None


def _attempted(raw: Any) -> PermissionProbe:
    tried, *words = raw
    text = [word.decode(errors="replace").strip() for word in words]
    return PermissionProbe(int(tried), dict(zip(text[::2], text[1::2], strict=True)))


def _scanned(raw: Any) -> tuple[int, list[str]]:
    return int(raw[0]), [word.decode(errors="replace") for word in raw[1]]


ERASE = Script.load("diagnosis/erase", "idle_runs")
ERASE_BATCH = 500


def erase_app(
    keys: Keys, queues: Sequence[QueueKeys], job_ids: Collection[str] = (), sinks: Collection[str] = ()
) -> Iterator[Call[int]]:
    """The calls that delete `queues`, what waits there for Data Sinks of these names (`sinks`), the results of the jobs
    `job_ids` on each of them, the events, and what the application has beside its queues and streams. Settings that
    all workers share stay, for they are whose who set them; what has a short time to live goes by itself.

    For applications that were made for a moment, such as a demonstration or a test. Its workers must have stopped.
    """
    for queue in (*queues, keys.for_queue(EVENTS)):
        yield script_call(
            ERASE,
            (
                queue.jobs,
                queue.waiting_list_prefix,
                queue.run_prefix,
                queue.live_runs,
                queue.past_runs,
                queue.idle_runs,
                *_all_of(keys, queue, sinks),
            ),
            (),
            int,
            repeatable=True,
        )
        ids = iter(job_ids)
        while portion := list(islice(ids, ERASE_BATCH)):
            yield Call(("DEL", *[queue.result(job_id) for job_id in portion]), int, repeatable=True)
    yield Call(("DEL", *_beside(keys), *_metrics(keys, queues)), int, repeatable=True, merge=sum)


def _beside(keys: Keys) -> Iterator[str]:
    yield from (
        keys.queues,
        keys.paused,
        keys.limits,
        keys.suspended,
        keys.schedule_queues,
        keys.record_streams,
    )
    yield from (
        keys.scaling,
        keys.scaling_turn,
        keys.imposed_limits,
        keys.limit_rules_turn,
        keys.leader,
        keys.timer_leader,
        keys.timer_candidates,
        keys.live_processes("scheduler"),
        keys.live_processes("controller"),
    )
    yield from (
        keys.members_report,
        keys.recycling,
        keys.audit,
        keys.audit_entries,
        keys.failed_jobs,
        keys.other_jobs,
        keys.bulk_actions,
    )
    yield from (keys.subscriptions, keys.subscription_deadlines, keys.unclaimed_events)


def _metrics(keys: Keys, queues: Sequence[QueueKeys]) -> Iterator[str]:
    yield from (keys.metrics_reports, keys.metrics_state, keys.metrics_turn)
    yield from (keys.alerts, keys.alert_outbox, keys.alert_logged, keys.alert_history, keys.alert_silences)
    yield keys.alert_undelivered
    for group in (CLUSTER, *[queue.queue for queue in queues]):
        yield from (keys.metrics_minutes_prefix + group, keys.metrics_hours_prefix + group)


def _all_of(keys: Keys, queue: QueueKeys, sinks: Collection[str]) -> Iterator[str]:
    yield from (
        *queue.streams,
        queue.due,
        queue.waiting,
        queue.dead,
        queue.dead_causes,
        queue.worker_deaths,
        queue.lost_workers,
        queue.lost_work,
        queue.leases,
        queue.consumers_checked,
        queue.idle_leases,
        queue.steady_since,
        queue.unique,
        queue.replication_mark,
        queue.run_records,
        queue.run_outbox,
        queue.undoing_runs,
        queue.revoked_jobs,
        queue.revoked_documents,
    )
    yield from (queue.slots, queue.slot_counts, queue.limited_counts, queue.documents)
    yield from (queue.foreign_jobs, queue.code_versions, queue.flow)
    if queue.queue != EVENTS:  # events have no schedules
        yield from (keys.schedules(queue.queue), keys.schedule_times(queue.queue))
    for sink in sinks:
        yield from (queue.documents_for(sink), queue.claimed_documents(sink), queue.document_progress(sink))
