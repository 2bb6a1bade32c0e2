"""The pages of dead letters: what died from which cause, and sending it again."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest

SHOWN = 50
"""Dead jobs on one page."""
FILTERS = ("queue", "task", "error", "reason", "message")


async def load_causes(request: PageRequest) -> Mapping[str, Any]:
    """Return how many dead jobs there are of each cause."""
    return {"causes": await request.read("dlq:count", by="cause")}


async def load_dead(request: PageRequest) -> Mapping[str, Any]:
    """Return dead jobs, the newest first."""
    chosen: dict[str, Any] = request.choose(*FILTERS)
    lists = {name: [value] if name != "message" else value for name, value in chosen.items()}
    jobs = await request.read("dlq:read", **lists, count=SHOWN, after=request.query.get("after"))
    last = jobs[-1] if len(jobs) == SHOWN else None
    return {"jobs": jobs, "chosen": chosen, "after": f"{last.queue}:{last.entry}" if last else ""}


DEAD_LETTER_PAGES = (
    Page(
        path="dead",
        template="dead.html",
        title="Dead letters",
        load=load_causes,
        nav="Dead letters",
        refresh=5.0,
    ),
    Page(path="dead/jobs", template="dead_jobs.html", title="Dead jobs", load=load_dead, refresh=0.0),
)
"""The pages of dead letters."""
