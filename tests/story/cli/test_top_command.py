"""`celery5 top`, in its own terminal: keys, sizes, a broker that goes and comes back, and how it ends."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.cli.commands import COMMAND, LIMIT, Serving, celery5, environment, until
from tests.story.conftest import Desk

FAST = {"CELERY5_METRICS_INTERVAL": "0.2"}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Screen:
    """A command in a terminal of a size: what it shows, and keys for it."""

    def __init__(self, desk: Desk, *words: str, size: tuple[int, int] = (80, 24), **env: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(*size)
        self.modes = termios.tcgetattr(self._theirs)
        self.shown = ""
        self.process = subprocess.Popen(
            [*COMMAND, "-A", "shop", "top", "--interval", "0.2", *words],
            cwd=desk.folder,
            env=environment(**FAST, **{"TERM": "xterm-256color", **env}),
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
        )

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size, as a window manager does."""
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> str:
        """The text of the last whole screen."""
        while select.select([self._ours], [], [], 0)[0]:
            self.shown += os.read(self._ours, 1 << 16).decode(errors="replace")
        screens = self.shown.split("\x1b[H")
        return ESCAPES.sub("", screens[-1].replace("\r", ""))

    def sees(self, *texts: str) -> str:
        """Wait until all of these texts are on the screen."""

        def is_there() -> str:
            shown = self.read()
            return shown if all(text in shown for text in texts) else ""

        try:
            return str(until(is_there))
        except AssertionError:
            raise AssertionError(f"{texts} not in:\n{self.read()}") from None

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._ours, keys.encode())

    def ended(self) -> int:
        """Wait for its end; what it says at the end can be read afterwards. The terminal is as it was before."""
        code: int = until(
            lambda: (self.read(), self.process.poll())[1] is not None and [self.process.poll()]
        )[0]
        self.read()
        assert termios.tcgetattr(self._theirs) == self.modes
        assert self.shown.count("\x1b[?1049h") == self.shown.count("\x1b[?1049l")
        assert self.shown.rindex("\x1b[?25h") > self.shown.rindex("\x1b[?25l")
        return code

    def close(self) -> None:
        """End it if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT)
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def screen(desk: Desk, *words: str, size: tuple[int, int] = (80, 24), **env: str) -> Iterator[Screen]:
    """The command, while the block lasts."""
    shown = Screen(desk, *words, size=size, **env)
    try:
        yield shown
    finally:
        shown.close()


def test_keys_lead_through_all_views_and_q_ends_it(desk: Desk) -> None:
    shop = sys.modules["shop"]
    desk.app.send_many([shop.hopeless.s() for _ in range(3)])
    shop.add.delay(1, 2)
    shop.multiply.delay(1, 2)
    with Serving(
        "-A", "shop", "worker", "start", "--name", "web1", "--queues", "default", cwd=desk.folder, env=FAST
    ) as worker:
        worker.ready()
        shop.resize.delay()
        with screen(desk) as shown:
            shown.sees("queue", "default", "slow", "nobody works on it")
            shown.press("2")
            shown.sees("shop.hopeless", "100 %", "fails for")
            shown.press("/hopeless\r\r")
            shown.sees("task shop.hopeless", "fails since", "ValueError: never", "the last failures")
            shown.press("3")
            shown.sees("web1", "health", "ok")
            shown.press("\r")
            shown.sees("worker web1", "what runs", "shop.resize")
            shown.press("\t")
            shown.sees("ValueError", "never", "shop.hopeless")
            shown.press("5")
            shown.sees("shop.resize", "30 of 120 (25 %)")
            shown.press("?")
            shown.sees("replay the dead letters of the selected group")
            shown.press("xq")
            assert shown.ended() == 0


def test_a_queue_is_paused_and_resumed_after_a_question(desk: Desk) -> None:
    sys.modules["shop"].multiply.delay(1, 2)
    with screen(desk) as shown:
        shown.sees("slow", "nobody works on it")
        shown.press("p")
        shown.sees("Pause queue slow in all workers?")
        shown.press("n")
        shown.sees("nothing was done")
        assert not desk.app.info().queues["slow"].paused
        shown.press("py")
        shown.sees("slow is paused for workers that start later")
        assert desk.app.info().queues["slow"].paused
        until(lambda: "nobody works on it" not in shown.read())  # the queue was read again
        shown.press("py")
        shown.sees("slow is resumed")
        assert not desk.app.info().queues["slow"].paused
    actions = [(entry.action, entry.source) for entry in desk.app.audit.list()]
    assert actions == [("worker:resume-queue", "cli"), ("worker:pause-queue", "cli")]


def test_a_group_of_dead_letters_is_replayed_after_its_count_was_shown(desk: Desk) -> None:
    shop = sys.modules["shop"]
    desk.app.send_many([shop.hopeless.s() for _ in range(7)])
    desk("worker", "start", "--burst")
    with screen(desk) as shown:
        shown.press("4")
        shown.sees("shop.hopeless", "ValueError")
        shown.press("R")
        shown.sees("Replay 7 dead letters of shop.hopeless on default (ValueError)?")
        assert desk.app.info().dead == 7
        shown.press("y")
        shown.sees("7 replayed", "no dead letters")
    assert (desk.app.info().dead, desk.app.info().queues["default"].waiting) == (0, 7)


def test_another_size_of_the_terminal_draws_it_anew(desk: Desk) -> None:
    sys.modules["shop"].multiply.delay(1, 2)
    with screen(desk, size=(60, 12)) as shown:
        text = shown.sees("slow", "nobody works on it")
        assert "scheduled" not in text
        assert max(map(len, text.splitlines())) <= 60
        shown.resize(160, 40)
        text = shown.sees("scheduled", "workers", "verdict")
        assert len(text.splitlines()) == 40
        shown.resize(20, 5)
        shown.sees("the terminal is")
        shown.press("q")
        assert shown.ended() == 0


def test_unreachable_broker_is_named_with_the_age_of_its_data(
    desk: Desk, url: str, own_server: EmbeddedServer
) -> None:
    code = desk.folder / "shop.py"
    code.write_text(code.read_text().replace(url, own_server.url))
    # Python would not see that a file of the same size was changed within a second.
    shutil.rmtree(desk.folder / "__pycache__", ignore_errors=True)
    app = App(desk.app.name, broker=own_server.url)
    app.send_many([app.task(name="multiply", queue="slow")(lambda: None).s()])
    app.close()
    with screen(desk) as shown:
        shown.sees("slow")
        own_server.kill()
        shown.sees("slow", "shown is what was read")
        own_server.revive()
        until(lambda: "shown is" not in shown.read())
        shown.press("q")
        assert shown.ended() == 0


@pytest.mark.parametrize("how", ["\x03", "SIGTERM"])
def test_the_terminal_is_restored_after_an_interruption(desk: Desk, how: str) -> None:
    with screen(desk) as shown:
        shown.sees("no queues yet")
        if how == "SIGTERM":
            shown.process.send_signal(signal.SIGTERM)
        else:
            shown.process.send_signal(signal.SIGINT)
        assert shown.ended() == 130
        assert shown.shown.rstrip().endswith("Interrupted.")
        assert "Traceback" not in shown.shown


def test_one_screen_without_a_terminal_has_no_escape_codes(desk: Desk) -> None:
    sys.modules["shop"].multiply.delay(1, 2)
    shown = desk("top", "--once")
    assert "\x1b" not in shown
    assert "nobody works on it" in shown
    assert "no worker is running" in shown


def test_json_is_one_overview(desk: Desk) -> None:
    sys.modules["shop"].multiply.delay(1, 2)
    overview = json.loads(desk("top", "--json"))
    (queue,) = overview["queues"]
    assert (queue["name"], queue["waiting"], queue["verdict"]["condition"]) == ("slow", 1, "unserved")
    assert overview["totals"]["waiting"] == 1


def test_without_a_terminal_it_says_what_to_add(desk: Desk) -> None:
    ended = celery5("-A", "shop", "top", cwd=desk.folder)
    assert (ended.code, ended.error) == (
        2,
        "Error: celery5 -A shop top needs a terminal: add --once for one screen, or --json",
    )


def test_without_rich_it_says_what_to_install(desk: Desk) -> None:
    hide = (
        "import sys, importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'rich' else find(name, *more)\n"
    )
    run = f"{hide}from celery5.cli.main import main\nmain(['-A', 'shop', 'top', *sys.argv[1:]])"
    for flags, code in ((["--once"], 1), (["--json"], 0)):
        ended = celery5(*flags, cwd=desk.folder, command=(sys.executable, "-c", run))
        assert ended.code == code
        if code:
            assert (
                ended.error == "Error: celery5 -A shop top needs rich: pip install 'rich>=13.9' "
                "(the extra celery5[top]), or use --json"
            )


def test_a_wrong_time_is_refused_in_one_line(desk: Desk) -> None:
    ended = celery5("-A", "shop", "top", "--since", "7d", "--json", cwd=desk.folder)
    assert ended.code == 2
    assert "--since" in ended.error
