"""A real browser, and a real application for it to look at: a server, a worker, a Scheduler, and the dashboard."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from celery5.broker.servers.embedded import EmbeddedServer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
LIMIT = 30.0
"""Seconds for which a condition is waited for."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SHOP = '''
import trio

from celery5 import App, progress

app = App("shop", metrics_interval=0.5)


@app.task(queue="mail")
async def send_mail(number: int) -> int:
    """Send a letter."""
    await trio.sleep(0.01)
    return number


@app.task(queue="money", max_retries=0)
async def charge(order: int, card: str) -> None:
    """Charge a card."""
    if order % 3 == 0:
        raise TimeoutError(f"the bank did not answer for order {order} within 5 s")
    raise ValueError(f"card of order {order} was refused")


@app.task(queue="films")
async def encode(name: str) -> None:
    """Encode a film."""
    progress(40, 100, "second pass")
    await trio.sleep_forever()


@app.task(queue="mail", schedule=3600.0)
async def report() -> None:
    """Send the report of the hour."""


@app.event
class OrderPlaced:
    order: int


OrderPlaced.subscribe(report)
orders = app.stream("orders", partitions=2)
'''
FILL = """
from shop import app, charge, encode, orders, send_mail
from celery5 import group

app.load()
app.send_many([send_mail.s(n) for n in range(200)])
app.send_many([charge.s(n, "4111") for n in range(12)])
encode.delay("film.mkv")
group([send_mail.s(n) for n in range(5)]).start(id="letters-1")
app.limits.suspend("shop.report", why="the printer is out of paper")
orders.send({"order": 1}, {"order": 2})
"""


def until(condition: Callable[[], object], what: str | Callable[[], str] = "") -> Any:
    """What a condition gives, as soon as it is true.

    While a page gives way to the next one, the browser refuses to answer, or answers for an element that is gone.
    """
    deadline = time.monotonic() + LIMIT
    refusal: WebDriverException | None = None
    while True:
        try:
            if found := condition():
                return found
        except WebDriverException as error:
            refusal = error
        if time.monotonic() > deadline:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {LIMIT:g} s: {told or condition}") from refusal
        time.sleep(0.05)


@dataclass
class Site:
    """The processes of an application, and the address of its dashboard."""

    server: EmbeddedServer
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    log: str = "dashboard.log"

    def start(self, *words: str, log: str = "") -> subprocess.Popen[bytes]:
        """Start a command of celery5, which writes to a file."""
        with (self.folder / (log or f"{words[0]}.log")).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery5", "-A", "shop", *words],
                cwd=self.folder,
                env={**os.environ, "CELERY5_BROKER": self.server.url},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def run(self, code: str) -> str:
        """What a program prints that uses the application."""
        ended = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env={**os.environ, "CELERY5_BROKER": self.server.url},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    @property
    def sign_in(self) -> str:
        """The last address that was printed."""

        def find() -> list[str]:
            return re.findall(r"http://\S+token=\S+", (self.folder / self.log).read_text())

        return str(until(find, "the dashboard prints its address")[-1])

    @property
    def root(self) -> str:
        """The address without a path."""
        parts = urlsplit(self.sign_in)
        return f"{parts.scheme}://{parts.netloc}"

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """An application with something of everything."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer.start(os.environ.get("CELERY5_TEST_SERVER"), save=True))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "shop.py").write_text(SHOP)
        one = Site(server, folder)
        stack.callback(one.stop)
        one.start("worker", "start", "--name", "web1")
        one.start("scheduler", "start")
        one.start("dashboard", "start", "--port", "0")
        one.run(FILL)

        def is_filled() -> bool:
            code = (
                "from shop import app; i = app.info(); "
                "print(i.dead, len(app.metrics.overview().tasks), *i.schedulers)"
            )
            dead, tasks, *schedulers = one.run(code).split()
            return int(dead) == 12 and int(tasks) >= 2 and bool(schedulers)

        until(is_filled, "the application is filled")
        yield one


@dataclass
class Window:
    """A window of the browser that is signed in."""

    driver: webdriver.Chrome
    site: Site

    def open(self, path: str) -> None:
        """Open a page."""
        self.driver.get(self.site.root + path)

    @property
    def text(self) -> str:
        """What is to be read in the main part."""
        return self.find("main").text

    def find(self, selector: str) -> WebElement:
        """The first element, as soon as there is one."""
        found: list[WebElement] = until(lambda: self.find_all(selector), selector)
        return found[0]

    def find_all(self, selector: str) -> list[WebElement]:
        """All elements that there are."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, label: str, within: str = "main") -> None:
        """Press a button or a link with this label."""

        def is_clicked() -> bool:
            for element in self.find_all(f"{within} button, {within} a"):
                if element.text.strip() == label:
                    with suppress(StaleElementReferenceException):  # the page was shown again: find it there
                        element.click()
                        return True
            return False

        until(is_clicked, label)

    def until_text(self, text: str) -> None:
        """Wait until the main part says this."""
        until(lambda: text in self.find("body").text, lambda: f"{text!r} in {self.find('body').text!r}")

    def command(self, name: str, parameters: dict[str, Any]) -> None:
        """Give a command of the DevTools protocol."""
        self.driver.execute_cdp_cmd(name, parameters)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)

    def set_dark(self, *, dark: bool) -> None:
        """Prefer dark or light colours."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", {"features": [scheme]})

    def set_scripts(self, *, run: bool) -> None:
        """Let the scripts of pages run, or not."""
        self.command("Emulation.setScriptExecutionDisabled", {"value": not run})

    def _get_log(self, kind: str) -> list[dict[str, Any]]:
        driver: Any = self.driver  # this method has no types
        entries: list[dict[str, Any]] = driver.get_log(kind)
        return entries

    def get_requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        entries: list[dict[str, Any]] = self._get_log("performance")
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def get_errors(self) -> list[str]:
        """What the console complained of since the last call."""
        entries: list[dict[str, Any]] = self._get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    """A browser; where there is none, the tests are skipped, and say so."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("THE DASHBOARD WAS NOT TRIED IN A BROWSER: install Debian's chromium and chromium-driver")
    options = Options()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    browser.set_page_load_timeout(LIMIT)
    yield browser
    browser.quit()


@pytest.fixture
def window(driver: webdriver.Chrome, site: Site) -> Iterator[Window]:
    """A window that is signed in, light, of the usual size, and with scripts."""
    one = Window(driver, site)
    one.set_scripts(run=True)
    one.set_dark(dark=False)
    one.resize(1280)
    one.open("/")
    if "/sign-in" in driver.current_url:
        driver.get(site.sign_in)
    one.get_errors()
    one.get_requests()
    yield one
    one.set_scripts(run=True)
