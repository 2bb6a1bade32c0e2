"""Define the contestants: the systems that are measured, their versions, and their numbers of jobs.

Versions are pinned, so that a table can be reproduced. `drain_at` is the concurrency at which a peer drained no-op jobs
fastest when it was tried; every peer sleeps at a concurrency of 100.
"""

from dataclasses import dataclass, field

OURS = "celery5"
SILENT = "celery5, log off"
BARE = "bare redis-py XADD"
PEERLESS = (OURS, SILENT, BARE)
"""Rows that are not peers of celery5."""


@dataclass(frozen=True)
class Contestant:
    """One row of the tables."""

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
    # For each measure that is left out, the reason.
    skips: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> str:
        """The folder of the virtual environment, which variants of one peer share."""
        return self.module.removesuffix("_app")


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
NO_CONCURRENCY = "one job at a time in each process"
CHECKOUT = "."
"""Stands for this checkout among the packages of an environment."""

CONTESTANTS = (
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
    Contestant(OURS, "celery5_app", (CHECKOUT,), 6_000, 80_000),
    Contestant(
        SILENT, "celery5_app", (CHECKOUT,), 6_000, 80_000, variant="silent", options="--log-level error",
        skips=dict.fromkeys(("enqueue", "drain2", "latency", "naps", "idle", "commands"), "measured above"),
    ),
    Contestant(
        BARE, "bare_app", ("redis==8.1.0", "hiredis==3.5.0"), 6_000, 80_000,
        skips=dict.fromkeys(("drain1", "drain2", "latency", "naps", "idle", "commands"), "no worker"),
    ),
)  # fmt: skip
