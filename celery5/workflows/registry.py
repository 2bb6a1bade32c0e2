"""The workflows of an application: `app.workflows` starts runs, finds them, and moves them on."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec

from celery5.broker.call import Call
from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import workflows as calls
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import Misconfigured, StagingLost
from celery5.logs.trace import get_current_trace
from celery5.middleware.middleware import ObservedApplication
from celery5.protocol.job.job import Job, derive_job_id, new_id
from celery5.protocol.job.messages import TRACEPARENT, add_headers, read_headers
from celery5.protocol.shards import choose_number
from celery5.protocol.workflows.member_ids import check_run_id
from celery5.protocol.workflows.plan import DEFAULT_LIFE, OnError, check_on_error, check_on_failure
from celery5.protocol.workflows.status import RunStatus, make_status
from celery5.runners.context import CurrentJob
from celery5.workflows.compiler import Compiled, compile_workflow
from celery5.workflows.compose import Workflow, check_workflow
from celery5.workflows.declared import DeclaredWorkflow
from celery5.workflows.event_waits import EventWaits
from celery5.workflows.graph import is_hidden_job, read_node, scan_all
from celery5.workflows.member_lists import find_missing_jobs, list_members, list_replaced, read_generation
from celery5.workflows.repeated_calls import RepeatedCalls
from celery5.workflows.result_types import RunResultType
from celery5.workflows.run import STATUS_FIELDS, WorkflowRun
from celery5.workflows.staging import NewRun, PublishedPlans, stage
from celery5.workflows.tree import get_first_call

R = TypeVar("R")

MAX_PUSHES = 40
"""Calls with which a producer fills the queue after the start; workers do the rest."""

REVOKED_AT_ONCE = 100
"""Jobs of a run that are revoked in one call: each leaves a document, so more would block Redis for milliseconds."""
PURGED_AT_ONCE = 100
"""Jobs that are looked for among the dead letters, and purged, in one call."""
MISSING_FOR = 30.0
"""Seconds after which a job that is still missing is lost."""


class Workflows:
    """Starts runs of workflows, and finds them again."""

    REACHED_AS = "app.workflows."

    def __init__(self, app: ObservedApplication) -> None:
        self._app = app
        self._known_queues: set[str] = set()
        self._declared: dict[str, DeclaredWorkflow[..., Any]] = {}
        self._waits = EventWaits(app)
        self._published = PublishedPlans()
        self._calls = RepeatedCalls()

    async def astart(
        self,
        workflow: Workflow[R],
        *,
        id: str | None = None,  # noqa: A002
        deadline: float | None = None,
        on_error: OnError | None = None,
        on_failure: Any = None,
    ) -> WorkflowRun[R]:
        """Start a run.

        Args:
            workflow: What is composed of `task.s(...)`.
            id: The id of the run: the same id is the same run. Default: a new one. `is_new` of the handle is True for
                one of those who start it, also when that one lost the reply and started it again, in the same process.
            deadline: Seconds until the run expires; default 30 days.
            on_error: What becomes of the run when a node fails that does not say it.
            on_failure: The task, or the call of one, that is called once with a list of `StepFailure` when the run has
                failed or expired.

        Raises:
            Misconfigured: It cannot be a workflow.
            BadArguments: An argument does not fit its task.
            BrokerUnavailable: Redis cannot be reached. Nothing runs, or all of it does.
        """
        check_on_error(on_error, "start")
        check_on_failure(on_failure, "start")
        tree = check_workflow(workflow).tree
        life = DEFAULT_LIFE if deadline is None else deadline
        first = get_first_call(tree)

        new_run = NewRun(
            run_id=new_id() if id is None else check_run_id(id),
            name=describe_tree(tree),
            life=check_life(life),
            trace=get_current_trace() or "",
        )
        shard = choose_number(self._app.brokers.shards, new_run.run_id)

        def compile_at(home: str | None) -> Compiled:
            home = home or (None if first else self._app.settings.default_queue)
            return compile_workflow(tree, on_error=on_error, home=home, on_failure=on_failure, shard=shard)

        redis = await self._app.connections.get_async_driver()
        compiled = compile_at(None)
        with self._calls.token_for(id) if id is not None else nullcontext() as token:
            if token is not None:
                new_run = msgspec.structs.replace(new_run, caller=token.text)
                home = await redis.perform(
                    calls.claim_home(self._app.keys, new_run.run_id, compiled.plan.home)
                )
                compiled = compiled if home == compiled.plan.home else compile_at(home)
            is_new = await self.launch(redis, compiled, new_run)
        # With "continue" its last step gives an Outcome, and so may each that is in its value.
        result_type = RunResultType() if on_error == "continue" else RunResultType(tree)
        return WorkflowRun(
            self._app, new_run.run_id, home=compiled.plan.home, type=result_type, is_new=is_new
        )

    @blocking(astart)
    def start(self) -> None: ...

    def declare(self, function: Any, **options: Any) -> "DeclaredWorkflow[..., Any]":
        """Declare a workflow: `@app.workflow`. Raises Misconfigured."""
        own = {
            name: options.pop(name)
            for name in ("name", "deadline", "on_error", "on_failure")
            if name in options
        }
        if own.get("deadline") is not None:
            check_life(own["deadline"])
        declared = DeclaredWorkflow[..., Any](function, self._app, **own)
        if declared.name in self._declared:
            raise Misconfigured(
                f"two workflows are named {declared.name!r}: give one @app.workflow(name=...)"
            )
        self._declared[declared.name] = declared
        declared.task = _make_launcher(declared, self._app, options)
        return declared

    @property
    def declared(self) -> "Mapping[str, DeclaredWorkflow[..., Any]]":
        """The declared workflows, by name."""
        return self._declared

    def resolve(self) -> None:
        """Run the functions of all declared workflows, so that their mistakes show at once. Raises Misconfigured."""
        for declared in self._declared.values():
            _ = declared.compiled

    def check_event(self, event: Any, where: Mapping[str, Any]) -> str:
        """Return the name of an event that a workflow waits for. Raises Misconfigured."""
        return self._waits.check(event, where)

    async def astart_declared(
        self, declared: "DeclaredWorkflow[..., R]", args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> WorkflowRun[R]:
        """Start a run of a declared workflow."""
        life = DEFAULT_LIFE if declared.deadline is None else check_life(declared.deadline)
        new_run = NewRun(
            run_id=new_id() if declared.id is None else check_run_id(declared.id),
            name=declared.name,
            life=life,
            trace=get_current_trace() or "",
            inputs=declared.encode_inputs(args, kwargs),
        )
        redis = await self._app.connections.get_async_driver()
        compiled = declared.compile_on(choose_number(self._app.brokers.shards, new_run.run_id))
        home = compiled.plan.home
        with self._calls.token_for(declared.id) if declared.id is not None else nullcontext() as token:
            if token is not None:
                new_run = msgspec.structs.replace(new_run, caller=token.text)
                claimed = await redis.perform(calls.claim_home(self._app.keys, new_run.run_id, home))
                if claimed != home:  # the code has changed since: the run that there is stays as it is
                    return WorkflowRun(
                        self._app, new_run.run_id, home=claimed, type=_type_of(declared), is_new=False
                    )
            await self._waits.prepare(redis, compiled.plan, new_run)
            is_new = await self.launch(redis, compiled, new_run)
        return WorkflowRun(self._app, new_run.run_id, home=home, type=_type_of(declared), is_new=is_new)

    @blocking(astart_declared)
    def start_declared(self) -> None: ...

    async def launch(self, redis: AsyncDriver, compiled: Compiled, new_run: NewRun) -> bool:
        """Publish a run and start it. Returns whether this call has started it, also when an earlier try of it has.

        Raises:
            StagingLost: Redis lost what was published before the start.
        """
        if not self._app.middleware.sends:
            return await self._launch(redis, compiled, new_run)
        message = add_headers(b"{}", {TRACEPARENT: new_run.trace})
        run = Job(new_run.run_id, new_run.name, compiled.plan.home, message)
        with self._app.middleware.sending([run], is_run=True) as (with_headers,):
            headers = read_headers(with_headers.message)
            trace = headers.pop(TRACEPARENT, "")
            return await self._launch(
                redis, compiled, msgspec.structs.replace(new_run, trace=trace, headers=headers)
            )

    async def _launch(self, redis: AsyncDriver, compiled: Compiled, new_run: NewRun) -> bool:
        home = compiled.plan.home
        keys = self._app.queue(home)
        if home not in self._known_queues:
            await redis.perform(queue_calls.register_queue(self._app.keys, home))
            self._known_queues.add(home)
        try:
            reply = await self._stage_and_start(redis, keys, compiled, new_run)
        except StagingLost:
            self._published.forget()
            if not all(source.is_repeatable for source in compiled.sources):
                raise
            reply = await self._stage_and_start(redis, keys, compiled, new_run)
        if reply is None:
            return await self._has_started(redis, keys, new_run)
        started = int(reply.replies[0])
        ttl, pushes = self._app.settings.results_ttl, 0
        while reply.left and pushes < MAX_PUSHES:
            reply = await redis.perform(calls.advance(keys, ttl=ttl))
            pushes += 1
        return started == 1 or not new_run.caller

    async def _has_started(self, redis: AsyncDriver, keys: QueueKeys, new_run: NewRun) -> bool:
        """Return whether it was this call that has started a run that is there."""
        if not new_run.caller:  # its id was made for this call
            return True
        run = await redis.perform(calls.read_run(keys, new_run.run_id, ["caller"]))
        return run.get("caller", b"").decode(errors="replace") == new_run.caller

    async def _stage_and_start(
        self, redis: AsyncDriver, keys: QueueKeys, compiled: Compiled, new_run: NewRun
    ) -> calls.Advance | None:
        """Publish what a run needs, and start it; None when a run of the id is there already. Raises StagingLost."""
        published = None if compiled.sources else self._published
        record = await stage(redis, keys, compiled, new_run, published)
        if record is None:
            return None
        ttl = self._app.settings.results_ttl
        start: list[Call[Any]] = [calls.advance(keys, [record], ttl=ttl)]
        if new_run.caller:  # in the same write, so that a producer that dies does both or neither
            start.append(
                calls.keep_home(self._app.keys, new_run.run_id, keys.queue, life=new_run.life + 2 * ttl)
            )
        reply: calls.Advance = (await redis.perform_all(start))[0]
        if int(reply.replies[0]) < 0:
            raise StagingLost(f"run {new_run.run_id} was lost before it was started: start it again")
        return reply

    async def afind(self, run_id: str) -> WorkflowRun[Any] | None:
        """Return the handle of a run; None when Redis has nothing on it."""
        redis = await self._app.connections.get_async_driver()
        home = await redis.perform(calls.find_home(self._app.keys, run_id))
        queues = [home] if home else await redis.perform(queue_calls.list_queues(self._app.keys))
        for queue in queues:
            if await redis.perform(calls.read_run(self._app.queue(queue), run_id, ["state"])):
                return WorkflowRun(self._app, run_id, home=queue, is_new=False)
        return None

    @blocking(afind)
    def find(self) -> None: ...

    async def alist_runs(self, *, limit: int = 100, live_only: bool = False) -> "list[RunStatus]":
        """Return the status of live runs, and of those that have ended lately, the newest first.

        Runs that are a part of another one, in the place of a job, are not among them.

        Args:
            limit: Runs at most. Of more live ones, those that are due next.
            live_only: Leave out those that have ended.
        """
        redis = await self._app.connections.get_async_driver()
        found: dict[tuple[str, str], None] = {}
        for queue in await redis.perform(queue_calls.list_queues(self._app.keys)):
            keys = self._app.queue(queue)
            ids = await redis.perform(calls.list_live_runs(keys, count=limit))
            if not live_only:
                ids += await redis.perform(calls.list_past_runs(keys, count=limit))
            found |= {(queue, run_id): None for run_id in ids}
        chosen = sorted(found)[: 10 * limit]
        read = [calls.read_run(self._app.queue(queue), run_id, STATUS_FIELDS) for queue, run_id in chosen]
        replies = await redis.perform_all(read) if read else []
        statuses = [
            make_status(run_id, queue, fields)
            for (queue, run_id), fields in zip(chosen, replies, strict=True)
            if fields
        ]
        return sorted(statuses, key=lambda status: status.created, reverse=True)[:limit]

    @blocking(alist_runs)
    def list_runs(self) -> None: ...

    # what workers call

    async def apply(self, home: str, records: Sequence[bytes]) -> list[calls.FailedRun]:
        """Apply records at another queue, from Trio. Return the runs that have failed there."""
        redis = await self._app.connections.get_async_driver()
        keys = self._app.queue(home)
        ttl = self._app.settings.results_ttl
        reply = await redis.perform(calls.advance(keys, records, ttl=ttl))
        failed = list(reply.failed)
        while reply.left:
            reply = await redis.perform(calls.advance(keys, ttl=ttl))
            failed += reply.failed
        return failed

    async def watch(self, home: str, run_id: str, node: int, *, life: float) -> None:
        """Enter in the index of an event, for `life` seconds, what a node waits for, from Trio."""
        await self._waits.watch(home, run_id, node, life=life)

    async def unwatch(self, home: str, run_id: str) -> None:
        """Remove from the indexes of events what a run has waited for, from Trio."""
        await self._waits.unwatch(home, run_id)

    async def revoke_members(self, home: str, fields: Mapping[str, bytes]) -> list[calls.FailedRun]:
        """Revoke the jobs of a run that are on their queues or run, from Trio. Return the runs that have failed then.

        Args:
            home: The queue where the run lives.
            fields: `revoke` is its id; `from` and `to` limit that to some nodes. `retries` is how often the run had
                been retried by then: what a later retry has begun is left alone.
        """
        redis = await self._app.connections.get_async_driver()
        keys = self._app.queue(home)
        run_id = fields["revoke"].decode()
        run = await scan_all(redis, partial(calls.scan_run, keys, run_id))
        if "def" not in run or run.get("retries", b"0") != fields.get("retries", b"0"):
            return []
        failed: list[calls.FailedRun] = []
        # What was held when the run stopped may have been replayed by then.
        begun = (b"active", b"ending") if run.get("state") == b"live" else (b"active", b"ending", b"held")
        first, last = int(fields.get("from", b"0")), int(fields.get("to", b"1000000000"))
        numbers = [
            int(name[5:])
            for name, state in run.items()
            if name.startswith("node:") and state.split(b" ")[0] in begun and first <= int(name[5:]) < last
        ]
        by_queue: dict[str, list[str]] = {}
        held: set[str] = set()
        for number in numbers:
            if f"run:{number}" in run:  # its job has ended, and the run cancels what that has returned
                continue
            node = await read_node(redis, keys, run, number)
            if node is None or is_hidden_job(node):
                continue
            members = await list_members(redis, keys, run_id, number, run, node)
            by_queue.setdefault(members.queue, []).extend((*members.ids, *members.held))
            held.update(members.held)
        for queue, ids in by_queue.items():
            for start in range(0, len(ids), REVOKED_AT_ONCE):
                states = await self.revoke_jobs(queue, ids[start : start + REVOKED_AT_ONCE])
                # Those of another queue tell it by the outbox of that, which perhaps no worker reads.
                ended = [job_id for job_id, state in states.items() if state == "REVOKED" and "@" in job_id]
                records = [calls.pack_record("end", job_id, "REVOKED", "") for job_id in ended]
                records += [
                    calls.pack_record("end", job_id, "HELD", "")
                    for job_id in held & states.keys()
                    if states[job_id] in ("DEAD", "UNKNOWN")  # else it ends, or its end is on the way
                ]
                failed += await self.apply(home, records)
        return failed + await self.apply(home, [])

    async def remove_replaced(self, home: str, run_id: str) -> None:
        """Remove the dead letters of jobs that a retry of their run has replaced, from Trio.

        One that was replayed meanwhile is not dead, and stays.
        """
        redis, keys = await self._app.connections.get_async_driver(), self._app.queue(home)
        run = await scan_all(redis, partial(calls.scan_run, keys, run_id))
        for name, state in run.items():
            if not name.startswith("node:") or read_generation(state) == 0:
                continue
            node = await read_node(redis, keys, run, int(name[5:]))
            if node is None or node["k"] not in ("job", "map") or is_hidden_job(node):
                continue
            queue, ids, _ = list_replaced(keys, run_id, int(name[5:]), run, node)
            for start in range(0, len(ids), PURGED_AT_ONCE):
                await self._purge(redis, self._app.queue(queue), ids[start : start + PURGED_AT_ONCE])

    async def _purge(self, redis: AsyncDriver, keys: QueueKeys, ids: Sequence[str]) -> None:
        """Purge those of these jobs that are dead."""
        entries = await redis.perform(dead_letter_calls.find_entries(keys, ids))
        dead = [(entry, job_id) for entry, job_id in zip(entries, ids, strict=True) if entry]
        if dead:
            await redis.perform(dead_letter_calls.purge_jobs(keys, dead))

    async def find_lost(self, home: str, run_id: str) -> list[calls.FailedRun]:
        """End the jobs of a run that stops which Redis has lost, from Trio: else it would wait for them for ever.

        Return the runs that have failed then.
        """
        redis, failed = await self._app.connections.get_async_driver(), list[calls.FailedRun]()
        for run, missing in (await find_missing_jobs(self._app, redis, home, run_id)).items():
            record = calls.pack_record("lost", run, missing, int(MISSING_FOR * 1000))
            failed += await self.apply(home, [record])
        return failed

    async def revoke_jobs(self, queue: str, ids: Sequence[str]) -> dict[str, str]:
        """Revoke jobs of a queue, from Trio, REVOKED_AT_ONCE at most. Return the state of each: see `revoke.lua`."""
        redis = await self._app.connections.get_async_driver()
        revoke = jobs_calls.revoke(self._app.queue(queue), ids, ttl=self._app.settings.results_ttl)
        return dict(zip(ids, await redis.perform(revoke), strict=True))


def _type_of(declared: "DeclaredWorkflow[..., Any]") -> RunResultType:
    return RunResultType() if declared.on_error == "continue" else RunResultType(task=declared)


def check_life(life: object) -> float:
    """Return the seconds until a run expires. Raises Misconfigured."""
    if isinstance(life, bool) or not isinstance(life, int | float) or not 0 < life <= 10 * 365 * 86400:
        raise Misconfigured(f"deadline is {life!r}: give seconds, more than 0 and at most ten years")
    return float(life)


def describe_tree(tree: Any) -> str:
    """Return a name for a composed workflow: that of its first task."""
    first = get_first_call(tree)
    return "" if first is None else str(first.task.name)


def _make_launcher(declared: DeclaredWorkflow[..., Any], app: Any, options: dict[str, Any]) -> Any:
    """Return the task whose jobs start a run each. Its id follows from the job's, so a job that runs twice starts one.

    Args:
        options: Options of a task: `schedule`, `source`, `queue` and so on.
    """

    async def launch(job: CurrentJob, /, *args: Any, **kwargs: Any) -> str:
        run = await declared.options(id=derive_job_id("run", job.id)).astart(*args, **kwargs)
        return str(run.id)

    own = inspect.Parameter("job", inspect.Parameter.POSITIONAL_ONLY, annotation=CurrentJob)
    parameters = [own, *declared.parameters.signature.parameters.values()]
    vars(launch)["__signature__"] = inspect.Signature(parameters)
    annotations = dict(declared.function.__annotations__)
    launch.__annotations__ = {
        name: annotation
        for name, annotation in annotations.items()
        if name in declared.parameters.signature.parameters
    }
    launch.__doc__ = declared.function.__doc__
    launch.__module__, launch.__qualname__ = declared.function.__module__, declared.function.__qualname__
    launch.__name__ = declared.function.__name__
    return app.task(bind=True, name=declared.name, **options)(launch)
