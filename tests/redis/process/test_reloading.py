"""Reloading: a worker takes up a configuration that has changed, loses nothing on the way, and keeps the old one when
the new one is bad.
"""

import asyncio
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis
import trio

from celery5 import App, BootStep, gather
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.config.settings import Settings
from celery5.errors import CommandRefused, Misconfigured
from celery5.examples.own_configuration.table import TableConfiguration
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import NoParameters
from celery5.services.process.reloader import NextIncarnation, Reloader
from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.redis.worker.workers import Lines, until, working


def write(path: Path, text: str) -> None:
    """As careful programs write: aside, then in one step in its place."""
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.replace(path)


def at_once(staff: Staff, path: Path) -> int:
    """How many jobs run at once now."""
    before = len(staff.notes())
    sent = staff.app.send_many([staff.app.signature("gate", str(path)) for _ in range(4)])
    wait_until(lambda: len(staff.notes()) > before)
    time.sleep(0.3)  # time enough for one too many to begin
    running = len(staff.notes()) - before
    path.touch()
    gather(sent, timeout=30)
    path.unlink()
    return running


def lives(worker: Employee) -> int:
    """How many incarnations of this process were ready."""
    return len(worker.lines("worker:started"))


def test_a_change_takes_effect_and_what_runs_finishes_first(staff: Staff, tmp_path: Path) -> None:
    config, gate = tmp_path / "celery5.toml", tmp_path / "gate"
    write(config, "concurrency = 1")
    worker = staff.start(config=config)
    assert at_once(staff, gate) == 1
    held = staff.app.send_many([staff.app.signature("gate", str(gate)) for _ in range(3)])
    wait_until(lambda: any(job.status() == "EXECUTING" for job in held))
    write(config, "concurrency = 3")
    wait_until(lambda: bool(worker.lines("configuration:changed")))
    assert worker.lines("configuration:changed")[0]["settings"] == ["concurrency"]
    assert lives(worker) == 1
    gate.touch()
    gather(held, timeout=30)
    gate.unlink()
    assert len(staff.notes("end")) == 4 + 3
    wait_until(lambda: lives(worker) == 2)
    assert at_once(staff, gate) == 3
    assert worker.process.poll() is None


def test_a_bad_configuration_changes_nothing_and_is_told_once(staff: Staff, tmp_path: Path) -> None:
    config = tmp_path / "celery5.toml"
    write(config, "concurrency = 2")
    worker = staff.start(config=config)
    write(config, "concurrency = 0")
    wait_until(lambda: bool(worker.lines("configuration:rejected")))
    (bad,) = worker.lines("configuration:rejected")
    assert (bad["level"], "concurrency in file" in bad["why"]) == ("error", True)
    assert staff.app.signature("quiet", 7).delay().get(timeout=30) == 7
    write(config, "concurrency = 5")
    wait_until(lambda: lives(worker) == 2)
    assert len(worker.lines("configuration:rejected")) == 1


@pytest.mark.parametrize(
    "failure", [OSError("the vault is shut"), SystemExit("the vault is shut"), KeyboardInterrupt("shut")]
)
async def test_a_mistake_is_told_once_however_often_it_is_read(
    app_name: str, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    monkeypatch.setattr("celery5.services.process.reloader.WATCH_INTERVAL", 0.01)

    class Vault:
        where = "the vault"
        loads = 0

        def load(self) -> dict[str, object]:
            self.loads += 1
            if 1 < self.loads < 6:
                return {"concurrency": 0}
            if self.loads == 6:
                raise failure  # a backend of the user's own may raise anything
            return {}

        async def watch(self) -> None:
            await trio.lowlevel.checkpoint()

    vault, log = Vault(), Log(worker="w", app=app_name)
    app = App(app_name, config=vault)
    assert app.settings.concurrency == 100
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            one = Reloader(
                app=app, configuration=vault, reload=True, next_incarnation=NextIncarnation(), log=log
            )
            await nursery.start(one.run)
            await until(lambda: vault.loads > 7)
            nursery.cancel_scope.cancel()
        await until(lambda: len(lines.of("configuration:rejected")) == 2)
        first, second = (line["why"] for line in lines.of("configuration:rejected"))
    assert first.startswith("concurrency in the vault=0")
    assert second.removeprefix("the vault fails: ") == f"{type(failure).__name__}: {failure}"
    assert app.settings.concurrency == 100


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('broker = "nonsense"', "cannot be understood"),
        ('broker = "rediss://x?ssl_ca_certs=/not/there"', "check ssl_ca_certs"),
        ('keys = "~nobody-of-that-name/keys"', "there is no such user"),
        ('broker = "redis://127.0.0.1:1"', "refused"),
    ],
)
async def test_settings_that_fail_only_in_use_are_found_before_they_apply(
    url: str, app_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, why: str
) -> None:
    monkeypatch.setattr("celery5.config.configuration.FILE_POLL_INTERVAL", 0.05)
    monkeypatch.delenv("CELERY5_BROKER", raising=False)
    config = tmp_path / "c.toml"
    write(config, f'broker = "{url}"')
    app = App(app_name, config=str(config))

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    with Lines() as lines:
        async with working(app):
            write(config, bad if bad.startswith("broker") else f'broker = "{url}"\n{bad}')
            await until(lambda: bool(lines.of("configuration:rejected")))
            assert why in lines.of("configuration:rejected")[0]["why"]
            assert await (await double.adelay(3)).aget(timeout=30) == 6
    app.close()


def test_new_broker_is_used_once_it_accepts_and_the_old_one_until_then(
    url: str, own_server: EmbeddedServer, app_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CELERY5_BROKER", raising=False)
    config = tmp_path / "c.toml"
    write(config, f'broker = "{url}"')
    app = App(app_name, config=str(config))
    assert app.settings.broker == url
    with redis.Redis.from_url(own_server.url) as strict:
        strict.config_set("requirepass", "secret")
        write(config, f'broker = "{own_server.url}"')
        with pytest.raises(Misconfigured, match="wants a password"):
            app.reload_configuration()
        assert app.settings.broker == url
        strict.config_set("requirepass", "")
    changed, apply = app.reload_configuration()
    apply()
    assert changed == ("broker",)
    assert app.connections.masked_url == own_server.url


def test_configuration_does_not_change_what_the_environment_sets(staff: Staff, tmp_path: Path) -> None:
    config = tmp_path / "celery5.toml"
    write(config, "concurrency = 2\nlease = 5")
    worker = staff.start(config=config, concurrency=1)
    write(config, "concurrency = 3\nlease = 6")
    wait_until(lambda: lives(worker) == 2)
    assert worker.lines("configuration:changed")[0]["settings"] == ["lease"]


def test_no_reload_means_that_nothing_is_watched(staff: Staff, tmp_path: Path) -> None:
    config = tmp_path / "celery5.toml"
    write(config, "concurrency = 1")
    worker = staff.start("--no-reload", config=config)
    write(config, "concurrency = 3")
    assert staff.app.signature("nap", 2.5).delay().get(timeout=30)
    assert not worker.lines("configuration:changed")
    assert lives(worker) == 1


@pytest.mark.parametrize(
    "name", ["broker", "inbox", "inbox_signatures", "keys", "keys_usage", "status_host", "status_port"]
)
def test_writing_to_redis_does_not_make_commands_trusted(
    url: str, app_name: str, redis_client: "redis.Redis", name: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(app_name, broker=url, config="redis")
    before = app.settings
    words = {"inbox": "no", "inbox_signatures": "no", "status_port": "9500", "keys_usage": "1.2.3"}
    said = words.get(name, "elsewhere")
    redis_client.hset(app.keys.settings, name, said)
    try:
        for _ in range(2):
            changed, _apply = app.reload_configuration()
            assert changed == ()
            assert app.settings == before
        assert [f"{name} cannot be set in the broker" in message for message in caplog.messages] == [
            True
        ]  # once
    finally:
        redis_client.delete(app.keys.settings)
        app.close()


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        ("prioritise", "evil_module:f", "prioritise cannot name code"),
        ("prioritise", "sys:exit", "prioritise cannot name code"),
        ("autoscale", "maximum=3 strategy=evil_module:f", "autoscale cannot name code"),
        ("autoscale", "maximum=5000", "maximum is 1000 at most"),
        ("budgets", "thread=600", "thread has 512 slots at most"),
        ("budgets", "trio=1..20000", "trio has 10000 slots at most"),
        ("publisher_backlog", "evil_module:f", "cannot be set in the broker"),
    ],
)
def test_a_hash_in_redis_never_names_code_and_no_budget_beyond_its_bounds(
    url: str,
    app_name: str,
    redis_client: "redis.Redis",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    said: str,
    why: str,
) -> None:
    (tmp_path / "evil_module.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w')\ndef f(*_): return {{}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    app = App(app_name, broker=url, config="redis")
    redis_client.hset(app.keys.settings, name, said)
    try:
        assert app.reload_configuration()[0] == ()
        assert why in caplog.text
    finally:
        redis_client.delete(app.keys.settings)
        app.close()
    assert not (tmp_path / "imported").exists()


async def test_a_hash_in_redis_is_a_configuration_for_all_workers(
    url: str, app_name: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.config.configuration.REDIS_POLL_INTERVAL", 0.1)
    app = App(app_name, broker=url, config="redis")
    key = app.keys.settings
    redis_client.hset(key, mapping={"concurrency": "3", "results_ttl": "90"})
    try:
        assert (app.settings.concurrency, app.settings.results_ttl) == (3, 90.0)
        async with working(app):
            redis_client.hset(key, "concurrency", "4")
            with trio.fail_after(30):
                while app.settings.concurrency != 4:
                    await trio.sleep(0.01)
        redis_client.hset(key, mapping={"broker": "redis://elsewhere", "concurrency": "many", "lease": "9"})
        changed, apply = app.reload_configuration()
        assert changed == ("lease",)  # the good value of before stays in place of one that is wrong
        apply()
        assert (app.settings.broker, app.settings.concurrency, app.settings.lease) == (url, 4, 9.0)
    finally:
        redis_client.delete(key)


@pytest.mark.parametrize("loop", [None, "asyncio"])
async def test_job_that_ignores_a_reload_is_awaited_and_runs_once(
    url: str, app_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str | None
) -> None:
    monkeypatch.setattr("celery5.config.configuration.FILE_POLL_INTERVAL", 0.05)
    monkeypatch.setattr("celery5.services.worker.task_execution.CANCEL_TIMEOUT", 0.2)
    monkeypatch.setattr("celery5.runners.asyncio_thread.CANCEL_TIMEOUT", 0.1)
    config, gate, begun = tmp_path / "c.toml", threading.Event(), list[float]()
    write(config, "concurrency = 2")
    app = App(app_name, broker=url, config=str(config), grace_period=0.1)

    def plain() -> int:
        begun.append(time.monotonic())
        gate.wait(30)
        return len(begun)

    async def deaf() -> int:
        begun.append(time.monotonic())
        while not gate.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        return len(begun)

    job = app.task(name="job", loop="asyncio")(deaf) if loop else app.task(name="job")(plain)
    with Lines() as lines:
        async with working(app):
            result = await job.adelay()
            await until(lambda: len(begun) == 1)
            write(config, "concurrency = 33")
            await until(lambda: bool(lines.of("job:awaited")))
            assert not lines.of("worker:reload-started")
            gate.set()
            assert await result.aget(timeout=30) == 1
            await until(lambda: bool(lines.of("worker:reload-started")))
    assert len(begun) == 1


async def test_new_settings_apply_after_jobs_ended_or_had_their_grace_period(
    url: str, app_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.config.configuration.FILE_POLL_INTERVAL", 0.05)
    config, gate, waiting = tmp_path / "c.toml", trio.Event(), trio.Event()
    write(config, "concurrency = 2\ngrace_period = 20")
    lives: list[int] = []

    async def live(settings: Settings) -> None:
        lives.append(settings.concurrency)

    app = App(app_name, broker=url, config=str(config), bootsteps=[BootStep("live", live)])

    @app.task
    async def pack() -> int:
        waiting.set()
        await gate.wait()
        return app.settings.concurrency

    @app.task
    async def hang() -> int:
        while len(lives) < 3:
            await trio.sleep_forever()
        return 7

    async with working(app):
        with Lines() as lines, trio.fail_after(30):
            packed = await pack.adelay()
            await waiting.wait()
            write(config, "concurrency = 3\ngrace_period = 0.2")
            while not lines.of("configuration:changed"):
                await trio.sleep(0.01)
            assert app.settings.concurrency == 2
            gate.set()
            assert await packed.aget() == 2
            await until(lambda: lives == [2, 3])
            assert app.settings.concurrency == 3
            hung = await hang.adelay()  # for longer than the grace period
            while await hung.astatus() != "EXECUTING":
                await trio.sleep(0.01)
            write(config, "concurrency = 4\ngrace_period = 0.2")
            assert await hung.aget() == 7
            assert lives == [2, 3, 4]
            await until(lambda: [e["attempt"] for e in lines.of("job") if e["state"] == "SUCCESS"] == [1, 1])
    app.close()


async def test_the_command_reloads_at_once_or_says_why_not(url: str, app_name: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    write(config, "concurrency = 1")
    app = App(app_name, broker=url, config=str(config))
    log = Log(worker="w", app=app.name)
    assert app.settings.concurrency == 1

    next_incarnation = NextIncarnation()

    def reloader(reload: bool = True, configured: bool = True) -> Reloader:
        configuration = app.configuration if configured else None
        return Reloader(
            app=app, configuration=configuration, reload=reload, next_incarnation=next_incarnation, log=log
        )

    one = reloader()
    assert await one.handle_command(NoParameters()) == {"changed": []}
    assert not next_incarnation.is_due
    write(config, "concurrency = 2")
    assert await one.handle_command(NoParameters()) == {"changed": ["concurrency"]}
    assert next_incarnation.is_due
    next_incarnation.apply_settings()
    assert app.settings.concurrency == 2
    write(config, "concurrency = 0")
    with pytest.raises(CommandRefused, match="the old settings stay"):
        await one.handle_command(NoParameters())
    with pytest.raises(CommandRefused, match="--no-reload"):
        await reloader(reload=False).handle_command(NoParameters())
    with pytest.raises(CommandRefused, match="no configuration"):
        await reloader(configured=False).handle_command(NoParameters())


def test_a_backend_of_ones_own_configures_workers_while_they_run(
    staff: Staff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.sqlite"
    table = TableConfiguration(file)
    table.say(concurrency=1)
    monkeypatch.setenv("SHOP_SETTINGS", str(file))
    monkeypatch.setenv("SHOP_APP", staff.app.name)
    command = [
        sys.executable,
        "-m",
        "celery5",
        "-A",
        "celery5.examples.own_configuration.shop",
        "worker",
        "start",
    ]
    worker = staff.launch(command)
    wait_until(lambda: lives(worker) == 1)
    table.say(concurrency=2)
    wait_until(lambda: lives(worker) == 2)
    assert worker.lines("configuration:changed")[0]["where"] == f"table settings of {file}"
    table.say(concurrency="many")
    wait_until(lambda: bool(worker.lines("configuration:rejected")))
    assert worker.process.poll() is None


def test_systemd_is_not_told_that_a_worker_stops_which_only_begins_again(
    staff: Staff, tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "celery5.toml"
    write(config, "concurrency = 1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(short_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(short_path / "notify"))
        systemd.settimeout(30)
        worker = staff.start(config=config)
        assert systemd.recv(4096).startswith(b"READY=1")
        write(config, "concurrency = 2")
        assert systemd.recv(4096).startswith(b"READY=1")
    wait_until(lambda: lives(worker) == 2)


def test_watchdog_is_notified_while_a_restarting_worker_waits_for_its_jobs(
    staff: Staff, tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, gate = tmp_path / "celery5.toml", tmp_path / "gate"
    write(config, "concurrency = 1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(short_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(short_path / "notify"))
        systemd.settimeout(30)
        worker = staff.start(config=config)
        job = staff.app.send_many([staff.app.signature("gate", str(gate))])[0]
        wait_until(lambda: bool(staff.notes()))
        write(config, "concurrency = 2")
        wait_until(lambda: bool(worker.lines("configuration:changed")))
        plain = 0
        while plain < 5:  # with a status they come from an incarnation
            plain = plain + 1 if systemd.recv(4096) == b"WATCHDOG=1" else 0
        assert lives(worker) == 1
        gate.touch()
        job.get(timeout=30)
    wait_until(lambda: lives(worker) == 2)
