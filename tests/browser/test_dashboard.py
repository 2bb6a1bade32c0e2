"""The dashboard in a real browser: every page, every kind of action, without scripts, by keyboard, small and dark."""

import os
import re
from importlib.resources import files
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from celery5.protocol.durations import format_age
from tests.browser.conftest import Site, Window, until

PAGES = {
    "overview": "/shop",
    "alerts": "/shop/alerts",
    "tasks": "/shop/tasks",
    "storage": "/shop/storage",
    "task": "/shop/tasks/shop.charge",
    "queues": "/shop/queues",
    "queue": "/shop/queues/money",
    "jobs": "/shop/jobs",
    "dead-letters": "/shop/dead",
    "dead-jobs": "/shop/dead/jobs",
    "bulk": "/shop/bulk",
    "workers": "/shop/workers",
    "worker": "/shop/workers/web1",
    "worker-stack": "/shop/workers/web1?stack=true",
    "cluster": "/shop/cluster",
    "schedules": "/shop/schedules",
    "events": "/shop/events",
    "event": "/shop/events/shop.OrderPlaced",
    "streams": "/shop/streams",
    "stream": "/shop/streams/orders",
    "workflows": "/shop/workflows",
    "run": "/shop/workflows/letters-1",
    "limits": "/shop/limits",
    "health": "/shop/health",
    "audit": "/shop/audit",
    "settings": "/shop/settings",
    "form": "/shop/do/schedule/add",
    "confirmation": "/shop/do/dlq/replay?task=shop.charge",
}
PICTURED = ("overview", "dead-letters")
"""The pages that the documentation shows, when CELERY5_SCREENSHOTS names a folder for them."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_clean_in_light_and_dark_large_and_small(window: Window, name: str) -> None:
    axe = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    for width, dark in ((1280, False), (320, True)):
        window.set_dark(dark=dark)
        window.resize(width)
        window.open(PAGES[name])
        assert window.find("h1").text
        assert "Internal Server Error" not in window.text
        page_width = window.driver.execute_script("return document.documentElement.scrollWidth")
        assert page_width <= width, "the page itself must not scroll sideways"
        window.driver.execute_script(axe)
        found: dict[str, Any] = window.driver.execute_async_script(
            "const done = arguments[arguments.length - 1]; axe.run().then(done);"
        )
        faults = [(violation["id"], violation["nodes"][0]["html"][:200]) for violation in found["violations"]]
        assert faults == []
        folder = os.environ.get("CELERY5_SCREENSHOTS")
        if folder and name in PICTURED and width == 1280:
            window.driver.save_screenshot(f"{folder}/dashboard-{name}.png")
    assert window.get_errors() == []
    own = (window.site.root, "data:", "chrome:")
    assert [url for url in window.get_requests() if not url.startswith(own)] == []


def test_a_paged_person_finds_the_cause_in_three_clicks_and_replays_it(window: Window) -> None:
    window.open("/shop")
    window.until_text("shop.charge fails since")
    window.press("shop.charge")
    window.until_text("It fails since")
    window.press("Dead letters", within="nav")
    window.until_text("the bank did not answer")
    assert "card of order" in window.text


def test_a_queue_is_paused_and_resumed_with_a_word_on_it(window: Window) -> None:
    window.open("/shop/queues/films")
    window.press("Pause")
    window.until_text("films is paused")
    window.press("Resume")
    window.until_text("films is read again")


def test_the_live_stack_of_a_running_job_is_shown_at_a_click(window: Window) -> None:
    window.open("/shop/workers/web1")
    window.press("Show the live stack")
    window.until_text("in encode")
    window.open("/shop/jobs?task=shop.encode")
    window.driver.execute_script("document.querySelector('td a.id').click()")
    window.until_text("What happened")
    assert "in encode" not in window.text
    window.press("Show the live stack")
    window.until_text("in encode")
    window.press("Hide")
    window.until_text("Show the live stack")


def test_what_destroys_asks_first_and_can_be_left(window: Window) -> None:
    window.open("/shop/queues/mail")
    window.press("Purge…")
    window.until_text("this would be")
    window.press("Cancel")
    window.until_text("Queue mail")


def test_a_page_is_shown_anew_by_itself_and_keeps_what_is_open(window: Window) -> None:
    window.open("/shop/schedules")
    row = "#schedule-shop\\.report"
    assert "paused" not in window.find(row).text
    window.driver.execute_script("window.own = true")
    window.site.run("from shop import app; app.schedule.pause('shop.report')")
    until(lambda: "paused" in window.find(row).text, "the page shows the change")
    window.site.run("from shop import app; app.schedule.resume('shop.report')")
    until(lambda: "active" in window.find(row).text, "the page shows the change")
    assert window.driver.execute_script("return window.own")


def test_a_chart_is_drawn_where_scripts_run_and_a_table_is_there_without(window: Window) -> None:
    window.open("/shop/queues/money")
    until(lambda: window.find_all("figure.chart"), "a chart")
    window.set_scripts(run=False)
    window.open("/shop/queues/money")
    assert window.find_all("figure.chart canvas") == []
    assert window.find_all("figure.chart details, figure.chart .empty")


@pytest.mark.parametrize("name", ["overview", "queues", "task", "dead-letters", "workers", "run"])
def test_a_page_reads_without_scripts(window: Window, name: str) -> None:
    window.set_scripts(run=False)
    window.open(PAGES[name])
    assert len(window.text) > 100
    assert window.find_all("nav.pages a")


def test_an_action_works_without_scripts(window: Window) -> None:
    window.site.run("from shop import app; app.control.send('resume-queue', {'queue': 'films'})")
    window.set_scripts(run=False)
    window.open("/shop/queues/films")
    window.press("Pause")
    window.until_text("films is paused")
    window.press("Resume")
    window.until_text("films is read again")


def test_the_keyboard_alone_reaches_the_content_and_presses_a_button(window: Window) -> None:
    window.site.run("from shop import app; app.control.send('resume-queue', {'queue': 'films'})")
    window.open("/shop/queues/films")
    keys = ActionChains(window.driver)
    keys.send_keys(Keys.TAB).perform()
    assert window.driver.switch_to.active_element.text == "Skip to the content"
    ActionChains(window.driver).send_keys(Keys.ENTER).perform()
    assert window.driver.current_url.endswith("#main")
    for _ in range(30):
        ActionChains(window.driver).send_keys(Keys.TAB).perform()
        if window.driver.switch_to.active_element.text == "Pause":
            break
    ActionChains(window.driver).send_keys(Keys.ENTER).perform()
    window.until_text("films is paused")
    window.press("Resume")
    window.until_text("films is read again")


def test_an_address_signs_in_once_and_signing_out_ends_it(window: Window) -> None:
    used = window.site.sign_in
    window.driver.delete_all_cookies()
    window.open("/shop")
    window.until_text("Sign in")
    window.driver.get(used)
    window.until_text("Overview")
    window.press("Sign out", within="header")
    window.until_text("Open the address")
    window.driver.get(used)
    window.until_text("This token is not valid, or has been used.")
    window.driver.get(
        until(lambda: window.site.sign_in if window.site.sign_in != used else "", "another one")
    )
    window.until_text("Overview")


def test_a_broker_that_is_killed_is_said_so_and_the_page_heals_by_itself(window: Window, site: Site) -> None:
    window.open("/shop/queues")
    window.until_text("money")
    site.server.kill()
    until(lambda: "broker unreachable" in window.driver.find_element(By.ID, "live").text, "it says so")
    assert "money" in window.text, "what was shown last stays"
    window.open("/shop/queues")
    window.until_text("cannot be reached")
    site.server.revive()
    window.until_text("money")
    until(lambda: window.driver.find_element(By.ID, "live").text == "", "it has healed")


AGES = [0.0, 0.6, 1.0, 29.5, 59.9, 60.0, 90.0, 150.0, 7100.0, 7199.0, 7500.0, 172_700.0, 172_800.0, 3e7]


def test_ages_go_on_without_a_refresh_by_the_rule_of_python(window: Window) -> None:
    window.open("/shop/dead/jobs")
    at = float(window.find("main").get_attribute("data-at") or 0)
    shown = window.driver.execute_async_script(
        """
        const [path, now, ages, done] = arguments;
        import(path).then(({ formatAge }) =>
          done(ages.flatMap((age) => [formatAge(now - age, now), formatAge(now + age, now)])));
        """,
        f"{(window.find('script[type=module]').get_attribute('src') or '').rsplit('/', 1)[0]}/ages.js",
        1.75e9,
        AGES,
    )
    assert shown == [format_age(1.75e9 - sign * age, 1.75e9) for age in AGES for sign in (1, -1)]
    age = window.find("main time[data-age]")
    window.driver.execute_script(
        "arguments[0].dateTime = new Date((arguments[1] - 7) * 1000).toISOString()", age, at
    )
    until(lambda: re.fullmatch(r"(?:[89]|\d\d) s ago", age.text), lambda: age.text)


def test_times_are_in_utc_whatever_the_zone_of_the_browser(window: Window) -> None:
    window.command("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Tokyo"})
    try:
        window.open("/shop/queues/money")
        window.driver.execute_async_script(
            """
            const [path, done] = arguments, figure = document.querySelector("figure.chart");
            figure.dataset.times = "[1750000000, 1750000060]";
            figure.dataset.series = '[["backlog", [1, 2]]]';
            import(path).then(({ drawCharts }) => { drawCharts(document); done(); });
            """,
            f"{(window.find('script[type=module]').get_attribute('src') or '').rsplit('/', 1)[0]}/charts.js",
        )
        until(lambda: window.find_all("figure.chart .u-legend"), "a chart")
        legend = "return document.querySelector('.u-legend').textContent"
        window.driver.execute_script(
            """
            const over = document.querySelector('.u-over'), box = over.getBoundingClientRect();
            const place = {bubbles: true, clientX: box.right - 2, clientY: box.top + 9};
            over.dispatchEvent(new MouseEvent('mousemove', place));
            """
        )
        until(lambda: "UTC" in window.driver.execute_script(legend), "the legend names the zone")
        assert "Times are in UTC" in window.text
    finally:
        window.command("Emulation.setTimezoneOverride", {"timezoneId": ""})
