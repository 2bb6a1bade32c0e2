"""Twice: runs the tests, and what failed once more by itself; what fails both times is broken.

    python tests/house/twice.py CACHE [pytest's arguments]

Thousands of tests with real processes share a machine that can stand still for seconds, which no limit of a test
foresees. That is no reason to fail, nor to keep silent: what failed once is named at the end, for somebody to look.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 10
"""With more failures than this the tests are broken, and not the machine busy: nothing is run again."""
TESTS_FAILED = 1
"""pytest's exit code for it. All others (interrupted, an import that fails, a wrong flag) are not for a second try."""


def main(cache: Path, arguments: list[str]) -> int:
    """Run the tests, once or twice, and say what failed once; gives the exit code."""
    cache.mkdir(parents=True, exist_ok=True)
    kept = ("-o", f"cache_dir={cache}")
    code = _pytest(*kept, "--cache-clear", *arguments)
    failed = _failed(cache)
    if code != TESTS_FAILED or not failed:
        return code
    if len(failed) > MOST:
        _say([f"{len(failed)} tests failed; more than {MOST} are not run again"])
        return code
    _say([f"once more, by themselves, {len(failed)} that failed"])
    alone = ("-n", "0") if "-n" in arguments else ()
    again = _pytest(*kept, *arguments, *alone, "--last-failed", "--last-failed-no-failures=none")
    twice = _failed(cache)
    _say(
        [f"failed twice: {name}" for name in failed if name in twice]
        + [f"failed once, then passed: {name}" for name in failed if name not in twice]
    )
    return again


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _failed(cache: Path) -> list[str]:
    """The names of the tests that failed when they were last run."""
    file = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text("utf-8"))) if file.exists() else []


def _say(lines: list[str]) -> None:
    rule = "!" * 100
    print("\n".join((rule, *lines, rule)), flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
