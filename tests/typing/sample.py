"""Sample: code of a user, with the types that a checker must see; it must refuse the lines that say `ignore`.

Floor: tests. Reads: nothing. Writes: nothing; it is checked and never run.
"""

from collections.abc import Coroutine
from decimal import Decimal
from typing import Any, assert_type
from uuid import UUID

from celery5 import App, AsyncResult, JobState, Signature, Task, agather, gather, task, wait
from celery5.protocol.job import Job
from celery5.task import CoroutineTask, FunctionTask

app = App("shop")


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


ORDER, AMOUNT = UUID(int=1), Decimal(1)


def plain() -> None:
    assert_type(charge.delay(ORDER, AMOUNT, note="x"), AsyncResult[int])
    assert_type(charge.delay(ORDER, amount=AMOUNT).get(timeout=1), int)
    assert_type(shrink.delay("a").get(), list[str])
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


async def awaited() -> None:
    assert_type(await charge.adelay(ORDER, AMOUNT), AsyncResult[int])
    assert_type(await (await shrink.adelay("a")).aget(timeout=1), list[str])
    assert_type(await charge(ORDER, AMOUNT), int)
    assert_type(await charge.s(ORDER, AMOUNT).adelay(), AsyncResult[int])
    assert_type(await agather([await charge.adelay(ORDER, AMOUNT)]), list[int | Exception])
    assert_type(await app.asend_many([shrink.s("a")]), list[AsyncResult[list[str]]])
    assert_type(await (await free.adelay()).astatus(), JobState)


async def mistaken() -> None:
    charge.delay(ORDER)  # type: ignore[call-arg]
    charge.delay(ORDER, "1")  # type: ignore[arg-type]
    charge.delay(ORDER, AMOUNT, "x")  # type: ignore[call-arg]
    charge.delay(ORDER, AMOUNT, nota="x")  # type: ignore[call-arg]
    charge.s(5, AMOUNT)  # type: ignore[arg-type]
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
