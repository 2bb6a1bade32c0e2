"""Define the contestants: the systems that are measured, their versions, and their numbers of jobs.

Versions are pinned, so that a table can be reproduced. `drain_at` is the concurrency at which a peer drained no-op jobs
fastest when it was tried; every peer sleeps at a concurrency of 100.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

TRIO, ASYNCIO, DEF = "celery5, Trio", "celery5, asyncio", "celery5, def"
OLD_PYTHON = "celery5, Trio, Python 3.11"
NO_LOG, NO_HISTORY, NEITHER = "celery5, no log", "celery5, no history", "celery5, no log, no history"
BOXED = "celery5, boxed"
BLITZQ, BLITZQ_DEF, ARDIQ, MAYU, TARSK = (
    "BlitzQ, asyncio",
    "BlitzQ, def",
    "ArdiQ, asyncio",
    "mayu, def",
    "tarsk, asyncio",
)
BARE, BARE_SOCKET = "bare redis-py XADD", "bare socket XADD"

NEW, OURS, OWN, OLDER = "new", "ours", "own", "older"
"""Groups: peers of the new generation; celery5 beside them; its own rows, which have no peer; older peers."""
PYTHON = "3.13"
"""The Python of all contestants but one: two of the new generation run on no older one."""
NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Contestant:
    """One system with one way of running jobs."""

    name: str
    module: str
    packages: tuple[str, ...]
    # Numbers of jobs, for about one and two seconds.
    enqueue: int
    drain: int
    drain_at: int = 100
    # Whether one command starts several workers; otherwise the command is run several times.
    own_processes: bool = True
    variant: str = ""
    options: str = ""
    group: str = OLDER
    python: str = PYTHON
    # The environment of its workers.
    settings: Mapping[str, str] = field(default_factory=dict)
    # The only measures that are made of it; empty: all that are not skipped.
    only: frozenset[str] = frozenset()
    # For each measure that is left out, the reason.
    skips: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> str:
        """The folder of the virtual environment, which variants of one peer share."""
        return f"{self.module.removesuffix('_app')}-{self.python}"

    def skipped(self, measure: str) -> str | None:
        """Return why a measure is not made of it, or None when it is."""
        if self.only and measure not in self.only:
            return "not measured"
        return self.skips.get(measure)


CELERY = ("celery[redis]==5.7.0", "hiredis==3.5.0")
SAQ = (
    "saq[redis,hiredis]==0.26.4",
    "typing_extensions",
    "uvloop==0.23.0",
)  # saq does not declare the second
STREAQ = ("streaq==7.2.0", "hiredis==3.5.0", "uvloop==0.23.0")
TASKIQ = (
    "taskiq==0.13.0",
    "taskiq-redis==1.2.4",
    "taskiq-pipelines==0.1.4",
    "hiredis==3.5.0",
    "uvloop==0.23.0",
)
BLITZQ_PACKAGES = ("blitzq==1.1.0", "redis==8.1.0", "hiredis==3.5.0")
NO_CONCURRENCY = "one job at a time in each process"
CHECKOUT = "."
"""Stands for this checkout among the packages of an environment."""
DRAIN, SENDING = frozenset({"drain1"}), frozenset({"enqueue", "bulk"})
"""What is made of rows that differ from another in one thing."""

CONTESTANTS = (
    Contestant(TRIO, "celery5_app", (CHECKOUT,), 8_000, 60_000, group=OURS),
    Contestant(ASYNCIO, "celery5_app", (CHECKOUT,), 8_000, 40_000, variant="asyncio", group=OURS),
    Contestant(DEF, "celery5_app", (CHECKOUT,), 8_000, 30_000, variant="def", group=OURS),
    Contestant(BLITZQ, "blitzq_app", BLITZQ_PACKAGES, 8_000, 40_000, drain_at=200, group=NEW),
    Contestant(BLITZQ_DEF, "blitzq_app", BLITZQ_PACKAGES, 8_000, 15_000, variant="def", group=NEW),
    Contestant(ARDIQ, "ardiq_app", ("ardiq==1.2.0",), 4_000, 15_000, group=NEW),
    Contestant(MAYU, "mayu_app", ("mayu==0.2.5",), 8_000, 20_000, group=NEW),
    Contestant(TARSK, "tarsk_app", ("tarsk-redis==0.2.1",), 8_000, 20_000, group=NEW),
    Contestant(
        OLD_PYTHON, "celery5_app", (CHECKOUT,), 8_000, 60_000, python="3.11", group=OWN,
        only=frozenset({"drain1", "enqueue"}),
    ),
    Contestant(NO_LOG, "celery5_app", (CHECKOUT,), 0, 60_000, options="--log-level error", group=OWN, only=DRAIN),
    Contestant(
        NO_HISTORY, "celery5_app", (CHECKOUT,), 0, 60_000, settings={"CELERY5_JOB_HISTORY": "0"}, group=OWN,
        only=DRAIN,
    ),
    Contestant(
        NEITHER, "celery5_app", (CHECKOUT,), 0, 60_000, options="--log-level error",
        settings={"CELERY5_JOB_HISTORY": "0"}, group=OWN, only=DRAIN,
    ),
    Contestant(
        BOXED, "celery5_app", (CHECKOUT,), 0, 5_000, variant="boxed", options="--cpu-slots 1", group=OWN, only=DRAIN
    ),
    Contestant(
        BARE, "bare_app", ("redis==8.1.0", "hiredis==3.5.0"), 8_000, 80_000, group=OWN, only=SENDING
    ),
    Contestant(
        BARE_SOCKET, "bare_app", ("redis==8.1.0", "hiredis==3.5.0"), 12_000, 80_000, variant="socket", group=OWN,
        only=SENDING,
    ),
    Contestant("celery", "celery_app", CELERY, 1_000, 1_200, skips={"naps": NO_CONCURRENCY}),
    Contestant(
        "celery, threads", "celery_app", CELERY, 1_000, 1_500, drain_at=10, own_processes=False, variant="threads"
    ),
    Contestant("dramatiq", "dramatiq_app", ("dramatiq[redis]==2.2.1", "hiredis==3.5.0"), 3_000, 5_000, drain_at=16),
    Contestant(
        "rq", "rq_app", ("rq==2.12.0", "hiredis==3.5.0"), 1_500, 400, own_processes=False,
        skips={"naps": NO_CONCURRENCY},
    ),
    Contestant(
        "huey", "huey_app", ("huey==3.5.4", "redis==8.1.0", "hiredis==3.5.0"), 4_000, 5_000, drain_at=4,
        own_processes=False,
    ),
    Contestant(
        "arq", "arq_app", ("arq==0.28.0", "hiredis==3.5.0", "uvloop==0.23.0"), 1_500, 2_400, own_processes=False
    ),
    Contestant("saq", "saq_app", SAQ, 2_500, 3_000, drain_at=50, own_processes=False),
    Contestant("taskiq, streams", "taskiq_app", TASKIQ, 1_800, 4_500, drain_at=20, variant="stream"),
    Contestant("taskiq, list", "taskiq_app", TASKIQ, 1_800, 4_500, drain_at=20, variant="list"),
    Contestant("streaq", "streaq_app", STREAQ, 1_500, 2_000, drain_at=50),
)  # fmt: skip
