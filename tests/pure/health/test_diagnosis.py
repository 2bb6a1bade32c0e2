"""Diagnosis: each reading is ok, a warning or a failure, and whoever is not well is told what to do."""

import ast
import re
import shlex
from datetime import date
from pathlib import Path
from typing import Any

import click
import pytest

from celery5.broker.calls.health import PROBE_PERMISSIONS
from celery5.broker.keys import Keys, is_owned
from celery5.cli.main import cli
from celery5.protocol.health import broker_diagnosis, host_diagnosis
from celery5.protocol.health.broker_diagnosis import Finding, SentinelView, diagnose_replication
from celery5.protocol.health.host_diagnosis import Credential, SystemdUnit, WorkerVersion
from celery5.protocol.job.failure_groups import DeadJobGroup, DeadJobGroups
from celery5.protocol.streams.diagnosis import GroupHealth, diagnose_streams
from tests.house.sources import HERE, files

TODAY = date(2026, 11, 21)
LONG = "3000-01-01"


def mine(until: str = LONG, *, revoked: bool = False) -> Credential:
    return Credential("mine", "ab" * 32, until, revoked)


def unit(name: str = "celery5-worker@.service", **said: Any) -> SystemdUnit:
    return SystemdUnit(name, **{"is_user_unit": True, "enabled": True} | said)


def died(count: int, kind: str = "", *reasons: str) -> DeadJobGroup:
    return DeadJobGroup(
        id="1", task="shop.t", type=kind, pattern="", count=count, first_died=1.0, last_died=2.0, queues=("default",),
        reasons=reasons, message="", traceback="", ids=(),
    )  # fmt: skip


def dead(*groups: DeadJobGroup, after: str = "") -> Finding:
    matched = sum(group.count for group in groups)
    found = DeadJobGroups(
        groups=groups, looked_at=matched, matched=matched, ungrouped=0, total=matched, next=after
    )
    return host_diagnosis.diagnose_dead_jobs(found)


CASES: list[tuple[Finding, str, str]] = [
    (dead(), "ok", "none of the last day"),
    (dead(died(2, "OSError"), after="1-0"), "warn", "more than 2 of the last day: 2 of shop.t (OSError)"),
    (dead(died(1, "", "expired", "revoked")), "warn", "1 of the last day: 1 of shop.t (expired and revoked)"),
    (
        broker_diagnosis.diagnose_server({"redis_version": "7.0.15", "role": "master"}),
        "ok",
        "redis 7.0.15, standalone",
    ),
    (
        broker_diagnosis.diagnose_server({"valkey_version": "8.1.0", "redis_version": "7.2.4"}),
        "ok",
        "valkey 8.1.0",
    ),
    (broker_diagnosis.diagnose_server({"redis_version": "6.0.9"}), "fail", "redis 6.0.9"),
    (broker_diagnosis.diagnose_server({"redis_version": "7.0.15", "role": "slave"}), "fail", "a replica"),
    (
        broker_diagnosis.diagnose_server({"redis_version": "7.0.15", "redis_mode": "cluster"}),
        "ok",
        "redis 7.0.15, cluster",
    ),
    (
        broker_diagnosis.diagnose_server({"garnet_version": "1.1.1", "redis_version": "7.4.3"}),
        "fail",
        "garnet 1.1.1, standalone: it has no streams",
    ),
    (
        broker_diagnosis.diagnose_server({"dragonfly_version": "df-v1.40.1", "redis_version": "7.4.0"}),
        "warn",
        "dragonfly df-v1.40.1, standalone: celery5 is not tested on it",
    ),
    (
        broker_diagnosis.diagnose_server({"redis_version": "6.3.4", "mvcc_depth": "0", "role": "master"}),
        "warn",
        "keydb 6.3.4, standalone: celery5 is not tested on it",
    ),
    (
        broker_diagnosis.diagnose_server(
            {"redis_version": "6.3.4", "mvcc_depth": "0", "role": "active-replica"}
        ),
        "fail",
        "jobs run twice",
    ),
    (
        broker_diagnosis.diagnose_server({"kvrocks_version": "2.15.0", "redis_version": "4.0.0"}),
        "warn",
        "kvrocks 2.15.0",
    ),
    (broker_diagnosis.diagnose_server({}), "warn", "unknown version"),
    (
        broker_diagnosis.diagnose_persistence({}, {"appendonly": "yes", "appendfsync": "always"}),
        "ok",
        "nothing is lost",
    ),
    (
        broker_diagnosis.diagnose_persistence({}, {"appendonly": "yes", "appendfsync": "everysec"}),
        "ok",
        "two seconds",
    ),
    (
        broker_diagnosis.diagnose_persistence({}, {"appendonly": "yes", "appendfsync": "no"}),
        "warn",
        "half a minute",
    ),
    (
        broker_diagnosis.diagnose_persistence({}, {"appendonly": "no", "save": "3600 1"}),
        "warn",
        "snapshots only (save 3600 1)",
    ),
    (broker_diagnosis.diagnose_persistence({}, {"appendonly": "no", "save": ""}), "fail", "loses every job"),
    (broker_diagnosis.diagnose_persistence({"aof_enabled": "1"}, None), "ok", "appendfsync cannot be read"),
    (broker_diagnosis.diagnose_persistence({"aof_enabled": "0"}, None), "warn", "appendonly no"),
    (broker_diagnosis.diagnose_persistence({}, None), "warn", "cannot be read"),
    (
        broker_diagnosis.diagnose_persistence({"aof_last_write_status": "err"}, None),
        "fail",
        "append-only file",
    ),
    (
        broker_diagnosis.diagnose_persistence(
            {"aof_last_bgrewrite_status": "err", "aof_base_size": "0"}, {"appendonly": "yes"}
        ),
        "fail",
        "could not be rewritten",
    ),
    *(
        (
            broker_diagnosis.diagnose_persistence(
                {f"aof_rewrite_{how}": "1", "aof_base_size": "0"}, {"appendonly": "yes"}
            ),
            "warn",
            "does not have all jobs yet",
        )
        for how in ("in_progress", "scheduled")
    ),
    (
        broker_diagnosis.diagnose_persistence(
            {"aof_rewrite_in_progress": "1", "aof_base_size": "89"}, {"appendonly": "yes"}
        ),
        "ok",
        "appendonly yes",
    ),
    (
        broker_diagnosis.diagnose_persistence({"rdb_last_bgsave_status": "err"}, {"save": "1 1"}),
        "fail",
        "last snapshot",
    ),
    (broker_diagnosis.diagnose_eviction({}, {"maxmemory-policy": "noeviction"}), "ok", "noeviction"),
    (
        broker_diagnosis.diagnose_eviction({"maxmemory_policy": "allkeys-lru"}, None),
        "fail",
        "jobs are thrown away",
    ),
    (
        broker_diagnosis.diagnose_eviction(
            {"maxmemory_policy": "noeviction", "maxmemory": "100", "used_memory": "95"}, None
        ),
        "warn",
        "95% of maxmemory",
    ),
    (
        broker_diagnosis.diagnose_eviction(
            {"maxmemory_policy": "noeviction", "maxmemory": "100", "used_memory": "100"}, None
        ),
        "fail",
        "nothing more is stored",
    ),
    (broker_diagnosis.diagnose_eviction({}, None), "warn", "cannot be read"),
    (broker_diagnosis.diagnose_clock(0.2, 0.001), "ok", "0.200 s ahead of"),
    (broker_diagnosis.diagnose_clock(-2.0, 0.1), "warn", "2.000 s behind"),
    (broker_diagnosis.diagnose_clock(7.0, 0.1), "fail", "7.000 s ahead of"),
    (broker_diagnosis.diagnose_clock(7.0, 6.5), "ok", "ahead"),
    (
        broker_diagnosis.diagnose_latency([0.001] * 19 + [0.1]),
        "ok",
        "1.00 ms, at worst 100.00 ms, of 20 pings",
    ),
    (broker_diagnosis.diagnose_latency([0.02] * 20), "warn", "20.00 ms"),
    (broker_diagnosis.diagnose_latency([0.001] * 19 + [0.5]), "warn", "at worst 500.00 ms"),
    (broker_diagnosis.diagnose_latency([2.0] * 20), "fail", "2000.00 ms"),
    (
        broker_diagnosis.diagnose_permissions("", 40, {}),
        "ok",
        "user default may do all that is needed (40 commands tried)",
    ),
    (
        broker_diagnosis.diagnose_permissions("clerk", 40, {"XADD": "has no permissions to run"}),
        "fail",
        "clerk may not XADD",
    ),
    (
        broker_diagnosis.diagnose_permissions("clerk", 40, {"GET": "no permissions to access a key"}),
        "fail",
        "enter the keys",
    ),
    (broker_diagnosis.diagnose_keys(3, True, []), "ok", "(3 keys looked at)"),
    (broker_diagnosis.diagnose_keys(2000, False, []), "ok", "(2,000 keys looked at, of more)"),
    (
        broker_diagnosis.diagnose_keys(9, True, [f"k{n}" for n in range(7)]),
        "warn",
        "k0, k1, k2, k3, k4 and 2 more",
    ),
    (
        broker_diagnosis.diagnose_keys(9, True, ["k"], mistyped=["a is a string instead of a hash"]),
        "fail",
        "a is a string",
    ),
    (broker_diagnosis.diagnose_keys(9, True, [], unreadable=["add"]), "warn", "cannot be read: add"),
    (host_diagnosis.diagnose_key_folder("/k", None), "ok", "not there yet"),
    (host_diagnosis.diagnose_key_folder("/k", {".": 0o40700, "mine.pem": 0o100600}), "ok", "for nobody else"),
    (host_diagnosis.diagnose_key_folder("/k", {".": 0o40755}), "fail", "others may enter"),
    (
        host_diagnosis.diagnose_key_folder("/k", {".": 0o40700, "mine.pem": 0o100644}),
        "warn",
        "others may read mine.pem",
    ),
    (host_diagnosis.diagnose_certificates([], "", TODAY), "ok", "no key of its own yet"),
    (
        host_diagnosis.diagnose_certificates([mine()], "", TODAY),
        "ok",
        "1, until 3000-01-01; 0 of them revoked",
    ),
    (host_diagnosis.diagnose_certificates([mine("2026-12-01")], "", TODAY), "warn", "mine until 2026-12-01"),
    (host_diagnosis.diagnose_certificates([mine("2026-11-20")], "", TODAY), "fail", "ended on 2026-11-20"),
    (
        host_diagnosis.diagnose_certificates([mine(revoked=True)], "revoked", TODAY),
        "fail",
        "refused here: revoked",
    ),
    (host_diagnosis.diagnose_units([], version="", is_lingering=False, user="u"), "ok", "none"),
    (
        host_diagnosis.diagnose_units([unit()], version="252", is_lingering=True, user="u"),
        "ok",
        "systemd 252",
    ),
    (host_diagnosis.diagnose_units([unit()], version="239", is_lingering=True, user="u"), "warn", "239"),
    (
        host_diagnosis.diagnose_units([unit()], version="252", is_lingering=False, user="u"),
        "warn",
        "end when u logs out",
    ),
    (
        host_diagnosis.diagnose_units(
            [unit(is_user_unit=False, enabled=False)], version="252", is_lingering=False, user="u"
        ),
        "warn",
        "not started at boot",
    ),
    (
        host_diagnosis.diagnose_units([unit(missing="/opt/x")], version="252", is_lingering=True, user="u"),
        "fail",
        "/opt/x of celery5-worker@.service",
    ),
    (host_diagnosis.diagnose_application("shop", 3), "ok", "shop, 3 tasks"),
    (host_diagnosis.diagnose_application("shop", 0), "warn", "no tasks"),
    (host_diagnosis.diagnose_application("shop", 0, 2), "ok", "shop, 0 tasks, 2 processors"),
    (host_diagnosis.diagnose_settings(2, []), "ok", "2 set"),
    (host_diagnosis.diagnose_settings(2, ["this is odd"]), "warn", "this is odd"),
    (
        host_diagnosis.diagnose_workers([], "1", is_version_known=True, unrouted=False),
        "warn",
        "none is alive",
    ),
    (
        host_diagnosis.diagnose_workers([], "1", is_version_known=True, unread=["a"], recycling="w-1"),
        "ok",
        "w-1 is being recycled: its next process starts",
    ),
    (
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "1")], "1", is_version_known=True, unread=["a"], recycling="w-1"
        ),
        "warn",
        "reads: a; w-1 is being recycled, and perhaps reads them in a moment",
    ),
    (
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "1")], "1", is_version_known=True, unrouted=False
        ),
        "ok",
        "of version 1",
    ),
    (
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "")], "1", is_version_known=False, unrouted=False
        ),
        "ok",
        "no key",
    ),
    (
        host_diagnosis.diagnose_workers([WorkerVersion("w", "")], "1", is_version_known=True, unrouted=False),
        "warn",
        "no answer from w",
    ),
    (
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "0")], "1", is_version_known=True, unrouted=False
        ),
        "warn",
        "w 0",
    ),
    (
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "1")], "1", is_version_known=True, unrouted=False, unread=["a", "b"]
        ),
        "warn",
        "jobs wait on queues that none of them reads: a,b",
    ),
    (
        host_diagnosis.diagnose_workers(
            [WorkerVersion("v", "1"), WorkerVersion("w", "", "nobody vouches")],
            "1",
            is_version_known=True,
            unrouted=False,
        ),
        "fail",
        "2 live; w: nobody vouches",
    ),
    (
        host_diagnosis.diagnose_workers([WorkerVersion("w", "1")], "1", is_version_known=True, unrouted=True),
        "warn",
        "no Router",
    ),
    (
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "1")],
            "1",
            is_version_known=True,
            breakers={"w": ["mail", "sms"], "v": ["mail"]},
        ),
        "warn",
        "open circuit breakers: mail, sms of w and 1 more",
    ),
    (
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "1")], "1", is_version_known=True, unscheduled=True, unrouted=True
        ),
        "warn",
        "no Router: events and data wait, and no Scheduler: periodic tasks",
    ),
    (
        host_diagnosis.diagnose_workers(
            [], "1", is_version_known=True, unread=["a"], foreign={"a": "other.task"}
        ),
        "warn",
        "none is alive, and jobs wait on queues that nobody reads: a",
    ),
    (host_diagnosis.diagnose_python((3, 12, 1), "1"), "ok", "Python 3.12.1"),
    (host_diagnosis.diagnose_python((3, 10, 9), "1"), "fail", "Python 3.10.9"),
    (host_diagnosis.diagnose_libraries([], {}), "warn", "not installed"),
    (
        host_diagnosis.diagnose_libraries(["trio>=0.30", "rich; extra"], {"trio": "0.30.1"}),
        "ok",
        "trio 0.30.1",
    ),
    (
        host_diagnosis.diagnose_libraries(["trio>=0.30"], {"trio": "0.29"}),
        "fail",
        "trio 0.29, which is not trio>=0.30",
    ),
    (host_diagnosis.diagnose_libraries(["redis[hiredis]<9,>=8"], {"redis": "9.0"}), "fail", "redis 9.0"),
    (host_diagnosis.diagnose_libraries(["dependencies==7.7.0"], {"dependencies": "7.7"}), "ok", "7.7"),
    (host_diagnosis.diagnose_libraries(["trio>=0.30"], {}), "fail", "trio is not there"),
]


@pytest.mark.parametrize(("finding", "state", "says"), CASES)
def test_each_reading_is_judged_and_what_is_not_well_says_what_to_do(
    finding: Finding, state: str, says: str
) -> None:
    assert (finding.state, says in finding.summary) == (state, True), finding
    assert finding.state == "ok" or finding.remedy


DESTRUCTIVE = re.compile(
    r"\b(DEL|UNLINK|FLUSH\w*|XTRIM|XDEL|HDEL|EXPIRE|SHUTDOWN|purge|forget|force|reset|empty|revoke|discard|rm|kill|"
    r"cold)\b"
)
"""What destroys data or stops processes, as a command or a flag of one."""
ADVISERS = [
    *files("celery5/doctor"),
    *[path for path in files("celery5/protocol") if path.stem.endswith("diagnosis")],
]


@pytest.mark.parametrize("path", ADVISERS, ids=lambda path: path.stem)
def test_the_doctor_never_advises_what_destroys(path: Path) -> None:
    """Docstrings aside, no text of the doctor has such a word: whoever obeys it blindly loses nothing."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]
    assert [text for text in texts if DESTRUCTIVE.search(text)] == []


EVIL = "x; echo taken > mark #"
"""A name that is a command by itself, if a shell reads it unquoted."""


def make_findings(name: str) -> list[Finding]:
    """Return findings whose advice has a name from outside."""
    return [
        host_diagnosis.diagnose_key_folder(f"/k/{name}", {".": 0o40755}),
        host_diagnosis.diagnose_key_folder(f"/k/{name}", {".": 0o40700, name: 0o100644}),
        host_diagnosis.diagnose_units([unit()], version="252", is_lingering=False, user=name),
        host_diagnosis.diagnose_units(
            [unit(name, enabled=False)], version="252", is_lingering=True, user="u"
        ),
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "1")], "1", is_version_known=True, unread=[name.replace(" ", "+"), "mail"]
        ),
        host_diagnosis.diagnose_workers(
            [WorkerVersion("w", "1")], "1", is_version_known=True, unread=["a"], foreign={"a": name}
        ),
        host_diagnosis.diagnose_workers([WorkerVersion(name, "0")], "1", is_version_known=True),
        host_diagnosis.diagnose_certificates([mine("2026-11-20")], "", TODAY, folder=f"/k/{name}"),
        diagnose_streams(1, [GroupHealth(name, name, 1, is_live=False)]),
        diagnose_streams(1, [GroupHealth(name, name, 1, is_live=True, full=[1])]),
        diagnose_streams(1, [GroupHealth(name, name, 1, is_live=True, quarantined=[1])]),
        diagnose_streams(1, [GroupHealth(name, name, 1, is_live=True, parked=1)]),
    ]


COMMAND = re.compile(r"celery5 (?!on |runs |or |\d).*?(?=[:;,`]|$| (?:says|prints|shows|on this host)\b)")
"""A command of ours within an advice: it ends where a word of a sentence follows."""


def find_commands(remedy: str) -> list[list[str]]:
    """Return the words of each command of ours in an advice, without the first."""
    return [shlex.split(found)[1:] for found in COMMAND.findall(remedy)]


def test_each_command_of_ours_in_an_advice_is_one_that_there_is(tmp_path: Path) -> None:
    """Its options and arguments, too: whoever copies it gets no usage error."""
    (tmp_path / "FILE").touch()
    remedies = {finding.remedy for finding in [case[0] for case in CASES] + make_findings("orders")}
    commands = [words for remedy in sorted(remedies) for words in find_commands(remedy)]
    assert len(commands) > 15, commands
    for words in commands:
        words = [str(tmp_path / "FILE") if word.startswith("/") or word == "FILE" else word for word in words]
        command: click.Command = cli
        context = click.Context(cli, info_name="celery5")
        while isinstance(command, click.Group):
            found = command.get_command(context, words[0])
            assert found is not None, words
            context = click.Context(found, parent=context, info_name=words[0])
            command, words = found, words[1:]
        command.make_context(command.name, words, parent=context.parent).close()


@pytest.mark.parametrize(
    ("finding", "remedy"),
    [
        (host_diagnosis.diagnose_libraries([], {}, "/a b"), "pip install '/a b'"),
        (
            host_diagnosis.diagnose_libraries(
                ["trio>=0.30", "redis[hiredis]<9,>=8", "click>=8"], {"trio": "0.29", "click": "8.1"}
            ),
            "pip install 'trio>=0.30' 'redis[hiredis]<9,>=8'",
        ),
    ],
)
def test_libraries_are_installed_as_required_without_changing_celery5(finding: Finding, remedy: str) -> None:
    assert finding.remedy == remedy


TEMPLATES = [unit(f"celery5-{name}@.service", enabled=False) for name in ("router", "worker")]
CONTROLLER = unit("celery5-controller.service")
TARGET = unit("celery5.target")


@pytest.mark.parametrize(
    ("units", "remedy"),
    [
        ([CONTROLLER, *TEMPLATES, TARGET], ""),  # as the guide has it: a Controller starts all others
        ([unit("celery5-controller.service", enabled=False), *TEMPLATES, unit("celery5.target", enabled=False)],
         "systemctl --user enable celery5-controller.service"),
        (TEMPLATES, "systemctl --user enable celery5-router@NAME.service celery5-worker@NAME.service, each NAME"),
        ([CONTROLLER, unit("celery5.target", enabled=False)], "systemctl --user enable celery5.target"),
        ([unit(missing="/x")], "correct ExecStart in a drop-in: systemctl --user edit celery5-worker@.service"),
    ],
)  # fmt: skip
def test_units_that_start_nothing_at_boot_are_enabled_as_systemd_takes_it(
    units: list[SystemdUnit], remedy: str
) -> None:
    finding = host_diagnosis.diagnose_units(units, version="252", is_lingering=True, user="u")
    assert (finding.state == "ok", finding.remedy.startswith(remedy)) == (not remedy, True), finding


@pytest.mark.parametrize("name", ["a b", "a,b", "", "x}y", "red\x1b[31m", "a\u202eb", "n" * 201])
def test_no_worker_is_advised_for_a_name_that_no_queue_can_have(name: str) -> None:
    finding = host_diagnosis.diagnose_workers(
        [WorkerVersion("w", "1")], "1", is_version_known=True, unread=["mail", name]
    )
    assert find_commands(finding.remedy)[0] == ["worker", "start", "--queues", "mail"]
    assert f"leave {name!r}" in finding.remedy


def test_jobs_of_other_code_are_left_to_a_worker_of_that_code() -> None:
    finding = host_diagnosis.diagnose_workers(
        [WorkerVersion("w", "1")], "1", is_version_known=True, unread=["a", "b"], foreign={"b": "other.task"}
    )
    assert find_commands(finding.remedy) == [["worker", "start", "--queues", "a"]]
    assert "for b start a worker of the code that has the task other.task" in finding.remedy


@pytest.mark.parametrize("finding", make_findings(EVIL), ids=lambda finding: finding.summary[:30])
def test_a_name_in_an_advice_is_one_word_of_the_shell(finding: Finding) -> None:
    assert "echo" in finding.remedy
    assert "echo" not in shlex.split(finding.remedy)


@pytest.mark.parametrize("user", ["", "clerk", "shop-viewer", EVIL])
@pytest.mark.parametrize(
    ("refused", "summary"),
    [
        ({"XADD": "has no permissions to run the 'xadd' command"}, "may not XADD"),
        ({"GET": "can't access at least one of the keys"}, "may not enter the keys of celery5 by GET"),
        ({"PUBLISH": "can't publish to the channel"}, "may not use the channels of celery5 by PUBLISH"),
    ],
)
def test_no_advice_changes_the_rights_of_the_user_that_asks(
    user: str, refused: dict[str, str], summary: str
) -> None:
    found = broker_diagnosis.diagnose_permissions(user, 40, refused)
    assert summary in found.summary
    assert "SETUSER" not in found.remedy
    assert "celery5 acl operator" in found.remedy


def test_every_command_of_our_scripts_is_tried() -> None:
    scripts = [
        path.read_text()
        for path in files("celery5/broker/lua", suffix=".lua")
        if path.stem != "probe_permissions"
    ]
    used = set(re.findall(r"""redis\.p?call\(\s*['"](\w+)['"]""", "".join(scripts)))
    calls = "".join(path.read_text() for path in files("celery5/broker"))
    used |= set(re.findall(r'Call\(\s*\(\s*"([A-Z]+)"', calls))
    tried = set(re.findall(r"'([A-Z]+)'", PROBE_PERMISSIONS.body))
    elsewhere = {
        "PING",
        "EVALSHA",
        "WAIT",
        "INFO",
        "CONFIG",
        "SCAN",
        "TYPE",
        "CLIENT",
        "MEMORY",
        "ASKING",  # these two of a cluster alone, which is not reached without them
        "CLUSTER",
    }  # tried as such, or not needed
    assert used - tried == elsewhere & used - tried


def test_every_key_that_stays_has_an_owner() -> None:
    keys, queue = Keys("shop"), Keys("shop").for_queue("default")
    lasting = [
        keys.queues,
        keys.settings,
        keys.paused,
        keys.limits,
        keys.suspended,
        keys.live_processes("scheduler"),
    ]
    lasting += [keys.schedule_queues, keys.schedules("default"), keys.schedule_times("a:b")]
    lasting += [*queue.streams, queue.jobs, queue.due, queue.waiting, queue.dead, queue.leases, queue.unique]
    lasting += [
        queue.slots,
        queue.slot_counts,
        queue.limited_counts,
        queue.waiting_list_prefix + "line t",
        queue.documents,
    ]
    lasting += [
        queue.documents_for("a"),
        queue.claimed_documents("a"),
        queue.document_progress("a"),
        keys.for_queue("{events}").stream,
    ]
    stream = keys.for_stream("orders")
    lasting += [keys.record_streams, stream.map, stream.groups, stream.log(3), stream.partition("bill", 3)]
    lasting += [stream.state("bill"), stream.outbox("bill", 3), stream.dead("bill"), stream.plan("bill")]
    assert [error for error in lasting if not is_owned(error)] == []
    passing = [
        keys.nonce("x"),
        queue.result("x"),
        queue.replication_mark,
        keys.inbox("x"),
        keys.for_stream("orders").sent("x"),
        "celery5:{shop}:what",
        "other",
    ]
    assert [error for error in passing if is_owned(error)] == []


def test_an_application_knows_its_keys_from_those_of_others() -> None:
    keys = Keys("sh[o]p")
    assert keys.pattern == "celery5:{sh\\[o\\]p*"
    assert keys.owns(keys.queues)
    assert keys.owns(keys.for_queue("a:b").stream)
    assert not keys.owns(Keys("sh[o]p2").queues)


def test_the_table_of_keys_in_the_documentation_has_no_other_that_stays() -> None:
    rows = (HERE / "docs" / "reference" / "keys.md").read_text().split("Channels, which")[0].splitlines()
    stays = [
        re.split(r" \| ", row)
        for row in rows
        if row.startswith("| `") and "stays" in row.rsplit(" | ", 1)[-1]
    ]
    assert stays
    for cells in stays:
        key = re.sub(r"<[^>]+>", "x", cells[1].strip("`"))
        assert is_owned(key), key


ONE = {"slave0": "ip=10.0.0.2,port=6379,state=online,offset=14,lag=0"}
SEES = SentinelView("a:1", primary="10.0.0.1:6379")


@pytest.mark.parametrize(
    ("info", "config", "wanted", "sentinels", "state", "says"),
    [
        (
            ONE,
            {"min-replicas-to-write": "1"},
            1,
            [SEES],
            "ok",
            "primary 10.0.0.1:6379, 1 replica: 10.0.0.2:6379",
        ),
        (ONE, None, 1, [], "ok", "1 replica: 10.0.0.2:6379"),
        (ONE, {"min-replicas-to-write": "0"}, 1, [], "warn", "min-replicas-to-write 0"),
        (ONE, None, 2, [], "fail", "the setting replicas demands 2"),
        ({"slave0": "ip=h,port=1,state=wait_bgsave"}, None, 1, [], "fail", "0 replicas"),
        ({}, None, 0, [SEES], "warn", "0 replicas"),
        (ONE, None, 0, [SentinelView("a:1", primary="p", no_quorum="1 usable")], "fail", "a:1: 1 usable"),
        (ONE, None, 0, [SEES, SentinelView("b:2", error="is gone")], "warn", "sentinel b:2 is gone"),
        (ONE, None, 0, [SEES, SentinelView("b:2")], "warn", "sentinel b:2 does not know the service"),
        (ONE, None, 0, [SEES, SentinelView("b:2", primary="p:1")], "warn", "10.0.0.1:6379 or p:1"),
    ],
)
def test_replication_is_diagnosed(
    info: dict[str, str],
    config: dict[str, str] | None,
    wanted: int,
    sentinels: list[SentinelView],
    state: str,
    says: str,
) -> None:
    finding = diagnose_replication(info, config, wanted=wanted, sentinels=sentinels)
    assert (finding.state, says in finding.summary) == (state, True), finding
    assert bool(finding.remedy) == (state != "ok")
