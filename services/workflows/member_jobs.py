"""Run the jobs of workflows whose message does not have all that they need.

A member's message has its arguments, as any job's has. Only where they are too many, or lie deep in other results, the
worker reads them when the job runs. It also makes a map of a result, runs the items of a chunk, and publishes the
workflow that a dynamic job returns.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_origin

import msgspec
from msgspec import Raw

from celery5.app import App
from celery5.broker.calls import workflows as calls
from celery5.broker.keys import QueueKeys
from celery5.broker.transient_errors import is_outage
from celery5.errors import BadArguments, BrokerError, CeleryError, Misconfigured, ResultLost
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.job import derive_job_id
from celery5.protocol.job.messages import Command, Failure
from celery5.protocol.job.verdict import BrokerLost, Outcome, PermanentFailure, Raised, Reason, Returned
from celery5.protocol.shards import get_shard_number
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id
from celery5.protocol.workflows.plan import DEFAULT_LIFE, Expression, Known, Ref
from celery5.runners.outcome import get_error_outcome
from celery5.runners.running_job import Runner, RunningJob
from celery5.tasks.task import Task
from celery5.workflows import compiler, staging
from celery5.workflows import results as paged_results
from celery5.workflows import values as run_values
from celery5.workflows.compose import Composed, check_workflow
from celery5.workflows.tree import Map, Tree

_RAW_LIST = msgspec.json.Decoder(list[Raw])


class MemberJobs:
    """Prepares jobs of workflows, and publishes the workflows that they return."""

    def __init__(self, *, app: App) -> None:
        self._app = app

    async def run_member(
        self,
        delivery: Delivery,
        command: Command,
        member: MemberId,
        task: Task[..., Any],
        runner: Runner,
        running_job: RunningJob,
    ) -> Outcome:
        """Run one member of a workflow whose message says how, or that may return a workflow."""
        try:
            if command.flow == compiler.EXPAND:
                return await self._expand(delivery, command, member, task)
            raw_args, raw_kwargs = await self._read_arguments(delivery, command, member, task)
            if command.flow == compiler.CHUNK:
                return await self._run_chunk(raw_args, task, runner, running_job)
            args, kwargs = task.parameters.decode(raw_args, raw_kwargs)
            paged_results.set_app((*args, *kwargs.values()), self._app)
        except BadArguments as error:
            return PermanentFailure(Reason.BAD_ARGUMENTS, Failure(type="BadArguments", message=str(error)))
        except ResultLost as error:
            return PermanentFailure(Reason.BAD_ARGUMENTS, Failure(type="ResultLost", message=str(error)))
        except Misconfigured as error:
            return PermanentFailure(
                Reason.UNENCODABLE_RESULT, Failure(type="Misconfigured", message=str(error))
            )
        except (BrokerError, CeleryError) as error:
            return _make_own_outcome(error)
        return await self._run_function(delivery, command, member, task, runner, running_job, args, kwargs)

    async def _run_function(
        self,
        delivery: Delivery,
        command: Command,
        member: MemberId,
        task: Task[..., Any],
        runner: Runner,
        running_job: RunningJob,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Outcome:
        returned: list[Composed] = []
        function = _catch_workflow(task.function, returned) if task.send_options.dynamic else task.function
        outcome = await runner.execute(function, args, kwargs, running_job)
        if not returned or type(outcome) is not Returned:
            return outcome
        try:
            await self._publish(delivery, command, member, check_workflow(returned[0]).tree)
        except Misconfigured as error:
            return PermanentFailure(
                Reason.UNENCODABLE_RESULT, Failure(type="Misconfigured", message=str(error))
            )
        except Exception as error:
            return _make_own_outcome(error)
        return outcome

    def _keys(self, delivery: Delivery, member: MemberId) -> QueueKeys:
        return self._app.queue(member.home or delivery.queue)

    async def _read_arguments(
        self, delivery: Delivery, command: Command, member: MemberId, task: Task[..., Any]
    ) -> tuple[Raw, Raw]:
        """Return the arguments of a job: those of its message, or those that its plan names."""
        if command.flow in ("", compiler.CHUNK):
            return command.args, command.kwargs
        redis = await self._app.connections.get_async_driver()
        values = run_values.RunValues(redis, self._keys(delivery, member))
        arguments = (await values.read_node(member.run, member.node))["a"]
        names = list(arguments.get("kwargs", {}))
        expressions = [run_values.read_expression(plain) for plain in arguments["args"]]
        expressions += [run_values.read_expression(arguments["kwargs"][name]) for name in names]
        for at, parameter in enumerate((*range(len(arguments["args"])), *names)):
            expressions[at] = await _make_paged(values, member.run, expressions[at], task, parameter)
        made = await values.make_all(member.run, expressions)
        count = len(arguments["args"])
        pairs = zip(names, made[count:], strict=True)
        fields = [msgspec.json.encode(name) + b":" + value for name, value in pairs]
        return Raw(b"[" + b",".join(made[:count]) + b"]"), Raw(b"{" + b",".join(fields) + b"}")

    async def _run_chunk(
        self, raw_args: Raw, task: Task[..., Any], runner: Runner, running_job: RunningJob
    ) -> Outcome:
        """Run the function for each item, one after another; the result is the list of the results."""
        results: list[bytes] = []
        for raw in _RAW_LIST.decode(raw_args):
            args, kwargs = task.parameters.decode(raw, Raw(b"{}"))
            outcome = await runner.execute(task.function, args, kwargs, running_job)
            if type(outcome) is not Returned:
                return outcome
            results.append(outcome.value)
        return Returned(b"[" + b",".join(results) + b"]")

    async def _expand(
        self, delivery: Delivery, command: Command, member: MemberId, task: Task[..., Any]
    ) -> Outcome:
        """Publish the items of a map, which are a value of the run."""
        redis = await self._app.connections.get_async_driver()
        keys = self._keys(delivery, member)
        values = run_values.RunValues(redis, keys)
        node = await values.read_node(member.run, member.node)
        (raw,) = await values.make_all(member.run, [run_values.read_expression(node["a"]["args"][0])])
        try:
            items = _RAW_LIST.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            shown = raw[:80].decode(errors="replace")
            raise BadArguments(
                f"{task.name}.map() takes a list from the step before it, got {shown}"
            ) from None
        mapped = Map(task=task, items=items, star=bool(node.get("star")), chunk=node.get("chunk"))
        source = compiler.MapSource(member.node, mapped, bool(node.get("keyed")))
        # None when the run takes them no more: the settlement of this job says so, too.
        count = await staging.stage_items(redis, keys, source, member.run, generation=member.generation)
        delivery.set_workflow(calls.pack_record("items", count or 0))
        return Returned(b"null")

    async def _publish(self, delivery: Delivery, command: Command, member: MemberId, tree: Tree) -> None:
        """Publish a workflow beside the run. The settlement of this delivery makes it live, and nothing else does.

        Raises:
            Misconfigured: It cannot be a workflow, or is inside too many others.
        """
        keys = self._keys(delivery, member)
        redis = await self._app.connections.get_async_driver()
        depth = await redis.perform(calls.read_run(keys, member.run, ["depth"]))
        limit = self._app.settings.workflow_nesting_limit
        if int(depth.get("depth", b"0")) >= limit:
            raise Misconfigured(
                f"task {command.task} has returned a workflow inside {limit} others, as many as the setting "
                "workflow_nesting_limit allows: does it return itself without end?"
            )
        # What holds at its failures is a job, whose dead letter can be replayed: a workflow has none.
        policy = (await run_values.RunValues(redis, keys).read_node(member.run, member.node)).get("o")
        compiled = compiler.compile_workflow(
            tree,
            on_error="hold" if policy == "hold" else None,
            home=keys.queue,
            shard=get_shard_number(keys.queue),
        )
        run_id = derive_job_id(member.frame, delivery.queue, delivery.entry.decode())
        # Its deadline is that of the run that it is a part of: `advance.lua` sees to that.
        new_run = staging.NewRun(
            run_id=run_id,
            name=command.task,
            life=DEFAULT_LIFE,
            trace=command.trace,
            headers=command.headers,
        )
        record = await staging.stage(redis, keys, compiled, new_run)
        if record is None:
            raise CeleryError(f"run {run_id} is live already")
        delivery.set_workflow(record)


def _make_own_outcome(error: Exception) -> Outcome:
    """Return the outcome of a job for which the worker itself could not read or write.

    While Redis takes no writes the job is postponed, as while Redis is unreachable: no code of the user has failed.
    """
    outcome = get_error_outcome(error)
    if type(outcome) is Raised and is_outage(error):
        return BrokerLost(outcome.failure, outcome, is_refused=True)
    return outcome


async def _make_paged(
    values: "run_values.RunValues",
    run_id: str,
    expression: Expression,
    task: Task[..., Any],
    parameter: int | str,
) -> Expression:
    """Return where the results of a map are, for a parameter that reads them in pages; else the expression itself."""
    kind = task.parameters.get_type(parameter)
    is_paged = (get_origin(kind) or kind) is paged_results.Results and task.box is None
    if not is_paged or not isinstance(expression, Ref) or expression.path:
        return expression
    location = await values.locate_map(run_id, expression.node)
    return expression if location is None else Known(msgspec.json.encode({paged_results.REFERENCE: location}))


def _catch_workflow(function: Callable[..., Any], returned: list[Composed]) -> Callable[..., Any]:
    """Return a function that keeps a workflow that `function` returns, and returns None then."""

    def keep(result: Any) -> Any:
        if not isinstance(result, Composed):
            return result
        returned.append(result)
        return None

    async def wait(*args: Any, **kwargs: Any) -> Any:
        return keep(await function(*args, **kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        return keep(function(*args, **kwargs))

    return wait if inspect.iscoroutinefunction(function) else call


def needs_preparing(command: Command, task: Task[..., Any]) -> MemberId | None:
    """Return the parts of the id of a member that `MemberJobs` runs; None for any other job."""
    if not command.flow and not task.send_options.dynamic:
        return None
    return parse_member_id(command.id)
