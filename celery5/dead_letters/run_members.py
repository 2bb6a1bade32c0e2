"""Which dead jobs belong to a run of a workflow that has ended: nobody waits for those."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from celery5.broker.calls import workflows as calls
from celery5.broker.driver import AsyncDriver
from celery5.protocol.job.dead_letters import DeadJob
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id
from celery5.workflows import graph
from celery5.workflows.on_failure import read_on_failure

if TYPE_CHECKING:
    from celery5.application import Application


async def find_jobs_of_ended_runs(
    app: "Application", redis: AsyncDriver, jobs: Sequence[DeadJob]
) -> Mapping[str, str]:
    """Return by id why jobs whose run has ended are not replayed: `run-ended` or `run-succeeded`.

    No step would follow them, and nothing would undo them.

    An `undo` or `on_failure` job is none of them: it is needed most when its run has ended.
    """
    members = {job.id: (member, job) for job in jobs if (member := parse_member_id(job.id)) is not None}
    homes = {(member.home or job.queue, member.run) for member, job in members.values()}
    places = sorted(homes)
    replies = await redis.perform_all(
        [calls.read_run(app.queue(home), run, ["state", "def"]) for home, run in places]
    )
    runs = dict(zip(places, replies, strict=True))
    found: dict[str, str] = {}
    for member, job in members.values():
        home = member.home or job.queue
        run = runs[home, member.run]
        if run.get("state") != b"live" and not await _outlasts_run(app, redis, home, member, job, run):
            found[job.id] = "run-succeeded" if run.get("state") == b"success" else "run-ended"
    return found


async def _outlasts_run(
    app: "Application",
    redis: AsyncDriver,
    home: str,
    member: MemberId,
    job: DeadJob,
    run: Mapping[str, bytes],
) -> bool:
    """Return whether a job is no step of its run, by the plan; by the code, where that is gone."""
    node = await graph.read_node(redis, app.queue(home), run, member.node)
    if node is not None:
        return graph.is_hidden_job(node)
    return job.task in _find_hidden_tasks(app)


def _find_hidden_tasks(app: "Application") -> set[str]:
    """Return the names of the tasks that the code names as `undo` or `on_failure` of a task."""
    found: set[str] = set()
    for task in app.tasks.values():
        if (undo := task.send_options.undo) is not None:
            found.add(undo.name)
        if (on_failure := task.send_options.on_failure) is not None:
            found.add(read_on_failure(on_failure).task.name)
    return found
