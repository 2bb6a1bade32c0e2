"""Workflows in the dashboard: which runs there are, what of a run has failed and why, its graph, and what to do."""

import re
from typing import Any

import pytest
import trio

from celery5 import App, chain, group
from tests.redis.dashboard.client import find_links, looking_at, summarize_actions
from tests.redis.dashboard.site import read_text
from tests.redis.worker.workers import until_async, working


def declare(app: App) -> None:
    """Tasks that succeed, fail and never end."""

    @app.task(name="add")
    async def add(a: int, b: int = 1) -> int:
        return a + b

    @app.task(name="total")
    async def total(values: list[int]) -> int:
        return sum(values)

    @app.task(name="fail", max_retries=0)
    async def fail(a: int) -> int:
        raise ValueError(f"no <b>money</b> for {a}")

    @app.task(name="stuck")
    async def stuck(a: int) -> int:
        await trio.sleep_forever()
        return a


async def until_state(app: App, run_id: str, state: str) -> None:
    async def is_so() -> bool:
        run = await app.workflows.afind(run_id)
        return run is not None and (await run.astatus()).state.value == state

    await until_async(is_so)


async def until_recorded(app: App, job_id: str) -> None:
    async def is_recorded() -> bool:
        return bool((await app.jobs.asearch(id=job_id, state="DEAD")).jobs)

    await until_async(is_recorded)


async def test_a_failed_run_shows_which_job_failed_on_which_worker_and_why(app: App) -> None:
    app.configure(metrics_interval=0.1)
    declare(app)
    tasks: Any = app.tasks
    async with working(app, name="one"):
        both = group(tasks["add"].s(1), tasks["fail"].s(2))
        await (both | tasks["total"].partial()).astart(id="night-1")
        await (group([tasks["add"].s(n) for n in range(20)]) | tasks["total"].partial()).astart(id="day-1")
        await until_state(app, "night-1", "FAILED")
        await until_state(app, "day-1", "SUCCESS")
        async with looking_at(app, role="viewer") as client:
            listed = await client.look("workflows")
            assert "Success 1 Failed 1" in listed
            assert "night-1" in listed
            assert "day-1" in listed
            assert "day-1" not in await client.look("workflows", state="FAILED")
            assert "night-1" not in await client.look("workflows", name="day")
            await until_recorded(app, "night-1~1")
            html = await client.load("workflows/night-1")
            shown = read_text(html)
            assert re.search(r"fail night-1~1 1 one:\S+ ValueError: no <b>money</b> for 2", shown)
            assert "Traceback (most recent call last)" in shown
            assert "<b>money</b>" not in html
            assert find_links(html, "jobs/night-1~1")
            assert not find_links(html, "jobs/night-1~0")
            assert "night-1~0" in shown
            assert "workflow/retry" not in html
            assert '<g class="node failed">' in html
            drawn = await client.load("workflows/day-1")
            assert "add ×20" in drawn  # noqa: RUF001
            assert "flowchart TD" in drawn


async def test_a_live_run_is_cancelled_and_a_failed_one_is_retried(app: App) -> None:
    declare(app)
    tasks: Any = app.tasks
    async with working(app), looking_at(app, role="operator") as client:
        await chain(tasks["add"].s(1), tasks["stuck"].partial()).astart(id="stuck-1")
        await chain(tasks["add"].s(1), tasks["fail"].partial()).astart(id="failed-1")
        await until_state(app, "failed-1", "FAILED")
        assert "stuck-1" in await client.look("workflows", live="true")

        async def is_stuck() -> bool:
            return bool(find_links(await client.load("workflows/stuck-1"), "jobs/stuck-1~1"))

        await until_async(is_stuck)
        assert "stuck" in await client.look("jobs/stuck-1~1")
        await client.press("workflow:cancel", id="stuck-1")
        await until_state(app, "stuck-1", "CANCELLED")
        await client.press("workflow:retry", id="failed-1")
        await client.press("workflow:cancel", id="stuck-1", status=409)
    done = summarize_actions(await app.audit.alist(action="workflow"))
    assert [(entry["who"], entry["source"], entry["action"]) for entry in done[-2:]] == [
        ("anna", "dashboard", "workflow:retry"),
        ("anna", "dashboard", "workflow:cancel"),
    ]


async def test_what_is_undone_and_where_a_run_failed_is_on_its_page_and_in_the_list(app: App) -> None:
    declare(app)
    tasks: Any = app.tasks

    @app.task(name="refund", max_retries=0)
    async def refund(a: int) -> None:
        raise ConnectionError("the <b>bank</b> is closed")

    @app.task(name="told")
    async def told() -> None: ...

    async with working(app), looking_at(app, role="operator") as client:
        charge = tasks["add"].options(undo=refund)
        run = await (charge.s(4) >> tasks["fail"].s(2)).astart(id="order-1", on_failure=told)
        await until_state(app, "order-1", "FAILED")
        words = (
            "node 2, fail: ValueError: no <b>money</b> for 2",
            "undone 0 of 1; refund of node 0 died: ConnectionError: the <b>bank</b> is closed",
        )
        html = await client.load("workflows/order-1")
        shown = read_text(html)
        assert all(word in shown for word in words)
        assert "; ".join(words) in await client.look("workflows")
        assert "refund (undo of node 0) FAILED" in re.sub(r"\s+", " ", shown)
        assert "told (on_failure of the run)" in shown
        assert find_links(html, "jobs/order-1~1")
        assert "workflow/retry" not in html + await client.load("workflows")
        assert (await client.ask("workflow:show", id=run.id))["undo_failed"] == 1


async def test_nested_run_is_linked_to_its_parent_and_retried_with_it(
    app: App,
) -> None:
    declare(app)
    tasks: Any = app.tasks

    @app.task(name="grow", dynamic=True)
    async def grow() -> Any:
        return tasks["fail"].s(2)

    async with working(app), looking_at(app, role="operator") as client:
        await grow.s().astart(id="outer-1")
        await until_state(app, "outer-1", "FAILED")
        html = await client.load("workflows/outer-1")
        (child,) = {link.rpartition("/")[2] for link in find_links(html, "workflows/")} - {"outer-1", ""}
        await until_recorded(app, f"{child}~0")
        html = await client.load("workflows/outer-1")
        assert find_links(html, f"jobs/{child}~0")
        assert "workflow/retry" in html
        html = await client.load(f"workflows/{child}")
        assert "part of outer-1~0" in read_text(html)
        assert [link for link in find_links(html, "workflows/outer-1") if link.endswith("workflows/outer-1")]
        assert "workflow/retry" not in html


@pytest.mark.parametrize("operation", ["workflow:cancel", "workflow:retry", "workflow:signal"])
async def test_a_viewer_changes_no_run(app: App, operation: str) -> None:
    async with looking_at(app, role="viewer") as client:
        await client.press(operation, id="night-1", name="go", status=403)
