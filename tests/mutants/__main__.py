"""Break the main claim of each row of the parity table, and report those that no test notices.

`python -m tests.mutants --row C10` breaks one. Each mutation is made in a copy of the project, never in the checkout.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.table import ROOT, Mutation, mutate, read_table

TIMEOUT = 600.0
"""Seconds that the tests of one mutation may take. A mutant that hangs is noticed too."""
IGNORED = shutil.ignore_patterns(".*", "build", "dist", "site", "*.egg-info")
COMPILED = ("celery5", "celery5/services", "celery5/bootsteps", "celery5/examples", "tests")
"""Folders whose bytecode is stored before anything is broken. compileall follows no links, so those are named."""
MAX_RETRIED = 10
"""The most tests that are run again when they fail while nothing is broken."""
TESTS_FAILED = 1
"""How pytest ends when a test has failed. Any other number but 0 means that tests did not run."""


class Verdict(Enum):
    """What came of a mutation."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "DID NOT RUN"


class ProjectCopy:
    """A copy of the project, in which one mutation at a time is made and tested."""

    def __init__(self, folder: Path, source: Path = ROOT) -> None:
        """Copy `source` to `folder`, which must not exist. Environments and caches of tools stay behind."""
        self.folder = folder
        shutil.copytree(source, folder, symlinks=True, ignore=IGNORED)

    def compile(self) -> None:
        """Store the bytecode of the project. Without it each run of tests would compile hundreds of modules."""
        command = [sys.executable, "-m", "compileall", "-q", *COMPILED]
        subprocess.run(command, cwd=self.folder, env=self._make_environ(writes_bytecode=True), check=True)

    def run(
        self, tests: Sequence[str], *options: str, writes_bytecode: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run tests on this copy, also in the processes that they start.

        Raises:
            subprocess.TimeoutExpired: They took longer than `TIMEOUT`.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self._make_environ(writes_bytecode=writes_bytecode),
            capture_output=True,
            text=True,
            timeout=None if writes_bytecode else TIMEOUT,
            check=False,
        )

    def _make_environ(self, *, writes_bytecode: bool) -> dict[str, str]:
        """Return the environment. While something is broken no bytecode is written: it could outlast the mutation."""
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        quiet = {} if writes_bytecode else {"PYTHONDONTWRITEBYTECODE": "1"}
        return {**environ, **quiet, "PYTHONPATH": str(self.folder)}

    def judge(self, mutation: Mutation) -> tuple[Verdict, str]:
        """Make a mutation, run its tests, undo it. Returns what came of it, and the output of the tests."""
        path = self.folder / mutation.file
        original, times = path.read_bytes(), path.stat()
        path.write_text(mutate(original.decode(), mutation))
        try:
            result = self.run(mutation.tests, "-x")
        except subprocess.TimeoutExpired:
            return Verdict.KILLED, f"longer than {TIMEOUT:.0f} s"
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if result.returncode == 0:
            return Verdict.SURVIVED, result.stdout
        # An error of a fixture ends pytest with the same number as a failure, and says nothing about the claim.
        has_failed = result.returncode == TESTS_FAILED and re.search(r"^FAILED ", result.stdout, re.MULTILINE)
        return Verdict.KILLED if has_failed else Verdict.BROKEN, result.stdout + result.stderr


def select(rows: Sequence[str], file: str | None) -> list[Mutation]:
    """Return the mutations of those rows, or all; of one file, when one is named."""
    return [
        mutation
        for mutation in read_table().mutation
        if (not rows or set(rows) & set(mutation.rows)) and (file is None or mutation.file == file)
    ]


def check_baseline(copy: ProjectCopy, mutations: Sequence[Mutation], processes: int) -> bool:
    """Return whether the tests pass while nothing is broken. Prints the output when they do not."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    # A process of xdist takes a second to start: few tests are quicker without.
    parallel = ("-n", str(processes), "--dist", "worksteal") if len(tests) > 10 else ()
    result = copy.run(tests, *parallel, writes_bytecode=True)
    failed = re.findall(r"^FAILED (\S+)", result.stdout, re.MULTILINE)
    if result.returncode == TESTS_FAILED and 0 < len(failed) <= MAX_RETRIED:
        print("once more, alone:", *failed)  # a busy machine is no reason to judge nothing
        result = copy.run(failed)
    if result.returncode:
        print(result.stdout[-20_000:], result.stderr, "the tests fail while nothing is broken", sep="\n")
    return result.returncode == 0


def judge_all(copies: Sequence[ProjectCopy], mutations: Sequence[Mutation]) -> int:
    """Judge each mutation, one at a time in each copy, and print what came of it. Returns how many were not killed."""
    free: SimpleQueue[ProjectCopy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge(mutation: Mutation) -> tuple[Verdict, str]:
        copy, began = free.get(), time.monotonic()
        try:
            verdict, output = copy.judge(mutation)
        finally:
            free.put(copy)
        print(f"{verdict.value:8} {time.monotonic() - began:5.1f} s  {mutation.title}", flush=True)
        return verdict, output

    with ThreadPoolExecutor(len(copies)) as pool:
        judged = list(zip(mutations, pool.map(judge, mutations), strict=True))
    left = [(mutation, *outcome) for mutation, outcome in judged if outcome[0] is not Verdict.KILLED]
    for mutation, verdict, output in left:
        print(f"\n{verdict.value}: {mutation.title}\n{output[-3000:]}")
    print(f"\n{len(judged) - len(left)} of {len(judged)} mutations were noticed")
    return len(left)


def main() -> int:
    """Break the main claim of each row of the parity table. Returns 1 when one is not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=main.__doc__)
    parser.add_argument("--row", action="append", default=[], help="only this row; may be repeated")
    parser.add_argument("--file", help="only the mutations of this file")
    # Most of the time a test waits in vain for what a mutation prevents, so four are not too many for two processors.
    parser.add_argument(
        "--copies", type=int, default=4, help="of the project, each with one mutation at a time"
    )
    options = parser.parse_args()
    mutations = select(options.row, options.file)
    if not mutations:
        parser.error("there is no such mutation")
    with tempfile.TemporaryDirectory(prefix="c5-mutants-") as folder:
        first = ProjectCopy(Path(folder, "0"))
        first.compile()
        if not check_baseline(first, mutations, options.copies):
            return 1
        others = [
            ProjectCopy(Path(folder, str(number)), first.folder)
            for number in range(1, min(options.copies, len(mutations)))
        ]
        return int(judge_all([first, *others], mutations) > 0)


if __name__ == "__main__":
    sys.exit(main())
