"""Doctor: what is wrong with a real server, with keys, units and workers is found, and one check never stops
another."""

import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
import trustme

from celery5 import App, Misconfigured, __version__
from celery5.broker.keys import GROUP
from celery5.broker.permissions import make_user
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.doctor import broker_checks
from celery5.doctor.broker_checks import BrokerChecks
from celery5.doctor.examination import DoctorCheck, get_checks, run_checks
from celery5.doctor.host_checks import HostChecks
from celery5.protocol.health import broker_diagnosis
from celery5.protocol.health.broker_diagnosis import Finding
from tests.redis.commands.staff import wait_until


@pytest.fixture
def own(own_server: EmbeddedServer, app_name: str, tmp_path: Path) -> Iterator[App]:
    """An application over its own server."""
    app = App(app_name, broker=own_server.url, keys=str(tmp_path / "keys"))
    yield app
    app.close()


_OPEN: list[BrokerChecks] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the connections of the checks that a test made."""
    yield
    while _OPEN:
        _OPEN.pop().close()


def broker_of(app: App) -> BrokerChecks:
    made = BrokerChecks(app.connections.endpoint, app.keys, "default")
    _OPEN.append(made)
    return made


def test_a_server_whose_jobs_would_not_outlive_it_is_found(own: App, second: "redis.Redis") -> None:
    def found(appendonly: str, appendfsync: str, save: str) -> Finding:
        for name, value in (("appendonly", appendonly), ("appendfsync", appendfsync), ("save", save)):
            second.config_set(name, value)
        return broker_of(own).check_persistence()

    assert found("yes", "everysec", "").state == "ok"
    assert found("yes", "no", "").state == "warn"
    assert "save 3600 1" in found("no", "everysec", "3600 1").summary
    none = found("no", "everysec", "")
    assert (none.state, none.remedy.startswith("CONFIG SET appendonly yes")) == ("fail", True)


def test_an_append_only_file_that_was_just_turned_on_is_not_yet_well(own: App, second: "redis.Redis") -> None:
    """While a snapshot is saved its rewriting is only scheduled: a restart would begin without any job."""
    second.config_set("appendonly", "no")
    second.config_set("appendfsync", "everysec")
    second.config_set("rdb-key-save-delay", 2_000_000)
    second.set("a-job", "1")
    second.bgsave()
    second.config_set("appendonly", "yes")
    try:
        assert second.info("persistence")["aof_rewrite_in_progress"] == 0
        found = broker_of(own).check_persistence()
        assert (found.state, "does not have all jobs yet" in found.summary) == ("warn", True)
        assert "aof_rewrite_scheduled:0" in found.remedy
        assert "aof_rewrite_scheduled:0" in broker_diagnosis.TURN_AOF_ON
    finally:
        second.config_set("rdb-key-save-delay", 0)
    wait_until(lambda: broker_of(own).check_persistence().state == "ok")


def test_a_server_that_would_throw_jobs_away_is_found(own: App, second: "redis.Redis") -> None:
    assert broker_of(own).check_memory().state == "ok"
    second.config_set("maxmemory-policy", "allkeys-lru")
    assert broker_of(own).check_memory().state == "fail"
    second.config_set("maxmemory-policy", "noeviction")
    second.config_set("maxmemory", 1024)
    assert broker_of(own).check_memory().state == "fail"
    second.config_set("maxmemory", int(second.info("memory")["used_memory"] * 1.05))
    assert broker_of(own).check_memory().state == "warn"
    second.config_set("maxmemory", 0)


def test_a_sound_server_is_sound(own: App) -> None:
    broker = broker_of(own)
    assert broker.check_server().state == "ok"
    assert broker.check_clock().state == "ok"
    assert "of 20 pings" in broker.check_latency().summary
    assert broker.check_permissions() == broker.check_permissions()
    assert (broker.check_permissions().state, broker.check_keys().state) == ("ok", "ok")


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (["+@all", "-xadd", "-zadd", "~*", "&*"], ["XADD", "ZADD"]),
        (["+@all", "~other:*", "&*"], ["may not enter the keys"]),
        (["+@all", "~*", "resetchannels", "&other:*"], ["PUBLISH"]),
        (["+@all", "-subscribe", "~*", "&*"], ["SUBSCRIBE"]),
        (["+@all", "-evalsha", "~*", "&*"], ["EVALSHA"]),
        (["+@all", "-client|unblock", "~*", "&*"], ["CLIENT|UNBLOCK"]),
    ],
)
def test_what_a_user_may_not_is_found_and_what_to_permit_is_said(
    own: App, second: "redis.Redis", rules: list[str], words: list[str]
) -> None:
    second.execute_command("ACL", "SETUSER", "clerk", "on", ">hush", *rules)  # type: ignore[no-untyped-call]
    path = own.connections.endpoint.path
    app = App(own.name, broker=f"unix://clerk:hush@{path}?db=0")
    found = broker_of(app).check_permissions()
    assert found.state == "fail"
    assert [word for word in words if word not in found.summary] == []
    assert "hush" not in found.summary + found.remedy
    assert list(second.scan_iter("*")) == []  # it cleans up after itself, or Redis does within seconds
    app.close()
    # What it says is what helps, and changes nothing for the user that has asked.
    assert "celery5 acl operator" in found.remedy
    before = second.execute_command("ACL", "GETUSER", "clerk")  # type: ignore[no-untyped-call]
    operator = make_user(own.name, "operator")
    second.execute_command("ACL", "SETUSER", operator.user, ">hush", *operator.rules)  # type: ignore[no-untyped-call]
    app = App(own.name, broker=f"unix://{operator.user}:hush@{path}?db=0")
    assert broker_of(app).check_permissions().state == "ok"
    assert second.execute_command("ACL", "GETUSER", "clerk") == before  # type: ignore[no-untyped-call]
    app.close()


def test_a_replica_is_no_matter_of_permissions(own: App, second: "redis.Redis") -> None:
    second.replicaof("127.0.0.1", "1")
    assert broker_of(own).check_server().remedy == "have the broker's URL name the master"
    assert broker_of(own).check_permissions().state == "ok"
    second.replicaof("NO", "ONE")


@pytest.mark.plants
def test_a_key_that_nobody_owns_is_found_among_those_that_somebody_does(
    own: App, second: "redis.Redis"
) -> None:
    second.set(f"celery5:{{{own.name}}}:old-thing", "1")
    second.set(f"celery5:{{{own.name}}}:passing", "1", ex=100)
    second.set(f"celery5:{{{own.name}-other}}:not-ours", "1")
    second.sadd(own.keys.queues, "default")
    found = broker_of(own).check_keys()
    assert found.state == "warn"
    assert f"1 have neither owner nor time to live: celery5:{{{own.name}}}:old-thing" in found.summary


@pytest.mark.plants
def test_no_key_of_celery5_is_an_orphan_nor_is_any_to_be_deleted(own: App, second: "redis.Redis") -> None:
    queue, stream = own.queue("mail"), own.keys.for_stream("clicks")
    for key in (queue.idle_runs, queue.jobs, queue.run("night"), stream.parked("bill")):
        second.hset(key, "any", "1")
    second.xadd(stream.log(3), {"record": "1"})
    second.xadd(f"{stream.parked_log_prefix}bill:key", {"record": "1"})
    second.rpush(f"{queue.run('night')}:undo", "1")
    second.setbit(f"{queue.run('night')}:1:done", 1, 1)
    second.sadd(f"{queue.waiting_list_prefix}unlimited", "task")
    assert broker_of(own).check_keys().state == "ok"
    second.xadd(own.keys.audit, {"any": "1"})  # has lost its time to live
    found = broker_of(own).check_keys()
    assert (
        found.state,
        f"1 should have a time to live, and have none: {own.keys.audit}" in found.summary,
    ) == (
        "warn",
        True,
    )
    assert "DEL" not in found.remedy


@pytest.mark.plants
def test_keys_that_another_program_has_made_are_found_and_put_aside(own: App, second: "redis.Redis") -> None:
    queue = own.queue("mail")
    second.hset(own.keys.suspended, "add", '{"by":')
    found = broker_of(own).check_keys()
    assert (found.state, "cannot be read: add" in found.summary) == ("warn", True)
    second.delete(own.keys.suspended)
    for key in (
        own.keys.settings,
        own.keys.limits,
        own.keys.queues,
        own.keys.paused,
        queue.stream,
        queue.jobs,
    ):
        second.set(key, "what only that program has")
        found = broker_of(own).check_keys()
        assert found.state == "fail"
        assert f"{key} is a string instead of a " in found.summary
        assert "RENAMENX KEY aside:KEY" in found.remedy
        second.renamenx(key, f"aside:{key}")
        assert broker_of(own).check_keys().state == "ok"


@pytest.mark.plants
def test_keys_of_an_application_are_looked_at_however_many_its_queues_have(
    own: App, second: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_checks, "MAX_KEYS", 3)
    for number in range(20):
        second.sadd(own.keys.queues, "default")
        second.xadd(own.queue(f"a{number}").stream, {"job": "1"})
    second.set(own.keys.limits, "x")
    found = broker_of(own).check_keys()
    assert (found.state, "of more" in found.summary) == ("fail", True)


def test_fields_of_the_configuration_in_redis_that_are_skipped_are_named(
    url: str, app_name: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    with closing(App(app_name, broker=url, config="redis")) as app:
        host = HostChecks({}, root=tmp_path)
        assert host.check_settings(app).state == "ok"
        redis_client.hset(app.keys.settings, mapping={"concurrency": "many", "broker": "redis://else"})
        found = host.check_settings(app)
        assert found.state == "warn"
        assert "concurrency" in found.summary
        assert "broker" in found.summary
        redis_client.delete(app.keys.settings)
        redis_client.set(app.keys.settings, "x")
        assert "cannot be read" in host.check_settings(app).summary
        redis_client.delete(app.keys.settings)
        assert host.check_settings(app).state == "ok"


def test_jobs_of_other_code_that_a_dead_worker_had_are_left_to_that_code(
    own: App, own_server: EmbeddedServer, second: "redis.Redis", tmp_path: Path
) -> None:
    """A worker that puts them back, and has not their task, ends them as dead letters."""
    own.task(name="billing.bill", queue="billing")(len).delay("a")
    stream = own.queue("billing").stream
    second.xgroup_create(stream, GROUP, id="0")
    second.xreadgroup(GROUP, "host:1:dead", {stream: ">"})
    other = App(own.name, broker=own_server.url, keys=str(tmp_path / "keys"))
    with closing(other):
        found = HostChecks(os.environ, root=tmp_path).check_workers(other)
    assert found.state == "warn"
    assert "for billing start a worker of the code that has the task billing.bill" in found.remedy
    assert "celery5 worker start" not in found.remedy


def test_a_broker_that_is_away_fails_once_and_the_rest_goes_on(tmp_path: Path) -> None:
    app = App("nobody", broker="unix:///nonexistent/none.sock", keys=str(tmp_path / "keys"))
    found = {check.check: check for check in run_checks(get_checks(app, root=tmp_path))}
    assert [name for name, finding in found.items() if finding.state == "fail"] == ["server"]
    assert "none.sock" in found["server"].summary
    assert {"latency", "workers"} <= {*found["not looked at"].skipped}
    assert (found["python"].state, found["settings"].state) == ("ok", "ok")


def test_each_of_several_brokers_is_looked_at(
    own: App, url: str, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    other = {"mails": own_server.url, "away": "unix:///nonexistent/none.sock"}
    app = App(own.name, broker=url, brokers=other, keys=str(tmp_path / "keys"))
    found = {check.check: check for check in run_checks(get_checks(app, root=tmp_path))}
    assert (found["server"].state, found["server mails"].state, found["server away"].state) == (
        "ok",
        "ok",
        "fail",
    )
    assert "appendonly yes" in found["persistence mails"].summary
    assert "loses every job" in found["persistence"].summary
    app.close()


def test_no_connection_is_left_open(
    own: App, own_server: EmbeddedServer, second: "redis.Redis", tmp_path: Path
) -> None:
    before = len(second.client_list())
    app = App(own.name, broker=own_server.url, keys=str(tmp_path / "keys"))
    checks = get_checks(app, root=tmp_path)
    assert all(check.check for check in run_checks(checks))
    app.close()
    wait_until(lambda: len(second.client_list()) == before)
    assert checks  # they are held: it is not for being forgotten that the connections are closed


def test_a_server_that_hangs_holds_nobody_up(own: App, own_server: EmbeddedServer, tmp_path: Path) -> None:
    os.kill(own_server.pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        found = {check.check: check for check in run_checks(get_checks(own, root=tmp_path), limit=0.5)}
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert found["server"].summary == "no answer within 0.5 s"
    assert (found["server"].state, found["python"].state) == ("fail", "ok")
    assert time.monotonic() - begun < 30


def test_a_check_that_is_broken_says_so_and_the_others_go_on() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("oh")

    def wrong() -> Finding:
        raise Misconfigured("this is\nwrong")

    checks = [
        DoctorCheck("one", broken),
        DoctorCheck("two", wrong),
        DoctorCheck("three", lambda: Finding("three", "ok", "fine")),
    ]
    found = list(run_checks(checks))
    assert [finding.state for finding in found] == ["fail", "fail", "ok"]
    assert found[0].summary == "the check itself failed: ZeroDivisionError: oh"
    assert found[1].summary == "this is wrong"


def test_keys_that_others_can_read_and_certificates_that_end_are_found(tmp_path: Path) -> None:
    app = App("keyed", keys=str(tmp_path / "keys"))
    host = HostChecks(os.environ, root=tmp_path)
    assert "not there yet" in host.check_key_folder(app).summary
    app.control.keyring.renew()
    assert (host.check_key_folder(app).state, host.check_certificates(app).state) == ("ok", "ok")

    (tmp_path / "keys" / "mine.pem").chmod(0o644)
    assert host.check_key_folder(app).state == "warn"
    (tmp_path / "keys").chmod(0o755)
    assert (host.check_key_folder(app).state, host.check_key_folder(app).remedy) == (
        "fail",
        f"chmod 700 {tmp_path / 'keys'}",
    )
    (tmp_path / "keys").chmod(0o700)

    mine = next(
        certificate for certificate in app.control.keyring.list_certificates() if certificate.role == "mine"
    )
    app.control.keyring.revoke(mine.fingerprint)
    assert "refused here: revoked" in host.check_certificates(app).summary
    app.control.keyring.renew()
    assert host.check_certificates(app).state == "ok"

    soon = trustme.CA().issue_cert("a.b", not_after=datetime.now(UTC) + timedelta(days=3))
    (tmp_path / "soon.pem").write_bytes(soon.cert_chain_pems[0].bytes())
    app.control.keyring.trust_file(tmp_path / "soon.pem")
    assert (host.check_certificates(app).state, "they end soon" in host.check_certificates(app).summary) == (
        "warn",
        True,
    )


def test_a_key_whose_authority_is_not_trusted_is_found(tmp_path: Path) -> None:
    app = App("keyed", keys=str(tmp_path / "keys"))
    app.control.keyring.renew()
    for path in (tmp_path / "keys" / "trusted").iterdir():
        path.unlink()
    found = HostChecks(os.environ, root=tmp_path).check_certificates(app)
    assert (found.state, found.summary) == ("fail", "what is signed here is refused here: unknown-issuer")
    obey(app, found.remedy)
    assert HostChecks(os.environ, root=tmp_path).check_certificates(app).state == "ok"


def obey(app: App, remedy: str) -> None:
    """Do what an advice on keys says, as `celery5 keys` does it."""
    _, verb, *words = shlex.split(remedy.removeprefix("celery5 "))
    if verb == "trust":
        app.control.keyring.trust_file(Path(words[0]))
    else:
        assert (verb, words in ([], ["--authority"])) == ("new", True), remedy
        app.control.keyring.renew(authority=bool(words))


@pytest.mark.parametrize("role", ["mine", "authority"])
def test_an_advice_on_a_key_that_was_revoked_has_it_accepted_again(tmp_path: Path, role: str) -> None:
    app = App("keyed", keys=str(tmp_path / "keys"))
    app.control.keyring.renew()
    host = HostChecks(os.environ, root=tmp_path)
    listed = app.control.keyring.list_certificates()
    app.control.keyring.revoke(
        next(certificate.fingerprint for certificate in listed if certificate.role == role)
    )
    found = host.check_certificates(app)
    assert (found.state, found.summary) == ("fail", "what is signed here is refused here: revoked")
    obey(app, found.remedy)
    assert host.check_certificates(app).state == "ok"


@pytest.mark.parametrize("days", [-1, 3])
def test_a_key_of_an_own_authority_is_renewed_by_that_authority(tmp_path: Path, days: int) -> None:
    """`celery5 keys new` makes none there: it has not the authority's key."""
    app, folder = App("keyed", keys=str(tmp_path / "keys")), tmp_path / "keys"
    authority = trustme.CA()
    start, end = datetime.now(UTC) - timedelta(days=9), datetime.now(UTC) + timedelta(days=days)
    signed = authority.issue_cert("a.b", not_before=start, not_after=end)
    (folder / "trusted").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (folder / "mine.pem").write_bytes(signed.private_key_and_cert_chain_pem.bytes())
    (folder / "mine.pem").chmod(0o600)
    (folder / "trusted" / "own.pem").write_bytes(authority.cert_pem.bytes())
    found = HostChecks(os.environ, root=tmp_path).check_certificates(app)
    assert found.state == ("fail" if days < 0 else "warn"), found
    assert found.remedy.startswith(f"have your authority sign a new key, and put both into {folder}/mine.pem")
    with pytest.raises(Misconfigured):
        app.control.keyring.renew()


def test_units_are_found_with_what_they_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\necho 'systemd 252 (252.1)'\n")
    systemctl.chmod(0o755)
    host = HostChecks({"HOME": "/home/clerk"}, root=tmp_path)
    assert host.check_units().summary == "none of systemd's is installed"

    folder = tmp_path / "home/clerk/.config/systemd/user"
    (folder / "default.target.wants").mkdir(parents=True)
    unit = folder / "celery5-worker@.service"
    unit.write_text("[Service]\nExecStart=-/nowhere/celery5 worker start\n")
    assert (host.check_units().state, "/nowhere/celery5" in host.check_units().summary) == ("fail", True)
    unit.write_text("[Service]\nExecStart=/bin/sh celery5 worker start\n")
    assert "log" in host.check_units().summary  # they end when their user logs out
    assert host.check_units().remedy.startswith("loginctl enable-linger ")

    user = host.check_units().remedy.split()[-1]
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger" / user).touch()
    assert host.check_units().remedy.startswith("systemctl --user enable celery5-worker@NAME.service, ")
    (folder / "default.target.wants" / "celery5-worker@shop.service").symlink_to(unit)
    assert host.check_units().summary == "systemd 252: celery5-worker@.service; enabled"
    systemctl.write_text("#!/bin/sh\necho 'systemd 229'\n")
    assert host.check_units().state == "warn"


def test_this_python_and_its_libraries_will_do() -> None:
    host = HostChecks(os.environ)
    assert (host.check_python().state, __version__ in host.check_python().summary) == ("ok", True)
    assert host.check_libraries().state in ("ok", "warn")  # a warning where it runs from a checkout


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://127.0.0.1:1/0", "Connection refused"),
        ("unix:///no/such/socket", "No such file or directory"),
    ],
)
def test_a_broker_that_refuses_the_connection_is_to_be_started_or_named(
    app_name: str, url: str, why: str
) -> None:
    with closing(App(app_name, broker=url)) as app:
        (server,) = [finding for finding in run_checks(get_checks(app)) if finding.check == "server"]
    assert server.summary.endswith(f"cannot be reached: {why}")
    assert server.remedy == "start it, or set CELERY5_BROKER; celery5 docs brokers"


def test_what_an_unreachable_broker_left_out_is_named_once_with_one_remedy(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)
    names = [finding.check for finding in run_checks(get_checks(app))]
    assert "not looked at" not in names
    own_server.kill()
    found = list(run_checks(get_checks(app)))
    app.close()
    (left_out,) = [finding for finding in found if finding.skipped]
    assert found[-1] == left_out
    assert (left_out.check, left_out.state) == ("not looked at", "warn")
    assert {*left_out.skipped} == {*names} - {finding.check for finding in found}
    assert {"memory", "latency", "workers", "alerts"} <= {*left_out.skipped}
    assert left_out.summary == f"{', '.join(left_out.skipped)}: the broker cannot be used"
    assert left_out.remedy == "do what is written below `server`, then: celery5 doctor"
    assert not any("not looked at" in finding.summary or finding.remedy == "see above" for finding in found)


def test_a_refused_password_has_the_command_that_gives_it_back(
    own_server: EmbeddedServer, app_name: str
) -> None:
    with closing(App(app_name, broker=own_server.url.replace("unix://", "unix://shop:wrong@"))) as app:
        found = {finding.check: finding for finding in run_checks(get_checks(app))}
    assert "password" in found["server"].summary
    assert 'redis-cli ACL SETUSER USER ">OLD"' in found["server"].remedy
