"""The list of limits has those that are declared and those that are imposed, whose they are, and how much is in use."""

import trio

from celery5 import App
from celery5.limits import Limit, Range, Rate
from celery5.operations.operation import Operation
from celery5.operations.table import OPERATIONS
from tests.redis.worker.workers import until_async, working

LIMITS: Operation = OPERATIONS["task:limits"]


async def read_rows(app: App) -> dict[str, dict[str, object]]:
    """The cells of the list, by task and column."""
    found = await LIMITS.perform(app, LIMITS.parse({}, is_text=False))
    columns = LIMITS.shown_columns
    return {row.task: {column.name: column.get(row) for column in columns} for row in found}


async def test_declared_limits_are_listed_with_their_origin(app: App) -> None:
    app.configure(rate_limits="thread=5/s")

    async def run(user: str) -> None: ...

    app.task(name="one", limit=2)(run)
    app.task(name="worker", limit=Limit(3, per="worker"))(run)
    app.task(name="key", limit=1, concurrency_key=lambda user: user)(run)
    app.task(name="range", limit=Range(1, 5, lambda: 2))(run)
    app.task(name="rate", rate_limit=Rate("7/m", per="worker"))(run)
    app.task(name="free")(run)
    rows = await read_rows(app)
    limits = {task: (row["limit"], row["rate"], row["origin"]) for task, row in rows.items()}
    assert limits == {
        "one": ("2", "", "declared"),
        "worker": ("3 per worker", "", "declared"),
        "key": ("1 per key", "", "declared"),
        "range": ("1 to 5", "", "declared"),
        "rate": ("", "7/m", "declared"),
        "kind thread": ("", "5/s", "setting rate_limits"),
    }
    await app.limits.aset("one", 9)
    await app.limits.aset("rate", 4)
    await app.limits.asuspend("free", why="because")
    rows = await read_rows(app)
    assert (rows["one"]["limit"], rows["one"]["origin"]) == ("9", "by hand")
    assert [rows["rate"][name] for name in ("limit", "rate", "origin")] == ["4", "7/m", "declared, by hand"]
    assert [rows["free"][name] for name in ("limit", "origin", "suspended")] == ["", "", "because"]
    for task in ("one", "rate"):
        await app.limits.alift(task)
    await app.limits.aresume("free")


async def test_the_use_of_limits_and_rates_is_counted_as_jobs_run_and_wait(app: App) -> None:
    end = trio.Event()

    @app.task(name="narrow", limit=2)
    async def narrow() -> None:
        await end.wait()

    @app.task(name="rated", rate_limit="3/h")
    async def rated() -> None: ...

    async def read_use() -> list[tuple[object, object]]:
        rows = await read_rows(app)
        return [(rows[task]["in use"], rows[task]["waiting"]) for task in ("narrow", "rated")]

    assert await read_use() == [("0 of 2", 0), ("0 of 3/h", 0)]  # no queue yet
    sent = await app.asend_many([narrow.s() for _ in range(5)])
    await app.asend_many([rated.s() for _ in range(4)])
    async with working(app):

        async def is_full() -> bool:
            return await read_use() == [("2 of 2", 3), ("3 of 3/h", 1)]

        await until_async(is_full)
        end.set()
        for job in sent:
            await job.aget(timeout=30)

        async def is_free() -> bool:
            return (await read_use())[0] == ("0 of 2", 0)

        await until_async(is_free)


async def test_starts_before_the_period_of_a_rate_are_not_counted(app: App) -> None:
    @app.task(name="quick", rate_limit="50/0.4s")
    async def quick() -> None: ...

    async def read_use() -> object:
        return (await read_rows(app))["quick"]["in use"]

    async with working(app):
        first = await quick.adelay()
        await first.aget(timeout=30)

        async def has_passed() -> bool:
            return await read_use() == "0 of 50/0.4s"

        await until_async(has_passed)
