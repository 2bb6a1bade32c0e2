"""The pages of jobs: find them, and what one of them did."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest
from celery5.protocol.workflows.member_ids import parse_member_id


async def load_jobs(request: PageRequest) -> Mapping[str, Any]:
    """Return the job of an id that is looked for."""
    wanted = request.query.get("id", "").strip()
    return {"wanted": wanted, "found": await request.read("task:show", id=wanted) if wanted else None}


async def load_job(request: PageRequest) -> Mapping[str, Any]:
    """Return all that is known of a job."""
    job = await request.read("task:show", id=request.path["id"], queue=request.query.get("queue"))
    member = parse_member_id(job.id)
    return {"job": job, "run": member.run if member else ""}


JOB_PAGES = (
    Page(path="jobs", template="jobs.html", title="Jobs", load=load_jobs, nav="Jobs", refresh=0.0),
    Page(path="jobs/{id:path}", template="job.html", title="Job {id}", load=load_job),
)
"""The pages of jobs."""
