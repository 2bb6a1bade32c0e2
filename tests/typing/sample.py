"""Sample: code of a user, with the types that a checker must see; it must refuse the lines that say `ignore`."""

from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from decimal import Decimal
from typing import Annotated, Any, Protocol, assert_type
from uuid import UUID

from celery5 import (
    App,
    AsyncResult,
    Event,
    JobState,
    RetryPolicy,
    Workflow,
    agather,
    chain,
    chord,
    cron,
    first,
    fork,
    gather,
    group,
    optional,
    poisonous,
    retry,
    task,
    wait,
)
from celery5.events.event import SentEvent
from celery5.protocol.job.job import Job
from celery5.streams import (
    BlockingEvents,
    FileArchive,
    Hopping,
    Keep,
    Record,
    StoredRecord,
    StreamEvents,
    Tumbling,
)
from celery5.tasks import INJECTED, CurrentJob, Resource, Signature, Task
from celery5.tasks.task import CoroutineTask, FunctionTask
from celery5.testing.streams import ProcessorDriver
from celery5.workflows import Flow, Outcome, Partial, Results, WorkflowRun

app = App("shop", concurrency=3, brokers={"mails": "redis://mails"}, priorities="4:2:1")


@app.event
class OrderPaid(Event):
    order: int
    note: str = ""


@app.task
async def charge(order: UUID, amount: Decimal, *, note: str = "") -> int:
    return 1


@app.task(queue="cpu", max_retries=2)
def shrink(path: str, size: int = 128) -> list[str]:
    return [path]


@app.task(loop="asyncio", name="legacy")
async def legacy(*urls: str) -> bytes:
    return b""


@task
async def free() -> None: ...


@task(ignore_result=True)
def free_too(**named: int) -> str:
    return ""


@app.task(bind=True, retry_policy={"max_retries": 3, "interval_start": 0}, retry_backoff=lambda n: n / 2)
async def bound(self: CurrentJob, order: UUID) -> int:
    assert_type(self.attempt, int)
    return 1


@task(bind=True, autoretry_for=(ValueError, "shop.Wrong"), retry_policy=RetryPolicy(autoretry_for=[OSError]))
def bound_too(self: CurrentJob, *, size: int) -> str:
    self.retry(countdown=5, max_retries=2, retry_policy={"interval_max": 1})


@retry(max_retries=3, backoff=0.1, on=(OSError, ValueError))
def in_place(path: str, *, size: int = 1) -> bytes:
    return b""


@retry()
async def awaited_in_place(path: str) -> bytes:
    with poisonous():
        data = path.encode()
    with retry(max_retries=10, interval_start=0, interval_step=5, interval_max=120, name="it"):
        data += b""
    with optional(ConnectionError, TimeoutError):
        data += b""
    return data


class Bank:
    async def pay(self, order: int) -> str:
        return "paid"


async def open_bank() -> AsyncIterator[Bank]:
    yield Bank()


BankClient = Annotated[Bank, Resource(open_bank, check_interval=30)]


@app.task
async def pay_order(order: int, bank: BankClient = INJECTED) -> str:
    assert_type(bank, Bank)
    return await bank.pay(order)


ORDER, AMOUNT = UUID(int=1), Decimal(1)


def plain() -> None:
    assert_type(charge.delay(ORDER, AMOUNT, note="x"), AsyncResult[int])
    assert_type(charge.delay(ORDER, amount=AMOUNT).get(timeout=1), int)
    assert_type(shrink.delay("a").get(), list[str])
    assert_type(OrderPaid.delay(order=7, note="x"), SentEvent)
    assert_type(OrderPaid.job(order=7), Job)
    assert_type(legacy.delay("a", "b").get(), bytes)
    assert_type(free.delay().get(), None)
    assert_type(free_too.delay(a=1).get(), str)
    assert_type(shrink("a", size=1), list[str])
    charging: Coroutine[Any, Any, int] = charge(ORDER, AMOUNT)
    assert_type(charge.job(ORDER, AMOUNT), Job)
    assert_type(charge.s(ORDER, AMOUNT), Signature[int])
    assert_type(charge.s(ORDER, AMOUNT).delay().get(), int)
    assert_type(charge.options(countdown=3).delay(ORDER, AMOUNT).get(), int)
    assert_type(shrink.options(queue="slow")("a"), list[str])
    assert_type(charge.delay(ORDER, AMOUNT).status(), JobState)
    assert_type(app.send_many([charge.s(ORDER, AMOUNT)]), list[AsyncResult[int]])
    assert_type(gather([shrink.delay("a"), shrink.delay("b")]), list[list[str] | Exception])
    assert_type(app.result("id", task=shrink).get(), list[str])
    done, late = wait([charge.delay(ORDER, AMOUNT), shrink.delay("a")])
    assert_type(done, set[AsyncResult[Any]])
    assert_type(late, set[AsyncResult[Any]])
    coroutine: CoroutineTask[..., int] = charge
    function: FunctionTask[..., list[str]] = shrink
    either: list[Task[..., Any]] = [coroutine, function, free, free_too]
    wider: Task[..., int | str] = charge
    del either, wider, charging
    assert_type(bound_too.delay(size=1).get(), str)
    assert_type(bound_too(size=1), str)
    assert_type(bound.delay(ORDER).get(), int)
    assert_type(in_place("a", size=2), bytes)


async def awaited() -> None:
    assert_type(await pay_order.adelay(7), AsyncResult[str])
    assert_type(await pay_order(7, Bank()), str)
    assert_type(await charge.adelay(ORDER, AMOUNT), AsyncResult[int])
    assert_type(await (await shrink.adelay("a")).aget(timeout=1), list[str])
    assert_type(await charge(ORDER, AMOUNT), int)
    assert_type(await bound(ORDER), int)
    assert_type(await awaited_in_place("a"), bytes)
    assert_type(await charge.s(ORDER, AMOUNT).adelay(), AsyncResult[int])
    assert_type(await agather([await charge.adelay(ORDER, AMOUNT)]), list[int | Exception])
    assert_type(await app.asend_many([shrink.s("a")]), list[AsyncResult[list[str]]])
    assert_type(await (await free.adelay()).astatus(), JobState)


@app.timer(interval=60, overlap="queue", jitter=3)
async def refresh() -> None: ...


@app.timer(cron("0 3 * * *"))
def nightly(limit: int = 3) -> int:
    return limit


assert_type(nightly(), int)


class Reading(Record):
    sensor: str
    at: float


async def keep_elsewhere(stream: str, partition: int, entries: Sequence[StoredRecord]) -> None:
    assert_type([entry.time for entry in entries], list[float])


elsewhere = Keep(full="archive", archive=keep_elsewhere)
readings = app.stream(
    "readings", Reading, by="sensor", keep=Keep(full="archive", archive=FileArchive("archive"))
)
minutes = app.stream("minutes", Reading)


@app.processor(readings, into=minutes)
async def watch(events: StreamEvents[Reading]) -> None:
    by_sensor = events.windows(Tumbling(60), initial=0.0, add=lambda most, record: max(most, record.at))
    async for window in by_sensor:
        assert_type(window.key, str)
        assert_type(window.value, float)
    by_hour = events.windows(
        Hopping(60, every=30),
        initial=0,
        add=lambda count, _: count + 1,
        by=lambda reading: int(reading.at) // 3600,
        time=lambda reading: reading.at,
    )
    async for hour in by_hour:
        assert_type(hour.key, int)
    events.windows(Tumbling("60"), initial=0, add=lambda count, _: count + 1)  # type: ignore[arg-type]
    events.windows(Tumbling(60), initial=0, add=lambda count, _: count, latenes=5)  # type: ignore[call-overload]


@app.processor(readings)
def keep(events: BlockingEvents[Reading]) -> None:
    for reading in events.records():
        assert_type(reading, Reading)
    for batch in events.take(5, within=1).records():
        assert_type(batch, list[Reading])
    for window in events.windows(Tumbling(60), initial=0, add=lambda count, _: count + 1):
        assert_type(window.value, int)


@app.processor(readings)  # type: ignore[arg-type]
def blocking_with_await(events: StreamEvents[Reading]) -> None: ...


@readings.subscribe
@app.task
async def take_reading(reading: Reading) -> int:
    return int(reading.at)


assert_type(take_reading.delay(Reading(sensor="a", at=1.0)), AsyncResult[int])


def drive() -> None:
    with ProcessorDriver(app, watch) as driver:
        driver.feed(Reading(sensor="a", at=1.0), times=[1])
        assert_type(driver.sent(minutes), list[Reading])
        assert_type(driver.committed, list[Reading])
        driver.feed("a")  # type: ignore[arg-type]
        driver.crash("a")  # type: ignore[arg-type]


async def mistaken() -> None:
    app.timer(interval=60, overlap="skipp")  # type: ignore[arg-type]
    app.timer(60, on_leader="yes")  # type: ignore[arg-type]
    app.on_start(in_place)  # type: ignore[type-var]
    app.timer(60)(in_place)  # type: ignore[type-var]
    App("shop", concurency=3)  # type: ignore[call-arg]
    App("shop", concurrency="many")  # type: ignore[arg-type]
    charge.options(countdwn=1)  # type: ignore[call-arg]
    charge.options(countdown="soon")  # type: ignore[arg-type]
    OrderPaid(order="x")  # type: ignore[arg-type]
    OrderPaid.delay(order="x")  # type: ignore[arg-type]
    OrderPaid.delay(ordr=7)  # type: ignore[call-arg]
    OrderPaid.job()  # type: ignore[call-arg]
    await OrderPaid.adelay(order=7, note=8)  # type: ignore[arg-type]
    charge.delay(ORDER)  # type: ignore[call-arg]
    charge.delay(ORDER, "1")  # type: ignore[arg-type]
    charge.delay(ORDER, AMOUNT, "x")  # type: ignore[call-arg]
    charge.delay(ORDER, AMOUNT, nota="x")  # type: ignore[call-arg]
    charge.s(5, AMOUNT)  # type: ignore[call-overload]
    charge.job("a", AMOUNT)  # type: ignore[arg-type]
    charge.options(queue="a").delay("a", AMOUNT)  # type: ignore[arg-type]
    charge("a", AMOUNT)  # type: ignore[arg-type, unused-coroutine]
    shrink(5)  # type: ignore[arg-type]
    shrink.delay("a", size="b")  # type: ignore[arg-type]
    await shrink.adelay()  # type: ignore[call-arg]
    await legacy.adelay(1)  # type: ignore[arg-type]
    free.delay(1)  # type: ignore[call-arg]
    free_too.delay(a="1")  # type: ignore[arg-type]
    text: str = charge.delay(ORDER, AMOUNT).get()  # type: ignore[assignment]
    await shrink("a")  # type: ignore[misc]
    app.task(quue="a")  # type: ignore[call-overload]
    app.task(loop="uvloop")  # type: ignore[call-overload]
    app.task(5)  # type: ignore[call-overload]
    del text
    bound.delay()  # type: ignore[call-arg]
    bound_too.delay(1)  # type: ignore[call-arg]
    in_place(5)  # type: ignore[arg-type]
    retry(max_retry=3)  # type: ignore[call-arg]
    optional(5)  # type: ignore[arg-type]
    optional(KeyboardInterrupt)  # type: ignore[arg-type]
    app.task(retry_backoff="shop.backoff")  # type: ignore[call-overload]
    app.task(bind=True)(free)  # type: ignore[arg-type]
    await pay_order(7, "bank")  # type: ignore[arg-type]
    await pay_order.adelay("7")  # type: ignore[arg-type]
    Resource("bank")  # type: ignore[arg-type]


@app.task
async def double(number: int) -> int:
    return 2 * number


@app.task
def label(number: int, name: str = "") -> str:
    return f"{name}{number}"


@app.task
async def total(numbers: list[int]) -> float:
    return sum(numbers)


@app.task
async def paged_total(numbers: Results[int]) -> float:
    return sum([number async for number in numbers])


@app.workflow(deadline=60)
def double_all(flow: Flow, number: int) -> str:
    one = flow.call(double, number)
    assert_type(one, int)
    assert_type(flow.map(double, [one]), list[int])
    flow.call(double, "x")  # type: ignore[arg-type]
    return flow.call(label, one)


def composed_workflows() -> None:
    needing: Partial[int, int] = double.s()
    assert_type(needing | label.s(), Partial[int, str])
    assert_type(double.s(1).outcome(), Signature[Outcome[int]])
    assert_type(double.map([1]), Workflow[list[int]])
    assert_type(label.map(range(3)), Workflow[list[str]])
    assert_type(label.starmap([(1, "a")]), Workflow[list[str]])
    assert_type(label.chunks([1, 2], 2), Workflow[list[str]])
    assert_type(double.chunks(n=2, at_once=3), Partial[Iterable[int], list[int]])
    assert_type(label.map(need=0.5), Partial[Iterable[int], list[str]])
    assert_type(label.starmap(on_error="continue"), Partial[Iterable[Iterable[Any]], list[str]])
    assert_type(double.s(1) | double.s() | label.s(), Workflow[str])
    assert_type(double.s(1) | label.partial("a"), Workflow[str])
    assert_type(chain(double.s(1), double.s(), label.s()), Workflow[str])
    assert_type(double.map([1]) | total.s(), Workflow[float])
    assert_type(double.map([1]) | paged_total.s(), Workflow[float])
    assert_type(chord([double.s(1)], paged_total.s()), Workflow[float])
    assert_type(total.s([1]) >> label.s(1), Workflow[str])
    assert_type(group(double.s(1), double.s(2)), Workflow[list[int]])
    assert_type(chord([double.s(1)], total.s()), Workflow[float])
    assert_type(first(double.s(1), double.s(2)), Workflow[int])
    assert_type(double.s(1) | fork(double.s(), label.s()), Workflow[tuple[int, str]])
    assert_type((double.s(1) | label.s()).start(id="a").get(), str)
    assert_type(double_all.start(3), WorkflowRun[str])
    total.s() | double.s()  # type: ignore[operator]
    label.s(1) | double.s()  # type: ignore[operator]
    double.map([1]) | double.s()  # type: ignore[operator]
    double.map(["x"])  # type: ignore[list-item]
    double.map([1], at_onse=3)  # type: ignore[call-overload]
    label.starmap([(1,)], need="all")  # type: ignore[call-overload]
    double.chunks([1], 2, on_error="continu")  # type: ignore[call-overload]
    double.s(1) >> label.s()  # type: ignore[operator]
    double.s().delay()  # type: ignore[attr-defined]
    group(label.s(1)) | total.s()  # type: ignore[operator]
    label.map([1]) | paged_total.s()  # type: ignore[operator]
    double.s(1) | paged_total.s()  # type: ignore[operator]
    double_all.start("x")  # type: ignore[arg-type]


class Delays(Protocol):
    """What a user expects of a task."""

    def delay(self, path: str, size: int = 128) -> AsyncResult[list[str]]: ...


class Gets(Protocol):
    """What a user expects of a result."""

    def get(self, timeout: float | None = None) -> int: ...

    def revoke(self) -> bool: ...


class GetsText(Protocol):
    def get(self, timeout: float | None = None) -> str: ...


class SendsRecords(Protocol):
    def send(self, *records: Reading) -> object: ...


class SendsEvents(Protocol):
    def send(self, events: Sequence[Event]) -> Sequence[SentEvent]: ...


def satisfied_protocols() -> None:
    delays: Delays = shrink
    gets: Gets = charge.delay(ORDER, AMOUNT)
    records: SendsRecords = readings
    events: SendsEvents = app.events
    delays = charge  # type: ignore[assignment]
    text: GetsText = charge.delay(ORDER, AMOUNT)  # type: ignore[assignment]
    del delays, gets, records, events, text


class KnownResult(AsyncResult[int]):
    def get(self, timeout: float | None = 10.0) -> int:
        return 1

    def status(self) -> str:  # type: ignore[override]
        return ""


class QuietTask(FunctionTask[[str], int]):
    def delay(self, path: str, /) -> AsyncResult[int]:
        return super().delay(path)


class QuietApp(App):
    def empty(self, queue: str) -> int:
        return 0
