"""Sidecar faults: it renews the lease of a silent worker over a slow server, and says so, once, when it cannot."""

import json
import os
import signal
import subprocess
import sys

import msgspec
import pytest
import trio

from celery5 import App
from celery5.bootsteps import worker_steps
from celery5.broker.calls import leases
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.processes.watch import sidecar
from celery5.processes.watch.sidecar import BeatReport
from celery5.processes.watch.sidecar_log import SidecarLog
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.runners.process_group import get_start_ticks
from celery5.services.process.shared_memory import SidecarMemory
from tests.faults.connections.proxy import FaultyProxy
from tests.redis.worker.workers import working


async def test_a_slow_server_is_waited_for_as_long_as_the_lease_allows(
    proxy: FaultyProxy,
    url: str,
    app_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It says that the broker does not answer, at `debug`, and blames no worker."""
    monkeypatch.setattr(sidecar, "RECOVERY_TIMING", Timing(connect=0.1, reply=0.1))
    app, driver, box = (
        App(app_name, broker=proxy.url, lease=1.0, log_level="debug"),
        BlockingRedis(Endpoint.from_url(url)),
        SidecarMemory(slots=1),
    )
    driver.perform(leases.join_queue(app.queue("mail"), "w", lease=60))
    log = SidecarLog(app)
    watch = sidecar._Watch(app, box, os.getpid(), -1, -1, log)
    report = msgspec.json.encode(BeatReport("w", ("mail",), Endpoint.from_url(proxy.url))) + b"\n"
    watch._read_reports(report)
    with trio.fail_after(30):
        proxy.delay = 0.2
        assert (await trio.to_thread.run_sync(watch._renew_leases)).is_alive
        assert box.lease_until > 0
        proxy.stall()
        for _ in range(2):
            assert (await trio.to_thread.run_sync(watch._renew_leases)).is_alive
        proxy.resume()
        watch._read_reports(report)
        log.close()
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    found = [(line["message_type"], line["level"], line["worker"], line["process"]) for line in lines]
    assert found == [
        ("celery5:broker:disconnected", "debug", "w", "sidecar"),
        ("celery5:broker:reconnected", "debug", "w", "sidecar"),
    ]
    app.close()
    driver.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process was started")
def test_a_stranger_who_has_the_id_of_a_box_that_has_ended_is_left_alone(app_name: str) -> None:
    box = SidecarMemory(slots=1, boxes=2)
    app = App(app_name)
    watch = sidecar._Watch(app, box, os.getpid(), -1, -1, SidecarLog(app))
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        began = get_start_ticks(process.pid)
        box.add_box(process.pid, began - 1)
        watch._end_boxes()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        box.remove_box(process.pid)
        box.add_box(process.pid, began)
        watch._end_boxes()
        assert process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("left", [False, True])
async def test_sidecar_logs_waiting_jobs_unless_the_worker_has(
    proxy: FaultyProxy, app_name: str, capfd: pytest.CaptureFixture[str], left: bool
) -> None:
    app = App(app_name, broker=proxy.url)
    log = SidecarLog(app)
    watch = sidecar._Watch(app, SidecarMemory(slots=1), os.getpid(), -1, -1, log)
    said = BeatReport("w", ("mail",), Endpoint.from_url(proxy.url), left=left)
    watch._read_reports(msgspec.json.encode(said) + b"\n")
    proxy.refuse()
    with trio.fail_after(30):
        await trio.to_thread.run_sync(watch._recover)
    log.close()
    assert ("celery5:worker:recovery-failed" in capfd.readouterr().out) is not left


async def test_an_sidecar_hears_of_a_worker_that_stops_while_redis_is_away(
    proxy: FaultyProxy, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_steps, "LEAVE_TIMEOUT", 0.1)
    app = App(app_name, broker=proxy.url)
    ear, mouth = os.pipe()
    one = sidecar.Sidecar(app, write_fd=mouth, sidecar_memory=SidecarMemory(slots=1))
    async with working(app, sidecars={DEFAULT_BROKER: one}):
        proxy.refuse()
    said = [msgspec.json.decode(line, type=BeatReport) for line in os.read(ear, 1 << 16).splitlines()]
    assert [line.left for line in said] == [False] * (len(said) - 1) + [True]
    assert said[-1].worker == said[0].worker
    one.close()
    os.close(ear)
