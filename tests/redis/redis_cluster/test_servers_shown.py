"""What `celery5 info` and `celery5 doctor` show of the servers of a cluster."""

from pathlib import Path

from celery5 import App
from celery5.cli.standalone.info import _make_server_rows
from celery5.doctor.examination import get_checks
from celery5.protocol.hash_slots import NodeAddress
from celery5.protocol.health.broker_diagnosis import Finding, diagnose_cluster
from celery5.protocol.health.server_nodes import PrimaryView, ReplicaView, read_primaries, read_replicas
from tests.cluster_servers import TestCluster
from tests.story.cli.commands import celery5


def run_check(app: App, name: str) -> Finding:
    """Run one check of the doctor."""
    checks = {check.name: check for check in get_checks(app)}
    try:
        return checks[name].run()
    finally:
        for check in checks.values():
            if check.cleanup is not None:
                check.cleanup()


def test_info_shows_each_primary_with_its_slots(
    redis_cluster: TestCluster, app_name: str, tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text(f"from celery5 import App\napp = App({app_name!r})\n")
    words = ("-A", "shown", "info")
    ended = celery5(*words, cwd=tmp_path, env={"CELERY5_BROKER": redis_cluster.url})
    assert ended.code == 0, ended.err
    rows = [line.split() for line in ended.out.splitlines() if line.startswith("127.0.0.1:")]
    assert {row[0] for row in rows} == {f"127.0.0.1:{node.port}" for node in redis_cluster.primaries}
    assert {row[1] for row in rows} == {"primary"}
    assert rows[0][2].startswith("0-")


def test_the_doctor_names_the_primaries_that_have_no_replica(redis_cluster: TestCluster, app: App) -> None:
    finding = run_check(app, "replication")
    assert finding.state == "warn"
    for node in redis_cluster.primaries:
        assert f"127.0.0.1:{node.port} (slots " in finding.summary
        assert f"127.0.0.1:{node.port}" in finding.remedy


def test_the_doctor_finds_that_a_user_of_a_cluster_may_do_all(redis_cluster: TestCluster, app: App) -> None:
    assert run_check(app, "permissions").state == "ok"
    redis_cluster.wait_until_whole()


def test_the_memory_that_is_shown_is_that_of_the_fullest_primary(
    redis_cluster: TestCluster, app: App
) -> None:
    (plain,) = app.metrics.memory()
    assert not plain.is_almost_full
    client = redis_cluster.primaries[1].client
    used = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", int(used / 0.95))
    try:
        (memory,) = app.metrics.memory()
        assert memory.is_almost_full
        assert run_check(app, "memory").state in ("warn", "fail")
    finally:
        client.config_set("maxmemory", 0)


def test_a_cluster_is_as_replicated_as_the_setting_demands() -> None:
    online = ReplicaView("b:1", "online", 0, 0)
    whole = PrimaryView(address="a:1", slots=("0-16383",), replicas=(online,))
    assert diagnose_cluster([whole], {"min-replicas-to-write": "1"}, wanted=1).state == "ok"
    assert diagnose_cluster([whole], {"min-replicas-to-write": "0"}, wanted=1).state == "warn"
    assert diagnose_cluster([whole], None, wanted=2).state == "fail"
    lost = PrimaryView(address="a:1", slots=("0-16383",), replicas=(ReplicaView("b:1"),))
    finding = diagnose_cluster([lost], None, wanted=0)
    assert (finding.state, finding.summary) == ("warn", "a:1 (slots 0-16383): b:1 (not connected)")
    silent = PrimaryView(address="a:1", slots=("0-16383",), error="gone")
    assert diagnose_cluster([silent], None, wanted=1).summary == "a:1 (slots 0-16383): gone"


def test_a_replica_is_known_by_its_ip_address_where_nodes_have_host_names() -> None:
    asked = NodeAddress("10.0.0.1", 6379)
    raw = [
        [
            0,
            99,
            [b"one.example", 1, b"id", [b"ip", b"10.0.0.2"]],
            [b"two.example", 2, b"id", [b"ip", b"10.0.0.3"]],
        ],
        [101, 101, [b"one.example", 1, b"id", [b"ip", b"10.0.0.2"]]],
        [200, 201, [None, 3, b"id"], [b"10.0.0.4", 4, b"id"]],
    ]
    one, other = read_primaries(raw, asked)
    assert (one.address, one.slots, one.replicas) == (
        "one.example:1",
        ("0-99", "101"),
        (ReplicaView("10.0.0.3:2"),),
    )
    assert (other.address, other.replicas[0].address) == ("10.0.0.1:3", "10.0.0.4:4")


def test_how_far_a_replica_is_behind_is_read_from_its_primary() -> None:
    info = {
        "role": "master",
        "slave0": "ip=10.0.0.3,port=2,state=online,offset=90,lag=1",
        "slave1": "ip=10.0.0.4,port=2,state=wait_bgsave,offset=0,lag=0",
        "master_repl_offset": "100",
    }
    first, second = read_replicas(info)
    assert (first.address, first.lag, first.behind, first.is_online) == ("10.0.0.3:2", 1, 10, True)
    assert (second.is_online, second.describe_lag()) == (False, "wait_bgsave")


def test_each_replica_has_a_row_below_its_primary() -> None:
    primary = PrimaryView(
        address="a:1", slots=("0-9",), replicas=(ReplicaView("b:2", "online", 1, 2048), ReplicaView("c:3"))
    )
    assert _make_server_rows([primary]) == [
        {"server": "a:1", "is": "primary", "slots": "0-9", "lag": ""},
        {"server": "b:2", "is": "replica of a:1", "slots": "", "lag": "1 s, 2 KiB"},
        {"server": "c:3", "is": "replica of a:1", "slots": "", "lag": "not connected"},
    ]
