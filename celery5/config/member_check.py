"""Check the code and the settings that the members of a cluster description would load.

Only members on this host are checked. Each distinct environment and set of flags is checked once, by `celery5 config
check` in a separate process, as a member would be. It has the interpreter, the folder and the environment of this one.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Literal

import msgspec
import trio

from celery5.protocol.cluster.description import Cluster, Group, format_flags
from celery5.protocol.masking import collapse_whitespace

CHECK_LIMIT = 60.0
"""Seconds that one check may take."""
MAX_RUNNING = 4
"""The most checks at once: each imports the application."""
MAX_OUTPUT_BYTES = 64 * 1024
"""Only so much of the end of a check's output is read: the user's modules may print any amount."""
SEARCH_PATH = "PYTHONPATH"

Verdict = Literal["ok", "wrong", "not checked"]


class GroupCheck(msgspec.Struct, frozen=True):
    """The result of a check for the members of one group."""

    # The group's name in the cluster, such as `worker-default`.
    group: str
    # The number of its members.
    members: int
    verdict: Verdict
    # What is wrong, or why they were not checked.
    why: str = ""
    # The file of the application that they load; "" when none was loaded.
    code: str = ""


class _Load(msgspec.Struct, frozen=True):
    """The environment and flags that decide what a member loads. Hashable, so that equal ones are checked once."""

    environment: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]


def check_members(
    cluster: Cluster, target: str, flags: Sequence[str], *, reason_elsewhere: str = ""
) -> list[GroupCheck]:
    """Check each group of a cluster, and return what was found, in the order of the description.

    Args:
        cluster: The description.
        target: The name of the application on command lines.
        flags: The names of members' flags that `celery5 config check` accepts.
        reason_elsewhere: Why no member runs on this host; "" if members without a host do.
    """
    loads = {
        group.key: _make_load(cluster, group, flags)
        for group in cluster.groups
        if group.total and not (group.hosts or reason_elsewhere)
    }
    results = trio.run(_check_all, target, list(dict.fromkeys(loads.values())))
    checks: list[GroupCheck] = []
    for group in cluster.groups:
        if group.key in loads:
            load = loads[group.key]
            checks.append(_make_check(cluster, group, results[load]))
        elif group.total:
            why = reason_elsewhere or f"on {', '.join(group.hosts)}"
            checks.append(GroupCheck(group.key, group.total, "not checked", why))
    return checks


def _make_load(cluster: Cluster, group: Group, flags: Sequence[str]) -> _Load:
    own = {name: group.flags[name] for name in flags if name in group.flags}
    environment = {**cluster.environment, **group.environment}
    return _Load(tuple(sorted(environment.items())), tuple(format_flags(own, 1)))


def _make_check(cluster: Cluster, group: Group, result: "_Result") -> GroupCheck:
    path = {**cluster.environment, **group.environment}.get(SEARCH_PATH, "")
    missing = [folder for folder in path.split(os.pathsep) if folder and not os.path.exists(folder)]
    faults = [f"{SEARCH_PATH} names {folder}, which does not exist" for folder in missing]
    faults += [result.error] if result.error else []
    return GroupCheck(group.key, group.total, "wrong" if faults else "ok", "; ".join(faults), result.code)


class _Result(msgspec.Struct, frozen=True):
    """How one check ended: the error in one line, or the file that was loaded."""

    error: str = ""
    code: str = ""


async def _check_all(target: str, loads: Sequence[_Load]) -> dict[_Load, _Result]:
    results: dict[_Load, _Result] = {}
    limiter = trio.CapacityLimiter(MAX_RUNNING)

    async def check(load: _Load) -> None:
        async with limiter:
            results[load] = await _check_one(target, load)

    async with trio.open_nursery() as nursery:
        for load in loads:
            nursery.start_soon(check, load)
    return results


async def _check_one(target: str, load: _Load) -> _Result:
    """Run one check. Its output goes to files: processes that the code starts could keep a pipe open."""
    words = [sys.executable, "-m", "celery5", "-A", target]
    words += ["config", "check", "--json", "--no-cluster", *load.flags]
    environment = {**os.environ, **dict(load.environment)}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = await trio.lowlevel.open_process(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return _Result(f"{sys.executable} cannot be run: {error.strerror}")
        with trio.move_on_after(CHECK_LIMIT):
            await _wait_or_kill(process)
            return _read_result(process.returncode or 0, output, errors)
        return _Result(f"its code was not loaded within {CHECK_LIMIT:g} s")


async def _wait_or_kill(process: trio.Process) -> None:
    """Wait until a process has ended. When cancelled, kill it and the processes that it has started."""
    try:
        await process.wait()
    except trio.Cancelled:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await process.wait()
        raise


def _read_result(code: int, output: IO[bytes], errors: IO[bytes]) -> _Result:
    if code:
        lines = _read_last_lines(errors)
        reported = [line for line in lines if line.startswith("Error: ")] or lines
        error = collapse_whitespace(reported[-1].removeprefix("Error: ")) if reported else ""
        return _Result(error or f"the check has ended with {code}")
    try:
        answer: Mapping[str, Any] = msgspec.json.decode(_read_last_lines(output)[-1], type=dict[str, Any])
        return _Result(code=str(answer["code"]))
    except (IndexError, KeyError, msgspec.DecodeError, RecursionError):
        return _Result("the check has ended without a result")


def _read_last_lines(file: IO[bytes]) -> list[str]:
    file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_OUTPUT_BYTES))
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
