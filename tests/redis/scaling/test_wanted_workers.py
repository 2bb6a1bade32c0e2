"""Wanted workers: the number that KEDA asks any process for."""

import msgspec
import pytest
import trio

from celery5 import App
from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.calls.jobs import SERVER_TIME
from celery5.cli.standalone.health import send_probe
from celery5.logs.log import NullLog
from celery5.processes.foreground import make_wanted_reader
from celery5.protocol.scaling.autoscale import AutoscaleState
from celery5.protocol.scaling.wanted_workers import MAX_AGE, QueueDemand
from celery5.services.health.status_port import StatusPort
from celery5.services.health.vitals import ProcessStatus
from tests.trio.health.test_status_port import free_port

DEMANDS = (
    QueueDemand(queue="mail", kind="trio", jobs=25, slots=10.0),
    QueueDemand(queue="bulk orders", kind="trio", jobs=1),
)


async def ask(port: int, path: str) -> tuple[int, object]:
    """What is answered there."""
    found = await trio.to_thread.run_sync(lambda: send_probe("127.0.0.1", port, path, timeout=20))
    assert found.body, found.why
    return found.status, msgspec.json.decode(found.body)


@pytest.mark.parametrize("age", [0.0, MAX_AGE + 5])
async def test_any_process_answers_with_the_last_decision_while_it_is_new(
    app_name: str, url: str, nursery: trio.Nursery, age: float
) -> None:
    app, number = App(app_name, broker=url), free_port()
    port = StatusPort(
        process_status=ProcessStatus(),
        log=NullLog(),
        port=number,
        host="127.0.0.1",
        read_wanted=make_wanted_reader(app),
    )
    await nursery.start(port.run)
    status, answer = await ask(number, "/wanted-workers")
    assert status == 503
    assert "nothing is scaled: it takes the setting autoscale" in str(answer)
    await app.aperform(scaling_calls.claim_scaling_turn(app.keys, "one"))
    now = await app.aperform(SERVER_TIME)
    found = scaling_calls.Scaling(course=AutoscaleState(workers=7), demands=DEMANDS, at=now - age)
    assert await app.aperform(scaling_calls.save_scaling(app.keys, "one", found))
    answers = {
        path: await ask(number, f"/wanted-workers{path}")
        for path in ("", "/mail", "/bulk%20orders,mail", "/x")
    }
    if age:
        assert {status for status, _ in answers.values()} == {503}, "nobody decides any more"
    else:
        assert answers == {
            "": (200, {"wanted_workers": 7}),
            "/mail": (200, {"wanted_workers": 3}),
            "/bulk%20orders,mail": (200, {"wanted_workers": 3}),
            "/x": (200, {"wanted_workers": 0}),
        }
    nursery.cancel_scope.cancel()


async def test_wanted_workers_are_not_found_on_a_process_without_a_cluster_view(
    nursery: trio.Nursery,
) -> None:
    number = free_port()
    port = StatusPort(process_status=ProcessStatus(), log=NullLog(), port=number, host="127.0.0.1")
    await nursery.start(port.run)
    status, answer = await ask(number, "/wanted-workers/mail")
    assert status == 404
    assert "ask a worker, a Router or a Scheduler" in str(answer)
    nursery.cancel_scope.cancel()
