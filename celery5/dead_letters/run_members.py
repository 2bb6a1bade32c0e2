"""Which dead jobs belong to a run of a workflow that does not wait for them: it has ended, or has sent others."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from celery5.broker.calls import workflows as calls
from celery5.broker.driver import AsyncDriver
from celery5.protocol.job.dead_letters import DeadJob
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id
from celery5.workflows import graph
from celery5.workflows.member_lists import read_generation
from celery5.workflows.on_failure import read_on_failure

if TYPE_CHECKING:
    from celery5.application import Application


async def find_unwanted_jobs(
    app: "Application", redis: AsyncDriver, jobs: Sequence[DeadJob]
) -> Mapping[str, str]:
    """Return by id why jobs of runs are not replayed: `run-ended`, `run-succeeded` or `run-retried`.

    When the run has ended, no step would follow them, and nothing would undo them. When it was retried, another job
    does their step.

    An `undo` or `on_failure` job is none of them: it is needed most when its run has ended.
    """
    members = {job.id: (member, job) for job in jobs if (member := parse_member_id(job.id)) is not None}
    fields: dict[tuple[str, str], set[str]] = {}
    for member, job in members.values():
        wanted = fields.setdefault((member.home or job.queue, member.run), {"state", "def"})
        wanted.add(f"node:{member.node}")
    read = [calls.read_run(app.queue(home), run, sorted(names)) for (home, run), names in fields.items()]
    runs = dict(zip(fields, await redis.perform_all(read), strict=True))
    found: dict[str, str] = {}
    for member, job in members.values():
        home = member.home or job.queue
        run = runs[home, member.run]
        reason = _find_reason(member, run)
        if reason and not await _outlasts_run(app, redis, home, member, job, run):
            found[job.id] = reason
    return found


def _find_reason(member: MemberId, run: Mapping[str, bytes]) -> str:
    """Return why a run does not wait for one of its steps; '' if it does."""
    if run.get("state") != b"live":
        return "run-succeeded" if run.get("state") == b"success" else "run-ended"
    current = read_generation(run.get(f"node:{member.node}", b""))
    return "run-retried" if member.generation < current else ""


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
