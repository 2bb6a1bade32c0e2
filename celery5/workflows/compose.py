"""Compose calls of tasks to workflows: chains, groups, chords, maps and forks.

A `Workflow` has all that it needs and can be started. A `Partial` lacks the value of the step before it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast, overload

from celery5.broker.colour import blocking
from celery5.errors import Misconfigured
from celery5.hints import NameKind, make_attribute_error
from celery5.protocol.workflows.plan import OnError, check_on_error
from celery5.workflows.tree import (
    GroupOptions,
    StepGroup,
    TaskCall,
    Tree,
    describe,
    get_first_call,
    join_chain,
    link,
    takes_input,
)

if TYPE_CHECKING:
    from celery5.workflows.results import Results
    from celery5.workflows.run import WorkflowRun

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")


class Composed:
    """What workflows and partials share: the tree that they are made of."""

    __slots__ = ()

    hints: ClassVar[NameKind] = "workflow"  # the group of Celery's names for which it gives hints

    @property
    def tree(self) -> Tree:
        """The calls that it is composed of."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return describe(self.tree)

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error(self.hints, self, name)

        def __call__(self, *_args: object, **_kwargs: object) -> Any:
            if self.hints == "workflow":
                raise TypeError("a workflow is started, not called: write .start()")
            raise TypeError(
                "a signature is sent, not called: write .delay(), .start(), or app.send_many([...])"
            )


class Workflow(Composed, Generic[R_co]):
    """Calls of tasks that can be started; `R` is the type of the result.

    `a | b` passes the value of `a` to `b`; `a >> b` only orders them.
    """

    __slots__ = ()

    @overload
    def __or__(self: "Workflow[list[A]]", after: "Partial[Results[A], S]") -> "Workflow[S]": ...
    @overload
    def __or__(self, after: "Partial[R_co, S]") -> "Workflow[S]": ...
    def __or__(self, after: "Partial[Any, S]") -> "Workflow[S]":
        """Return a workflow in which `after` gets the value of this one."""
        return ComposedWorkflow(link(self.tree, check_partial(after).tree, "pass"))

    def __rshift__(self, after: "Workflow[S]") -> "Workflow[S]":
        """Return a workflow in which `after` begins when this one has ended, without its value."""
        return ComposedWorkflow(link(self.tree, check_workflow(after).tree, "order"))

    async def astart(
        self,
        *,
        id: str | None = None,  # noqa: A002  the name of the option
        deadline: float | None = None,
        on_error: OnError | None = None,
        on_failure: Any = None,
    ) -> "WorkflowRun[R_co]":
        """Start a run and return its handle.

        Args:
            id: The id of the run: the same id is the same run. Default: a new one.
            deadline: Seconds until the run expires; default 30 days.
            on_error: What becomes of the run when a node fails that does not say it: `fail`, `continue`, `skip` or
                `hold`.
            on_failure: The task, or the call of one, that is called once with a list of `StepFailure` when the run has
                failed or expired.

        Raises:
            Misconfigured: It cannot be a workflow.
            BadArguments: An argument does not fit its task.
            BrokerUnavailable: Redis cannot be reached: the run has begun whole, or not at all.
        """
        return cast(
            "WorkflowRun[R_co]",
            await self._workflows.astart(
                self, id=id, deadline=deadline, on_error=on_error, on_failure=on_failure
            ),
        )

    @blocking(astart)
    def start(self) -> None: ...

    @property
    def _workflows(self) -> Any:
        first = get_first_call(self.tree)
        if first is None:
            raise Misconfigured("this workflow has no task: start it with app.workflows.start(...)")
        return first.task.app.workflows


class Partial(Composed, Generic[A_contra, R_co]):
    """Calls of tasks that lack the value of the step before them, of type `A`."""

    __slots__ = ()

    @overload
    def __or__(
        self: "Partial[A_contra, list[A]]", after: "Partial[Results[A], S]"
    ) -> "Partial[A_contra, S]": ...
    @overload
    def __or__(self, after: "Partial[R_co, S]") -> "Partial[A_contra, S]": ...
    def __or__(self, after: "Partial[Any, S]") -> "Partial[A_contra, S]":
        """Return a partial in which `after` gets the value of this one."""
        return ComposedPartial(link(self.tree, check_partial(after).tree, "pass"))

    def __rshift__(self, after: "Workflow[S]") -> "Partial[A_contra, S]":
        """Return a partial in which `after` begins when this one has ended, without its value."""
        return ComposedPartial(link(self.tree, check_workflow(after).tree, "order"))

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            if name in ("delay", "adelay", "job", "start", "astart", "apply_async"):
                raise Misconfigured(
                    f"{self!r} lacks {self.describe_missing()}: give it, or put this behind another step: "
                    f"other.s(...) | {self!r}"
                )
            raise make_attribute_error(self.hints, self, name)

    def describe_missing(self) -> str:
        """Return what it lacks, for an error."""
        return "an argument"


class ComposedWorkflow(Workflow[R_co]):
    """A workflow of more than one call."""

    __slots__ = ("_tree",)

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @property
    def tree(self) -> Tree:
        """The calls that it is composed of."""
        return self._tree


class ComposedPartial(Partial[A_contra, R_co]):
    """A partial of one call or more."""

    __slots__ = ("_tree",)

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @property
    def tree(self) -> Tree:
        """The calls that it is composed of."""
        return self._tree


def check_workflow(step: object) -> "Workflow[Any]":
    """Return a workflow. Raises Misconfigured for anything else."""
    if isinstance(step, Workflow):
        return cast("Workflow[Any]", step)
    if isinstance(step, Partial):
        raise Misconfigured(
            f"{step!r} lacks an argument: give it, or write a | b, which passes the value of a to b"
        )
    raise Misconfigured(f"a workflow is composed of task.s(...), got {step!r}")


def _describe_whole(tree: Tree) -> str:
    """Return why no value can be passed to a call, and how to write it, for an error."""
    if isinstance(tree, TaskCall):
        return str(tree.task.parameters.describe_first(tree.args, tree.kwargs))
    return "has all its arguments: leave the first one out"


def check_partial(step: object) -> "Partial[Any, Any]":
    """Return a partial. Raises Misconfigured for anything else."""
    if isinstance(step, Partial):
        return cast("Partial[Any, Any]", step)
    if isinstance(step, Workflow):
        raise Misconfigured(f"{step!r} {_describe_whole(step.tree)}, or write a >> b, which passes no value")
    raise Misconfigured(f"a workflow is composed of task.s(...), got {step!r}")


@overload
def chain(one: Workflow[A], /) -> Workflow[A]: ...
@overload
def chain(one: Workflow[A], two: Partial[A, B], /) -> Workflow[B]: ...
@overload
def chain(one: Workflow[A], two: Partial[A, B], three: Partial[B, C], /) -> Workflow[C]: ...
@overload
def chain(
    one: Workflow[A], two: Partial[A, B], three: Partial[B, C], four: Partial[C, D], /
) -> Workflow[D]: ...
@overload
def chain(
    one: Workflow[A], two: Partial[A, B], three: Partial[B, C], four: Partial[C, D], five: Partial[D, E], /
) -> Workflow[E]: ...
@overload
def chain(one: Workflow[Any], /, *more: Partial[Any, Any]) -> Workflow[Any]: ...
@overload
def chain(one: Partial[A, B], two: Partial[B, C], /) -> Partial[A, C]: ...
@overload
def chain(one: Partial[A, B], two: Partial[B, C], three: Partial[C, D], /) -> Partial[A, D]: ...
@overload
def chain(one: Partial[A, Any], /, *more: Partial[Any, Any]) -> Partial[A, Any]: ...
def chain(*steps: Any) -> Any:
    """Return a workflow of steps one after another, in which each gets the value of the one before it.

    The same as `a | b | c`. Without the argument of its first step it is a `Partial`.

    Raises:
        Misconfigured: There are no steps, or one has all its arguments.
    """
    if not steps:
        raise Misconfigured("a chain needs a step: chain(a.s(1), b.s())")
    first = check_composed(steps[0])
    return _wrap(join_chain([first.tree, *(check_partial(step).tree for step in steps[1:])]))


@overload
def group(
    members: Iterable[Workflow[R]], /, *, on_error: OnError | None = None, need: float | None = None
) -> Workflow[list[R]]: ...
@overload
def group(
    members: Iterable[Partial[A, R]], /, *, on_error: OnError | None = None, need: float | None = None
) -> Partial[A, list[R]]: ...
@overload
def group(  # type: ignore[overload-overlap]  # the first one that fits is meant
    *members: Workflow[R],  # pyright: ignore[reportOverlappingOverload]
    on_error: OnError | None = None,
    need: float | None = None,
) -> Workflow[list[R]]: ...
@overload
def group(
    *members: Partial[A, R], on_error: OnError | None = None, need: float | None = None
) -> Partial[A, list[R]]: ...
@overload
def group(
    *members: Workflow[R] | Partial[A, R], on_error: OnError | None = None, need: float | None = None
) -> Partial[A, list[R]]: ...
def group(*members: Any, on_error: OnError | None = None, need: float | None = None) -> Any:
    """Return a workflow of steps beside each other. Its value is the list of their values, in order.

    After another step, members that lack their first argument get the value of that step.

    Args:
        members: Workflows, or one iterable of them.
        on_error: What becomes of the run when a member fails that does not say it.
        need: The fraction of members that must succeed, such as 0.95; the values of the others are left out.

    Raises:
        Misconfigured: An argument makes no sense.
    """
    trees = tuple(step.tree for step in _list_members(members, "group"))
    return _wrap(
        StepGroup(trees, GroupOptions(on_error=_checked(on_error, "group"), need=check_need(need, "group")))
    )


@overload
def chord(header: "Workflow[list[R]] | Iterable[Workflow[R]]", body: Partial[list[R], S]) -> Workflow[S]: ...
@overload
def chord(
    header: "Workflow[list[R]] | Iterable[Workflow[R]]", body: "Partial[Results[R], S]"
) -> Workflow[S]: ...
def chord(
    header: Workflow[list[R]] | Iterable[Workflow[R]], body: Partial[Any, S] | None = None
) -> Workflow[S]:
    """Return a workflow in which `body` gets the list of the values of `header`: `group(...) | body`."""
    if body is None:
        raise TypeError(
            "a chord takes its body at once: write chord(header, body).start(), not chord(header)(body)"
        )
    return (header if isinstance(header, Workflow) else group(header)) | body


def first(*members: Workflow[R], on_error: OnError | None = None) -> Workflow[R]:
    """Return a workflow whose value is that of the first member that succeeds; the others are stopped then."""
    trees = tuple(check_workflow(step).tree for step in members)
    if not trees:
        raise Misconfigured("first needs a member: first(a.s(1), b.s(2))")
    return ComposedWorkflow(StepGroup(trees, GroupOptions(on_error=_checked(on_error, "first"), first=True)))


@overload
def fork(one: Partial[A, B], two: Partial[A, C], /) -> Partial[A, tuple[B, C]]: ...
@overload
def fork(one: Partial[A, B], two: Partial[A, C], three: Partial[A, D], /) -> Partial[A, tuple[B, C, D]]: ...
@overload
def fork(
    one: Partial[A, B], two: Partial[A, C], three: Partial[A, D], four: Partial[A, E], /
) -> Partial[A, tuple[B, C, D, E]]: ...
@overload
def fork(*branches: Partial[A, Any]) -> Partial[A, tuple[Any, ...]]: ...
def fork(*branches: Any) -> Any:
    """Return a partial whose branches all get the value of the step before it. Its value is the tuple of their values.

    The branches are independent: when one fails, the others go on, and the run fails when they have ended.
    """
    trees = tuple(check_partial(branch).tree for branch in branches)
    if not trees:
        raise Misconfigured("fork needs a branch: a.s(1) | fork(b.s(), c.s())")
    return ComposedPartial[Any, Any](StepGroup(trees, GroupOptions(independent=True)))


def check_composed(step: object) -> "Workflow[Any] | Partial[Any, Any]":
    """Return a workflow or a partial. Raises Misconfigured for anything else."""
    if isinstance(step, Workflow | Partial):
        return cast("Workflow[Any] | Partial[Any, Any]", step)
    raise Misconfigured(f"a workflow is composed of task.s(...), got {step!r}")


def check_need(need: object, what: str) -> float | None:
    """Return a fraction of members. Raises Misconfigured for anything else."""
    if need is None:
        return None
    if isinstance(need, bool) or not isinstance(need, int | float) or not 0 <= need <= 1:
        raise Misconfigured(f"{what}: need is {need!r}: give the fraction that must succeed, from 0 to 1")
    return float(need)


def _checked(on_error: OnError | None, what: str) -> OnError | None:
    check_on_error(on_error, what)
    return on_error


def _list_members(members: tuple[Any, ...], what: str) -> list["Workflow[Any] | Partial[Any, Any]"]:
    if len(members) == 1 and not isinstance(members[0], Workflow | Partial):
        if not isinstance(members[0], Iterable):
            raise Misconfigured(f"{what} takes task.s(...), got {members[0]!r}")
        members = tuple(cast("Iterable[Any]", members[0]))
    return [check_composed(member) for member in members]


def _wrap(tree: Tree) -> Any:
    if takes_input(tree):
        return ComposedPartial[Any, Any](tree)
    return ComposedWorkflow[Any](tree)
