"""Keys: every key has its place on the page about keys, and all keys of a queue are in one slot."""

import re
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.broker.key_types import find_types
from celery5.broker.keys import EVENTS, Keys, QueueKeys, find_lifetime, is_owned

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "keys.md").read_text()
SHOP = Keys("<app>")
ORDERS = SHOP.for_stream("<stream>")
MAIL = SHOP.for_queue("<queue>")

names = st.text(st.characters(codec="utf-8", exclude_characters="{}: \n\t"), min_size=1, max_size=9)
queues = st.text(st.characters(codec="utf-8", exclude_characters="{} \n\t"), min_size=1, max_size=9)


def made_for_streams() -> dict[str, str]:
    """Every key and channel of a stream of records."""
    return {
        "record_streams": SHOP.record_streams,
        "map": ORDERS.map,
        "groups": ORDERS.groups,
        "relayed": ORDERS.relayed,
        "archiving": ORDERS.archiving,
        "archive": f"{ORDERS.archive_prefix}<partition>",
        "log": f"{ORDERS.log_prefix}<partition>",
        "sent": ORDERS.sent("<nonce>"),
        "members": ORDERS.members("<group>"),
        "incarnations": ORDERS.incarnations("<group>"),
        "plan": ORDERS.plan("<group>"),
        "classes": ORDERS.classes("<group>"),
        "partition": f"{ORDERS.partition_prefix}<group>:<partition>",
        "state": ORDERS.state("<group>"),
        "outbox": f"{ORDERS.outbox_prefix}<group>:<partition>",
        "dead_records": ORDERS.dead("<group>"),
        "parked": ORDERS.parked("<group>"),
        "parked_logs": f"{ORDERS.parked_log_prefix}<group>:<key>",
        "changes": ORDERS.changes("<group>"),
    }


def made_for_queues() -> dict[str, str]:
    """Every key and channel of a queue that is a field of its keys."""
    own = {field.name: getattr(MAIL, field.name) for field in fields(QueueKeys)}
    assert own.pop("normal") == own["stream"]
    prefixes = ("result_prefix", "window_prefix", "run_prefix", "plan_prefix", "progress_prefix")
    for name in ("queue", "lane", "_lanes", *prefixes):
        del own[name]
    return own | {
        "code_version": MAIL.code_version("<version>"),
        "foreign_list": MAIL.foreign_list("<task> <signatures>"),
        "audit_entries": SHOP.audit_entries,
        "signed_out": SHOP.signed_out("<id>"),
        "kind_starts": SHOP.kind_starts("<kind>"),
    }


ALERT_KEYS = (
    "alerts",
    "alert_outbox",
    "alert_logged",
    "alert_history",
    "alert_silences",
    "alert_undelivered",
)


def made_for_metrics() -> dict[str, str]:
    """Every key of the metrics of an application, and of the history of its jobs."""
    return {
        **{name: getattr(SHOP, name) for name in ALERT_KEYS},
        "failed_jobs": SHOP.failed_jobs,
        "other_jobs": SHOP.other_jobs,
        "history_sent": SHOP.history_sent("<process>"),
        "metrics_reports": SHOP.metrics_reports,
        "metrics_sent": SHOP.metrics_sent("<process>"),
        "metrics_turn": SHOP.metrics_turn,
        "metrics_state": SHOP.metrics_state,
        "metrics_minutes_prefix": SHOP.metrics_minutes_prefix + "<queue>",
        "metrics_hours_prefix": SHOP.metrics_hours_prefix + "<queue>",
    }


def made_for_processes() -> dict[str, str]:
    """Those about processes and how many there are to be."""
    return {
        "live_processes": SHOP.live_processes("<kind>"),
        "repaired_losses": SHOP.repaired_losses("<kind>"),
        "leader": SHOP.leader,
        "member_end": SHOP.member_end("<member>"),
        "members_report": SHOP.members_report,
        "recycling": SHOP.recycling,
        "recycling_permit": SHOP.recycling_permit("<member>"),
        "scaling": SHOP.scaling,
        "scaling_turn": SHOP.scaling_turn,
        "report": SHOP.report("<worker>"),
        "inbox": SHOP.inbox("<process>"),
    }


def made() -> dict[str, str]:
    """Every key and channel that the code makes, by its name in the code."""
    return {
        **made_for_streams(),
        **made_for_metrics(),
        **made_for_queues(),
        **made_for_processes(),
        "run": MAIL.run("<id>"),
        "run_items": MAIL.run_items("<id>", "<node>"),  # type: ignore[arg-type]
        "run_arguments": MAIL.run_arguments("<id>"),
        "workflow_plan": MAIL.plan("<hash>"),
        "run_home": SHOP.run_home("<id>"),
        "event_waits": SHOP.event_waits("<event>:<hash>"),
        "queues": SHOP.queues,
        "bulk_action": SHOP.bulk_action("<id>"),
        "bulk_lease": SHOP.bulk_lease("<id>"),
        "bulk_actions": SHOP.bulk_actions,
        "settings": SHOP.settings,
        "check": SHOP.check("<name>"),
        "check_turn": SHOP.check_turn("<name>"),
        "audit": SHOP.audit,
        "paused": SHOP.paused,
        "check_notice": SHOP.check_notice("<name>"),
        "schedule_queues": SHOP.schedule_queues,
        "schedules": SHOP.schedules("<queue>"),
        "schedule_times": SHOP.schedule_times("<queue>"),
        "schedule_changes": SHOP.schedule_changes,
        "declared_schedules": SHOP.declared_schedules("<process>"),
        "subscriptions": SHOP.subscriptions,
        "subscription_deadlines": SHOP.subscription_deadlines,
        "unclaimed_events": SHOP.unclaimed_events,
        "kept_events": SHOP.kept_events("<event>"),
        "limits": SHOP.limits,
        "suspended": SHOP.suspended,
        "imposed_limits": SHOP.imposed_limits,
        "limit_rules_turn": SHOP.limit_rules_turn,
        "nonce": SHOP.nonce("<id>"),
        "reply": SHOP.reply("<id>"),
        "documents_for": MAIL.documents_for("<sink>"),
        "claimed_documents": MAIL.claimed_documents("<sink>"),
        "document_progress": MAIL.document_progress("<sink>"),
        "source_lease": SHOP.source_lease("<name>"),
        "timer_leader": SHOP.timer_leader,
        "timer_candidates": SHOP.timer_candidates,
        "progress": MAIL.progress("<id>"),
        "result": MAIL.result("<id>"),
        "unique_window": MAIL.unique_window("<task> <key>"),
    }


def test_a_result_key_tells_its_queue_and_its_job() -> None:
    shop = Keys("shop")
    for queue, job_id in (("default", "a"), ("a:b", "x:result:y"), ("result:", "}:result:")):
        assert shop.parse_result_key(shop.for_queue(queue).result(job_id)) == (queue, job_id)


def test_the_page_lists_every_key_and_channel_and_no_other() -> None:
    keys, channels = PAGE.split("Channels, which hold nothing")
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (\w[\w ]*) \|", keys, re.MULTILINE)
    told = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", channels, re.MULTILINE)
    assert {name: key for name, key, _ in rows} | dict(told) == made()
    assert {name for name, _ in told} == {
        "wake",
        "revoke",
        "result",
        "inbox",
        "reply",
        "documents",
        "schedule_changes",
        "changes",
        "slots_freed",
        "limits",
    }
    assert {kind for _, _, kind in rows} <= {"set", "stream", "hash", "sorted set", "string", "list"}


def list_rows() -> list[tuple[str, str, str]]:
    """Name, key and lifetime of each row of the page's table of keys."""
    rows = [row.strip("| ").split(" | ") for row in PAGE.split("Channels, which")[0].splitlines()]
    return [(row[0].strip("`"), row[1].strip("`"), row[-1]) for row in rows if row[0].startswith("`")]


def fill_in(key: str) -> list[str]:
    """Return keys of that form, for names and numbers as they may really be."""
    return [
        re.sub(r"<app>", "shop", re.sub(r"<(?!app>)\w+>", part, key))
        for part in ("1", "default", "eu:mail", "a b/c*[x]")
    ]


LIMITED = re.compile(
    r"\d ?(s|h|days?|minutes)\b|a (second|minute|day|week)\b|ttl`|periods|leases|intervals|`unique_for`|until .*expired"
    r"|of a lease|gone with (it|the longest)|their documents|retention|deleted when|the same$"
)
"""How the page says that a key has a time to live."""


@pytest.mark.parametrize(("name", "key", "lifetime"), list_rows(), ids=lambda value: value[:20])
def test_every_key_of_the_page_has_an_owner_or_a_time_to_live(name: str, key: str, lifetime: str) -> None:
    found = {find_lifetime(filled) for filled in fill_in(key)}
    assert found in ({"stays"}, {"expires"}), f"{name}: {found}"
    if "stays" in lifetime or not LIMITED.search(lifetime):
        assert found == {"stays"}, f"{name} {lifetime}"


def test_every_key_that_the_code_makes_is_known_by_its_class() -> None:
    for name, key in made().items():
        assert all(find_lifetime(filled) for filled in fill_in(key)), name
    for field in fields(QueueKeys):
        key = getattr(SHOP.for_queue(EVENTS), field.name)
        if field.name not in ("queue", "lane", "_lanes"):
            assert all(find_lifetime(filled) for filled in fill_in(key)), field.name


REDIS_TYPES = {"sorted set": "zset"}
"""What Redis calls a type, where the page has another word."""


def test_every_key_of_the_page_has_the_type_that_the_page_says_or_is_left_alone() -> None:
    table = PAGE.split("Channels, which hold nothing")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (\w[\w ]*) \|", table, re.MULTILINE)
    assert len(rows) > 80
    known = 0
    for name, key, kind in rows:
        for filled in fill_in(key):
            types = find_types(filled)
            known += bool(types)
            assert types <= {REDIS_TYPES.get(kind, kind)}, name
    assert known > 60
    assert find_types("celery5:{shop}:what") == set()


def test_no_other_key_is_known() -> None:
    others = (
        "celery5:{shop}:what",
        "celery5:{shop:mail}:jobs:what",
        "celery5:{shop:mail}:streams",
        "other",
        "",
    )
    assert [key for key in others if find_lifetime(key)] == []
    assert is_owned(MAIL.idle_runs.replace("<app>", "shop"))


def slot_tag(key: str) -> str:
    """What a cluster hashes of a key."""
    return key[key.index("{") + 1 : key.index("}")]


@given(names, queues)
def test_all_keys_of_a_stream_are_in_one_slot(app: str, stream: str) -> None:
    keys = Keys(app).for_stream(stream)
    own = [getattr(keys, field.name) for field in msgspec.structs.fields(keys) if field.name != "stream"]
    assert len(set(own)) == len(own) == 17
    assert {slot_tag(key) for key in own} == {f"{app}:{stream}"}


@given(names, queues, st.text(max_size=9))
def test_all_keys_of_a_queue_are_in_one_slot(app: str, queue: str, job_id: str) -> None:
    keys = Keys(app).for_queue(queue)
    own = [
        *keys.streams,
        keys.jobs,
        keys.due,
        keys.waiting,
        keys.dead,
        keys.leases,
        keys.unique,
        keys.wake,
        keys.revoke,
        keys.unique_window(job_id),
        keys.result(job_id),
        keys.documents,
        keys.documents_for(job_id),
        keys.claimed_documents(job_id),
        keys.document_progress(job_id),
    ]
    assert {slot_tag(key) for key in own} == {f"{app}:{queue}"}


@given(names, queues, names, queues)
def test_no_two_queues_of_any_applications_share_a_key(app: str, queue: str, other: str, its: str) -> None:
    if (app, queue) != (other, its):
        assert Keys(app).for_queue(queue).stream != Keys(other).for_queue(its).stream


def test_the_lanes_of_a_queue_differ_in_their_stream_alone() -> None:
    keys = SHOP.for_queue("mail")
    high = keys.on_lane("h")
    assert high is keys.on_lane("h")
    assert high is high.on_lane("h")
    assert (high.stream, high.lane) == (keys.high, "h")
    assert high.on_lane("") == keys
    assert len({keys.on_lane(lane).stream for lane in "hlg"} | {keys.stream}) == 4
    same = [
        name
        for name in (field.name for field in fields(QueueKeys))
        if name not in ("stream", "lane", "_lanes")
    ]
    assert [getattr(high, name) for name in same] == [getattr(keys, name) for name in same]
