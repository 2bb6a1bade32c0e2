"""Know what the names of a project are: its tasks with their parameters, its applications, and where names are used."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from celery5.migration.source import SourceFile

DECORATORS = {"task", "shared_task", "periodic_task"}
APP_NAMES = {"app", "celery", "celery_app", "current_app", "capp"}
"""What applications are usually called, where their definition is not among the files."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class KnownTask:
    """A task of the project."""

    name: str
    module: tuple[str, ...]
    required: tuple[str, ...]  # the parameters without a default, without `self`
    is_flexible: bool  # it has *args, or the parameters cannot be known


@dataclass
class ProjectIndex:
    """The names of a project."""

    tasks: dict[str, list[KnownTask]] = field(default_factory=lambda: defaultdict(list))
    apps: dict[str, list[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(list))
    modules: set[tuple[str, ...]] = field(default_factory=set)
    names: Counter[str] = field(default_factory=Counter)  # how often each name and attribute is read
    is_django: bool = False
    task_modules: set[tuple[str, ...]] = field(default_factory=set)

    def find_task(self, origin: str) -> KnownTask | None:
        """Return the task that a dotted name means, as seen from anywhere in the project."""
        *module, name = origin.lstrip(".").split(".")
        for task in self.tasks.get(name, ()):
            if not module or _ends_alike(task.module, module):
                return task
        return None

    def is_app(self, origin: str) -> bool:
        """Return whether a dotted name means an application of Celery."""
        *module, name = origin.lstrip(".").split(".")
        known = self.apps.get(name)
        if known:
            return any(not module or _ends_alike(defined, module) for defined in known)
        return name in APP_NAMES and (not module or "celery" in module[-1] or module[-1] == "app")

    def knows_app(self, origin: str) -> bool:
        """Return whether a dotted name means an application that is defined in the project."""
        *module, name = origin.lstrip(".").split(".")
        return any(not module or _ends_alike(defined, module) for defined in self.apps.get(name, ()))

    def find_celery_module(self, package: str) -> str:
        """Return the dotted name of the module that `-A package` means: Celery looks for `package.celery`."""
        parts = tuple(package.partition(":")[0].split("."))
        for module in ((*parts, "celery"), parts):
            if any(known[-len(module) :] == module for known in self.modules):
                return ".".join(module)
        return package.partition(":")[0]


def _ends_alike(one: tuple[str, ...], other: Iterable[str]) -> bool:
    """Return whether two names of modules may be the same module: a package also passes on what it imports."""
    ends = tuple(other)[-1:]
    return not ends or one[-1:] == ends or ends[0] in one


def make_index(files: Iterable[SourceFile]) -> ProjectIndex:
    """Return the names of the files of a project."""
    index = ProjectIndex()
    for file in files:
        if file.tree is None:
            continue
        index.modules.add(file.module)
        index.is_django |= file.name.endswith("manage.py")
        for node in ast.walk(file.tree):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                    index.names[name] += 1
                    index.is_django |= name == "INSTALLED_APPS"
                case ast.Constant(value=str(text)):
                    index.names[text] += text.isidentifier()
                    index.is_django |= text.startswith("django.conf:settings")
                case ast.FunctionDef() | ast.AsyncFunctionDef() if find_task_decorator(node) is not None:
                    index.tasks[node.name].append(_describe_task(node, file.module))
                    index.task_modules.add(file.module)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=called)):
                    if get_dotted(called).rpartition(".")[2] in (
                        "Celery",
                        "make_celery",
                        "create_celery_app",
                    ):
                        index.apps[name].append(file.module)
                case _:
                    pass
    return index


def find_task_decorator(function: Function) -> ast.expr | None:
    """Return the decorator that makes a task of a function; None for none."""
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = get_dotted(called).rpartition(".")[2]
        if name in DECORATORS:
            return decorator
    return None


def _describe_task(function: Function, module: tuple[str, ...]) -> KnownTask:
    decorator = find_task_decorator(function)
    is_bound = isinstance(decorator, ast.Call) and any(
        option.arg == "bind" and isinstance(option.value, ast.Constant) and option.value.value is True
        for option in decorator.keywords
    )
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = names[: len(names) - len(arguments.defaults)] if arguments.defaults else names
    required = required[1:] if is_bound else required
    only = [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    return KnownTask(function.name, module, (*required, *only), bool(arguments.vararg))


def get_dotted(node: ast.AST) -> str:
    """Return the dotted name that an expression is, `a.b.c`; '' for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def iterate_bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a module binds anywhere but by an import of Celery's."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names):
                yield from ((name.asname or name.name.partition(".")[0]) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                if level or (module or "").partition(".")[0] != "celery":
                    yield from (name.asname or name.name for name in names)
            case _:
                pass
