"""Runnel's names: who writes one is told ours; each is on the page for those who come from Runnel."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery5 import App, Misconfigured, RetryPolicy
from celery5.cli.main import cli
from celery5.cli.terminal.errors import EXIT_USAGE, run_reporting_errors
from celery5.config.settings import Settings, find_warnings
from celery5.hints import FENNEL, RUNNEL, NameKind
from celery5.streams import Keep, Processor, Record, Stream, StreamEntry, StreamEvents

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "from-runnel.md").read_text()


class Order(Record):
    order_id: int


app = App("runnel-names")
orders: Stream[Order] = app.stream("orders", Order, by="order_id")
entry = StreamEntry(3, "bill", (b"5-1", [b"=json", b'{"order_id":7}']), orders.codec)


async def bill(events: StreamEvents[Order]) -> None: ...


@pytest.mark.parametrize("name", [name for table in RUNNEL.values() for name in table])
def test_each_name_is_on_the_page(name: str) -> None:
    cells = "\n".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| "))
    names = set(re.findall(r"[\w-]+", cells))
    elsewhere = {"Middleware": "middleware"}
    assert {elsewhere.get(name, name).split()[0]} <= names


@pytest.mark.parametrize(
    ("thing", "name", "owner"),
    [
        *[("stream", name, orders) for name in RUNNEL["stream"]],
        *[("events", name, entry) for name in RUNNEL["events"]],
        *[("app", name, app) for name in RUNNEL["app"]],
    ],
)
def test_an_attribute_is_refused_with_its_name_here(thing: NameKind, name: str, owner: Any) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"for Runnel's {name} there is")):
        getattr(owner, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'colour'$"):
        owner.colour  # noqa: B018


def test_an_entry_knows_where_it_is_and_shows_it() -> None:
    assert (entry.partition, entry.group, entry.id, entry.record) == (3, "bill", "5-1", Order(order_id=7))
    assert repr(entry) == "<StreamEntry 5-1 of partition 3>"


@pytest.mark.parametrize("option", RUNNEL["stream option"])
def test_an_option_of_a_stream_is_refused_with_its_name_here(option: str) -> None:
    declare: Any = app.stream
    with pytest.raises(Misconfigured, match=rf"^stream other: {option} is no option; for Runnel's {option} "):
        declare("other", **{option: 3})


@pytest.mark.parametrize("option", RUNNEL["processor option"])
def test_an_option_of_a_processor_is_refused_with_its_name_here(option: str) -> None:
    declare: Any = app.processor
    with pytest.raises(
        Misconfigured, match=f"^processor bill: {option} is no option; for Runnel's {option} there "
    ):
        declare(orders, **{option: 3})(bill)


@pytest.mark.parametrize("policy", RUNNEL["failure action"])
def test_an_exception_policy_is_refused_with_what_to_write(policy: str) -> None:
    declare: Any = app.processor
    for written in (policy, f"ExceptionPolicy.{policy}"):
        with pytest.raises(Misconfigured, match=re.escape(f"for Runnel's {policy} there is then=")):
            declare(orders, then=written)(bill)


def test_explicit_ids_are_refused_before_anything_is_sent() -> None:
    send: Any = orders.send
    with pytest.raises(Misconfigured, match=r"^send: stream_ids is no option; for Runnel's stream_ids there"):
        send(Order(order_id=1), stream_ids=["5-1"])
    with pytest.raises(Misconfigured, match=r"^send: colour is no option; there are times$"):
        send(Order(order_id=1), colour=3)


def test_other_options_are_refused_with_those_that_there_are() -> None:
    declare: Any = app.stream
    with pytest.raises(
        Misconfigured, match=r"^stream other: partition is no option; did you mean 'partitions'"
    ):
        declare("other", partition=3)
    declare = app.processor
    with pytest.raises(Misconfigured, match=r"^processor bill: colour is no option; there are absence, "):
        declare(orders, colour=3)(bill)


@pytest.mark.parametrize("name", sorted({*RUNNEL["setting"], "leadership_poll_interval"}))
def test_a_setting_is_refused_with_its_name_here(name: str) -> None:
    with pytest.raises(Misconfigured, match=rf"^setting '{name}' is not known; for \w+'s {name} there is "):
        App("runnel-names", **{name: 3})  # type: ignore[arg-type]


def test_the_settings_that_fennel_has_too_are_answered() -> None:
    assert {"redis_url", "autodiscover"} <= FENNEL["setting"].keys()


@pytest.mark.parametrize("name", RUNNEL["module"])
def test_importing_a_name_says_what_there_is(name: str) -> None:
    # `celery5.middleware` is a package: only elsewhere the name is unknown.
    for package in ("celery5.limits",) if name == "middleware" else ("celery5", "celery5.limits"):
        with pytest.raises(ImportError, match=re.escape(f"for Runnel's {name} there is")):
            exec(f"from {package} import {name}")


@pytest.mark.parametrize("module", ["interfaces", "constants"])
def test_importing_a_module_says_what_there_is(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"for Runnel's {module} there is")):
        exec(f"import celery5.{module}")


def test_a_module_of_a_package_is_no_name_of_runnels() -> None:
    code = "from celery5.streams import middleware; print(middleware.__name__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ran.stdout, ran.stderr) == ("celery5.streams.middleware\n", "")


@pytest.mark.parametrize(
    ("variable", "answer"),
    [
        ("RUNNEL_DEFAULT_LOCK_EXPIRY", "instead of Runnel's default_lock_expiry there is lease "),
        ("RUNNEL_REDIS_URL", "instead of Runnel's redis_url there is broker "),
        ("RUNNEL_LOG_LEVEL", "instead of Runnel's log_level there is CELERY5_LOG_LEVEL "),
        ("FENNEL_LOG_LEVEL", "instead of Fennel's log_level there is CELERY5_LOG_LEVEL "),
        ("CELERY5_DEFAULT_LOCK_EXPIRY", "for Runnel's default_lock_expiry there is lease "),
    ],
)
def test_a_variable_of_runnels_is_named_with_what_to_set(variable: str, answer: str) -> None:
    (warning,) = find_warnings(Settings(), {variable: "3", "RUNNEL_HOME": "/", "RUNNEL": "1"})
    assert warning.startswith(f"{variable} is in the environment")
    assert answer in warning


def test_importing_what_the_package_of_streams_has_says_where_it_is() -> None:
    with pytest.raises(ImportError, match=r"from celery5\.streams import Record$"):
        exec("from celery5 import Record")


@pytest.mark.parametrize("words", sorted(RUNNEL["command"].keys() - {"worker APP"}))
def test_a_command_is_refused_with_its_name_here(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_reporting_errors(
        lambda: cli.main(["-A", "shop", *words.split()], "celery5", standalone_mode=False)
    )
    assert code == EXIT_USAGE
    assert f"for Runnel's {words} there is celery5 " in capsys.readouterr().err


def test_a_worker_of_an_application_is_refused_with_the_command_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["worker", "shop:app", "--processors", "bill"]
    assert run_reporting_errors(lambda: cli.main(words, "celery5", standalone_mode=False)) == EXIT_USAGE
    assert "No such command 'shop:app'; for Runnel's worker APP there is celery5 -A APP worker start" in (
        capsys.readouterr().err
    )


def test_what_runnel_checks_is_checked() -> None:
    one = App("checks")
    declare: Any = one.processor
    with pytest.raises(Misconfigured, match="Order has no field 'order'; did you mean 'order_id'"):
        one.stream("other", Order, by="order")
    with pytest.raises(Misconfigured, match="record Nested is primitive, and its field 'orders' is no int, "):
        type("Nested", (Record,), {"__annotations__": {"orders": list[int]}}, primitive=True)

    class Native(Record, primitive=True):
        size: int

    with pytest.raises(Misconfigured, match=r"record Native is primitive: .* without a codec"):
        one.stream("other", Native, by="size", codec="msgpack")
    stream = one.stream("orders", Order, by="order_id")
    with pytest.raises(ValueError, match="2 records with 1 time: give one for each"):
        stream.send(Order(order_id=1), Order(order_id=2), times=[5])
    declare(stream)(bill)
    with pytest.raises(Misconfigured, match="two processors of stream orders are named 'bill'"):
        declare(stream)(bill)
    with pytest.raises(Misconfigured, match=r"give a stream, app\.stream\("):
        declare("orders")(bill)
    with pytest.raises(Misconfigured, match="a processor takes one argument, its events"):
        declare(stream)(lambda: None)
    events = StreamEvents(cast("Any", SimpleNamespace(grace_period=2.0, group="bill")), stream.codec)
    with pytest.raises(Misconfigured, match="give 0 to 2 s, its grace period"):
        events.take(10, within=2.5)
    with pytest.raises(Misconfigured, match="grace_period is -1: give 0 to"):
        declare(stream, name="other", grace_period=-1)(bill)


def test_zeros_reach_the_partition_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = Processor(function=bill, stream=orders, name="bill", grace_period=0)
    assert zero.get_grace_period(30) == 0
    assert App("zeros", grace_period=0).settings.grace_period == 0
    monkeypatch.setenv("CELERY5_GRACE_PERIOD", "0")
    assert App("zeros").settings.grace_period == 0
    events = StreamEvents(cast("Any", SimpleNamespace(grace_period=0, group="bill")), orders.codec)
    events.take(1, within=0)
    with pytest.raises(Misconfigured, match="give 1 to"):
        events.take(0, within=0)


def test_an_explicit_zero_is_a_zero() -> None:
    declare: Any = app.processor
    zeros = {"grace_period": 0, "commit_within": 0, "absence": 0.0, "name": "zeros"}
    declare(orders, on_error=RetryPolicy(max_retries=0, backoff=0), **zeros)(bill)
    (zero,) = [processor for processor in app.streams.processors if processor.name == "zeros"]
    assert (zero.grace_period, zero.commit_within, zero.absence, zero.on_error.max_retries) == (0, 0, 0, 0)
    for option in ("prefetch", "concurrency", "commit_every"):
        with pytest.raises(Misconfigured, match=f"{option} is 0: give 1 to"):
            declare(orders, name="none", **{option: 0})(bill)
    with pytest.raises(Misconfigured, match="partitions is 0"):
        app.stream("none", Order, partitions=0)
    with pytest.raises(Misconfigured, match=r"Keep\(records=0\): give 1 or more"):
        Keep(records=0)


def test_a_streams_helpers_have_their_names_on_the_page() -> None:
    order = Order(order_id=7)
    fields = orders.codec.encode(order)
    assert (
        orders.codec.decode([field if isinstance(field, bytes) else field.encode() for field in fields])
        == order
    )
    assert orders.find_partition(order) in range(16)
    assert orders.keys.log(0).endswith(":log:0")
    assert (orders.partitions, orders.keep.records) == (16, 50_000)
