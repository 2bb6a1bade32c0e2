"""Declare workflows as functions: `@app.workflow` runs the function once, and keeps the graph that it describes.

The function gets a `Flow` and values that are not known yet. It runs where the workflow is declared, never in a worker.
So the graph is fixed before the first run, and runs keep the graph that they began with when the code changes.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

from msgspec import Raw

from celery5.broker.colour import blocking
from celery5.errors import Misconfigured
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.job.arguments import Parameters, ResultType, encode_value
from celery5.protocol.names import get_module_name
from celery5.protocol.workflows.plan import (
    Expression,
    Fields,
    Items,
    Known,
    Node,
    OnError,
    Ref,
    check_on_error,
    check_on_failure,
    encode_expression,
)
from celery5.workflows.compiler import Compiled, Compiler, NodeTask, Placeholder
from celery5.workflows.compose import Workflow, check_need, check_workflow
from celery5.workflows.run import WorkflowRun
from celery5.workflows.tree import GroupOptions, Map

if TYPE_CHECKING:
    from celery5.results.async_result import AsyncResult

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class StepTask(NodeTask, Protocol[P, R_co]):
    """A task, as a step of a declared workflow: with the types of its arguments and of its result."""

    async def adelay(self, /, *args: P.args, **kwargs: P.kwargs) -> "AsyncResult[R_co]":
        """Send a job and return its handle."""
        ...


_PACKAGE = str(Path(__file__).parent.parent)
MAX_STEPS = 10_000
"""The most steps of a declared workflow: a loop without an end would make ever more."""


def _get_caller_line() -> str:
    """Return where the code of the user is that called into this package."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


class LaterValue:
    """A value of a run that is not known yet: an argument, or the result of a step.

    Its attributes and items are such values, too. Whatever asks for the value itself raises, with the line that did it.
    """

    _ref: Any
    _what: str

    def __init__(self, ref: Ref, what: str) -> None:
        object.__setattr__(self, "_ref", ref)
        object.__setattr__(self, "_what", what)

    def __getattr__(self, name: str) -> "LaterValue":
        if name.startswith("__"):
            raise AttributeError(name)
        return LaterValue(Ref(self._ref.node, (*self._ref.path, name)), f"{self._what}.{name}")

    def __getitem__(self, key: str | int) -> "LaterValue":
        if not is_path_step(key):
            self._refuse("a slice of it is used")
        return LaterValue(Ref(self._ref.node, (*self._ref.path, key)), f"{self._what}[{key!r}]")

    def __repr__(self) -> str:
        return f"<{self._what}, which is known when the workflow runs>"

    def _refuse(self, why: str) -> NoReturn:
        raise Misconfigured(
            f"{self._what} is not known before the workflow runs, and {why} in {_get_caller_line()}: decide that in a "
            "task; one that is declared with dynamic=True may return what is to be done"
        )

    def __bool__(self) -> bool:
        self._refuse("it is used as a condition")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("it is iterated")

    def __len__(self) -> int:
        self._refuse("its length is used")

    def __eq__(self, other: object) -> bool:
        self._refuse("it is compared")

    def __hash__(self) -> int:
        self._refuse("it is used as a key")

    def __str__(self) -> str:
        self._refuse("it is made a text")

    def __format__(self, spec: str) -> str:
        self._refuse("it is made a text")

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse(f"its attribute {name!r} is set")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self._refuse("it is called")

    def _compute(self, *_others: object) -> Any:
        self._refuse("it is used in a computation")

    __lt__ = __le__ = __gt__ = __ge__ = _compute
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _compute
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __neg__ = __int__ = __float__ = __index__ = _compute
    __contains__ = _compute


def is_path_step(key: object) -> bool:
    """Return whether a key names a field or an item: no slice."""
    return isinstance(key, str | int) and not isinstance(key, bool)


def is_duration(seconds: object) -> bool:
    """Return whether a value is a number of seconds, at most ten years."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return False
    return 0 <= seconds <= 10 * 365 * 86400


def to_expression(value: Any) -> Expression | None:
    """Return how a value is made of values that are known later; None when there is none in it."""
    if isinstance(value, LaterValue):
        return cast("Expression", value._ref)  # pyright: ignore[reportPrivateUsage]
    if isinstance(value, list | tuple):
        found = [to_expression(item) for item in cast("Sequence[Any]", value)]
        if all(item is None for item in found):
            return None
        pairs = zip(cast("Sequence[Any]", value), found, strict=True)
        return Items(tuple(item or Known(encode_value(known)) for known, item in pairs))
    fields = _get_fields(value)
    if fields is None:
        return None
    made = {name: to_expression(field) for name, field in fields.items()}
    if all(item is None for item in made.values()):
        return None
    if (
        number := next((name for name in made if not isinstance(cast("object", name), str)), None)
    ) is not None:
        raise Misconfigured(f"a mapping with results of steps has the key {number!r}: its keys are text")
    return Fields({name: item or Known(encode_value(fields[name])) for name, item in made.items()})


def _get_fields(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


class Flow:
    """Describes the steps of a workflow. A step begins when the one before it in the code has ended.

    Inside `with flow.parallel():` steps begin together; what comes behind the block begins when all have ended.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._after: list[int] = []
        # In a parallel block: where its steps begin, and where they have ended.
        self._start: list[int] | None = None
        self._ends: list[int] = []

    def call(self, task: "StepTask[P, R]", /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a task. Returns its result, for other steps."""
        number = self._compiler.add_call(
            task,
            [_to_argument(value) for value in args],
            {name: _to_argument(value) for name, value in kwargs.items()},
            self._begin(),
        )
        self._end([number])
        return cast("R", LaterValue(Ref(number), f"the result of {task.name}"))

    def map(
        self,
        task: "StepTask[Concatenate[A, ...], R]",
        items: Iterable[A],
        *,
        at_once: int | None = None,
        need: float | None = None,
        on_error: OnError | None = None,
    ) -> list[R]:
        """Run a task for each item: see `Task.map`. Returns the list of the results, for other steps."""
        return cast("list[R]", self._map(task, items, False, at_once, need, on_error))

    def starmap(
        self,
        task: "StepTask[..., R]",
        items: Iterable[Iterable[Any]],
        *,
        at_once: int | None = None,
        need: float | None = None,
        on_error: OnError | None = None,
    ) -> list[R]:
        """Run a task for each item, which has all its arguments. Returns the list of the results, for other steps."""
        return cast("list[R]", self._map(task, items, True, at_once, need, on_error))

    def _map(
        self,
        task: "StepTask[..., Any]",
        items: Any,
        star: bool,
        at_once: int | None,
        need: float | None,
        on_error: OnError | None,
    ) -> LaterValue:
        check_on_error(on_error, f"{task.name}: map")
        options = GroupOptions(on_error=on_error, need=check_need(need, f"{task.name}: map"))
        value = to_expression(items)
        tree = Map(
            task=task,
            items=None if value is not None else list(items),
            star=star,
            at_once=at_once,
            options=options,
        )
        part = self._compiler.add_tree(tree, value, self._begin())
        self._end(part.ends)
        return LaterValue(cast("Ref", part.value), f"the results of {task.name}")

    def run(self, workflow: Workflow[R]) -> R:
        """Run a composed workflow: a chain, a group and so on. Returns its result, for other steps."""
        part = self._compiler.add_tree(check_workflow(workflow).tree, None, after := self._begin())
        self._end(part.ends or after)
        if isinstance(part.value, Ref):
            return cast("R", LaterValue(part.value, f"the result of {workflow!r}"))
        return cast("R", _ComposedValue(part.value, f"the result of {workflow!r}"))

    def sleep(self, seconds: float) -> None:
        """Wait a number of seconds. No worker waits."""
        if not is_duration(seconds):
            raise Misconfigured(f"flow.sleep: give seconds, at most ten years, not {seconds!r}")
        node = Node(kind="sleep", task=f"sleep {seconds:g} s", seconds=max(float(seconds), 0.001))
        self._end([self._compiler.add_node(node, self._begin())])

    @overload
    def wait_for(
        self, what: str, *, where: None = None, timeout: float | None = None, on_error: OnError | None = None
    ) -> Any: ...
    @overload
    def wait_for(
        self,
        what: type[R],
        *,
        where: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        on_error: OnError | None = None,
    ) -> R: ...
    def wait_for(
        self,
        what: Any,
        *,
        where: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        on_error: OnError | None = None,
    ) -> Any:
        """Wait for a signal, or for an event. No worker waits.

        Args:
            what: The name of a signal, which `run.signal(name, value)` gives; or the class of an event.
            where: Fields of the event and the values that they must have.
            timeout: Seconds after which the step fails. Without it the deadline of the run ends it.
            on_error: What becomes of the run then.

        Returns:
            The value of the signal, or the event, for other steps.
        """
        check_on_error(on_error, "flow.wait_for")
        if timeout is not None and (not is_duration(timeout) or timeout == 0):
            raise Misconfigured(
                f"flow.wait_for: timeout is {timeout!r}: give seconds, more than 0 and at most ten years"
            )
        number = len(self._compiler.nodes)
        node = Node(kind="wait", seconds=timeout)
        node.on_error = on_error or self._compiler.default_policy
        if isinstance(what, str):
            if not what or len(what) > 100 or where is not None:
                raise Misconfigured(
                    f"flow.wait_for({what!r}): a signal has a name of 1 to 100 characters and no where"
                )
            node.name, node.task = what, f"wait for {what}"
        else:
            self._wait_for_event(node, number, what, where)
        self._end([self._compiler.add_node(node, (*self._begin(), *_list_refs(node)))])
        return LaterValue(Ref(number), node.task)

    def _wait_for_event(self, node: Node, number: int, event: Any, where: Mapping[str, Any] | None) -> None:
        declaration = self._compiler.check_event(event, where or {})
        fields = {
            name: encode_expression(to_expression(value) or Known(encode_value(value)))
            for name, value in (where or {}).items()
        }
        node.name, node.task = f"event {number}", f"wait for {declaration}"
        node.where = {"event": declaration, "fields": fields}

    @contextmanager
    def parallel(self) -> Generator[None]:
        """Begin the steps of this block together."""
        outer_start, outer_ends = self._start, self._ends
        start = list(self._begin())
        self._start, self._ends = start, []
        try:
            yield
        finally:
            ends = self._ends or start
            self._start, self._ends = outer_start, outer_ends
            self._end(ends)

    @contextmanager
    def sequence(self) -> Generator[None]:
        """Inside a parallel block: begin the steps of this block one after another."""
        outer_start, outer_ends, outer_after = self._start, self._ends, self._after
        self._after, self._start = list(self._begin()), None
        try:
            yield
        finally:
            ends = self._after
            self._start, self._ends, self._after = outer_start, outer_ends, outer_after
            self._end(ends)

    def _begin(self) -> list[int]:
        if len(self._compiler.nodes) > MAX_STEPS:
            raise Misconfigured(f"a workflow has at most {MAX_STEPS} steps: map a task over many items")
        return self._after if self._start is None else self._start

    def _end(self, ends: Iterable[int]) -> None:
        if self._start is None:
            self._after = list(ends)
        else:
            self._ends.extend(ends)


class WorkflowOptions(TypedDict, total=False):
    """The options of `@app.workflow(...)`."""

    # Default: the module and the name of the function.
    name: str | None
    # Seconds until a run expires; default 30 days.
    deadline: float | None
    # What becomes of a run when a node fails that does not say it: `fail`, `continue`, `skip` or `hold`.
    on_error: OnError | None
    # The task, or the call of one, that is called once with a list of `StepFailure` when a run has failed or expired.
    on_failure: Any
    # Options of the task that starts runs: when, from which documents, on which queue.
    schedule: Any
    source: Any
    queue: str | None


class _ComposedValue(LaterValue):
    """The value of a composed workflow that is made of several results; it is passed on as a whole."""

    def __init__(self, expression: Expression, what: str) -> None:
        super().__init__(Ref(-1), what)
        object.__setattr__(self, "_ref", expression)

    def __getattr__(self, name: str) -> LaterValue:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"its attribute {name!r} is used")

    def __getitem__(self, key: str | int) -> LaterValue:
        if isinstance(self._ref, Items) and isinstance(key, int) and 0 <= key < len(self._ref.items):
            item = self._ref.items[key]
            name = f"{self._what}[{key}]"
            return LaterValue(item, name) if isinstance(item, Ref) else _ComposedValue(item, name)
        self._refuse("an item of it is used")


def _to_argument(value: Any) -> Any:
    expression = to_expression(value)
    return value if expression is None else Placeholder(expression)


def _list_refs(node: Node) -> list[int]:
    fields = (node.where or {}).get("fields", {})
    return [plain[0] for plain in fields.values() if isinstance(plain, list)]


class DeclaredWorkflow(Generic[P, R_co]):
    """A workflow that is declared as a function: `start` starts a run of it."""

    def __init__(
        self,
        function: Callable[Concatenate[Flow, P], R_co],
        app: Any,
        *,
        name: str | None = None,
        deadline: float | None = None,
        on_error: OnError | None = None,
        on_failure: Any = None,
    ) -> None:
        signature = inspect.signature(function)
        first, *others = signature.parameters.values() or [None]
        if first is None or inspect.iscoroutinefunction(function):
            raise Misconfigured(
                f"workflow {getattr(function, '__name__', function)!r} is a plain function of a Flow and arguments"
            )
        self.app = app
        self.function = function
        self.name: str = name or f"{get_module_name(function)}.{function.__qualname__}"
        refuse_injected(function, f"workflow {self.name}")
        self.deadline = deadline
        self.on_error: OnError | None = on_error
        check_on_error(on_error, f"workflow {self.name}")
        check_on_failure(on_failure, f"workflow {self.name}")
        self.on_failure: Any = on_failure
        self._signature = signature.replace(parameters=[parameter for parameter in others if parameter])
        self.parameters: Parameters = Parameters(self.name, self._make_stub())
        self.result_type: ResultType = self.parameters.result_type
        self.id: str | None = None
        # The task whose jobs start runs: subscribe it to events.
        self.task: Any = None
        self._compiled: dict[int, Compiled] = {}
        functools.update_wrapper(cast("Any", self), function)

    def _make_stub(self) -> Callable[..., Any]:
        """Return a function with the parameters of the workflow, without the flow."""

        def stub(*_args: Any, **_kwargs: Any) -> Any:
            raise TypeError(f"workflow {self.name} is started, not called: {self.name}.start(...)")

        functools.update_wrapper(stub, self.function)
        vars(stub)["__signature__"] = self._signature
        del vars(stub)["__wrapped__"]
        stub.__annotations__ = {
            name: annotation
            for name, annotation in getattr(self.function, "__annotations__", {}).items()
            if name in self._signature.parameters or name == "return"
        }
        return stub

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"

    def options(
        self,
        *,
        id: str | None = None,  # noqa: A002  the name of the option
        deadline: float | None = None,
    ) -> "DeclaredWorkflow[P, R_co]":
        """Return a copy with the id of its run, or with another deadline in seconds."""
        copy = cast("DeclaredWorkflow[P, R_co]", object.__new__(type(self)))
        copy.__dict__.update(self.__dict__)
        copy.id = self.id if id is None else id
        copy.deadline = self.deadline if deadline is None else deadline
        return copy

    async def astart(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowRun[R_co]:
        """Start a run and return its handle.

        Raises:
            BadArguments: An argument does not fit.
            Misconfigured: The workflow cannot be declared so.
            BrokerUnavailable: Redis cannot be reached: the run has begun whole, or not at all.
        """
        return cast("WorkflowRun[R_co]", await self.app.workflows.astart_declared(self, args, kwargs))

    @blocking(astart)
    def start(self) -> None: ...

    @property
    def compiled(self) -> Compiled:
        """The plan. The first access runs the function. Raises Misconfigured."""
        return self.compile_on(0)

    def compile_on(self, shard: int) -> Compiled:
        """Return the plan of runs with their steps on the shard of this number, for queues with several."""
        if shard not in self._compiled:
            self._compiled[shard] = self._trace(shard)
        return self._compiled[shard]

    def _trace(self, shard: int) -> Compiled:
        compiler = Compiler(
            shard=shard,
            on_error=self.on_error,
            check_event=self.app.workflows.check_event,
            has_constants=True,
            on_failure=self.on_failure,
        )
        values = {
            name: LaterValue(compiler.add_input(name), f"the argument {name!r}")
            for name in self._signature.parameters
        }
        flow = Flow(compiler)
        bound = self._signature.bind_partial(
            **{
                name: value
                for name, value in values.items()
                if self._signature.parameters[name].kind
                in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            }
        )
        result: Any = self.function(cast("Any", flow), *bound.args, **bound.kwargs)
        if isinstance(result, Workflow):
            result = flow.run(cast("Workflow[Any]", result))
        expression = to_expression(result) or Known(encode_value(result))
        if not any(node.queue for node in compiler.nodes):
            compiler.use_home(self.app.settings.default_queue)
        return compiler.finish(expression)

    def encode_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the arguments of a run as JSON, by parameter, with defaults. Raises BadArguments."""
        self.parameters.encode(args, kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        names = list(bound.arguments)
        values: tuple[list[Raw | None], Any] = self.parameters.encode_values(
            [], bound.arguments, lambda _value: False
        )
        return {name: bytes(values[1][name] or b"null") for name in names}
