"""Leaks of workflows: a key of a run without a time to live is a live run's, or that of a record which waits."""

import re
from typing import Any

OF_RUNS = re.compile(
    r"(?P<tag>celery5:\{[^:{}]+:[^{}]+\}):(?P<what>jobs:ended|jobs:to-send|jobs:runs|jobs:idle-runs|run:(?P<run>[^:]+)(?::.*)?)"
)


def check_runs(server: Any, keys: list[bytes]) -> tuple[list[str], list[bytes]]:
    """Return what is wrong with the keys of runs that never expire, and the other keys."""
    found, others = list[str](), list[bytes]()
    for key in keys:
        match = OF_RUNS.fullmatch(key.decode(errors="replace"))
        if match is None:
            others.append(key)
        elif match["what"] == "jobs:runs":
            orphans = [
                run
                for run in server.zrange(key, 0, -1)
                if not server.exists(f"{match['tag']}:run:{run.decode()}")
                and not server.hexists(f"{match['tag']}:jobs:idle-runs", run)
            ]
            found += [f"{key.decode()}: run {run!r} is live and not there" for run in orphans]
        elif match["what"] == "jobs:idle-runs":
            idle = [run.decode() for run in server.hkeys(key)]
            found += [
                f"{key.decode()}: run {run} is not live, or has its own hash, too"
                for run in idle
                if not _is_owned(server, match["tag"], run) or server.exists(f"{match['tag']}:run:{run}")
            ]
        elif match["run"] and not _is_owned(server, match["tag"], match["run"]):
            found.append(f"{key.decode()}: of no live run, and it never expires")
    return found, others


def _is_owned(server: Any, tag: str, run: str) -> bool:
    if server.zscore(f"{tag}:jobs:runs", run) is not None:
        return True
    root = server.hget(
        f"{tag}:run:{run}", "root"
    )  # a child is kept for as long as the run that it is a part of
    if root is not None:
        return _is_owned(server, tag, root.decode())
    packed = server.hget(f"{tag}:jobs:idle-runs", run)
    if packed is not None and any(live in packed for live in server.zrange(f"{tag}:jobs:runs", 0, -1)):
        return True
    return any(run.encode() in record for record in server.lrange(f"{tag}:jobs:ended", 0, -1))
