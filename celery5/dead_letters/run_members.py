"""Which dead jobs belong to a run of a workflow that has ended: nobody waits for those."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from celery5.broker.calls import workflows as calls
from celery5.broker.driver import AsyncDriver
from celery5.protocol.job.dead_letters import DeadJob
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id
from celery5.workflows.graph import is_hidden_job, read_node

if TYPE_CHECKING:
    from celery5.application import Application


async def find_jobs_of_ended_runs(
    app: "Application", redis: AsyncDriver, jobs: Sequence[DeadJob]
) -> frozenset[str]:
    """Return the ids of those jobs whose run has ended. What such a job does, nothing follows and nothing undoes.

    A job that undoes another one, or is told of a failure, is none of them: it is wanted most when its run has ended.
    """
    members = {job.id: (member, job) for job in jobs if (member := parse_member_id(job.id)) is not None}
    homes = {(member.home or job.queue, member.run) for member, job in members.values()}
    places = sorted(homes)
    replies = await redis.perform_all(
        [calls.read_run(app.queue(home), run, ["state", "def"]) for home, run in places]
    )
    runs = dict(zip(places, replies, strict=True))
    found: set[str] = set()
    for member, job in members.values():
        home = member.home or job.queue
        run = runs[home, member.run]
        if run.get("state") != b"live" and not await _outlasts_run(app, redis, home, member, job, run):
            found.add(job.id)
    return frozenset(found)


async def _outlasts_run(
    app: "Application",
    redis: AsyncDriver,
    home: str,
    member: MemberId,
    job: DeadJob,
    run: Mapping[str, bytes],
) -> bool:
    """Return whether a job is no step of its run, by the plan; by the code, where that is gone."""
    node = await read_node(redis, app.queue(home), run, member.node)
    if node is not None:
        return is_hidden_job(node)
    undoing = [task.send_options.undo for task in app.tasks.values()]
    return any(undo is not None and undo.name == job.task for undo in undoing)
