"""Know what the names of a project are: its tasks with their parameters, its applications, and where names are used."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from celery5.migration.files.source import SourceFile
from celery5.migration.values.priorities import Transport, find_transport
from celery5.migration.values.rates import translate_rate

DECORATORS = {"task", "shared_task", "periodic_task"}
APP_NAMES = {"app", "celery", "celery_app", "current_app", "capp"}
"""What applications are usually called, where their definition is not among the files."""
_APP_MAKERS = {"Celery", "make_celery", "create_celery_app"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
MAX_DEPTH = 5
"""How many imports a name is followed through."""
TEST_FILE = re.compile(r"(^|/)(tests?/.*|tests?\w*|\w+_tests?|conftest)\.py$")
"""A module of tests."""
_ENVIRONMENT = re.compile(r"(^|\.)(environ|getenv|env|config)(\.|$)")
"""Names that read a variable of the environment."""


@dataclass(frozen=True)
class KnownTask:
    """A task of the project."""

    name: str
    module: tuple[str, ...]
    required: tuple[str, ...]  # the parameters without a default, without `self`
    is_flexible: bool  # it has *args, or the parameters cannot be known
    is_limited: bool = False  # it has a rate, which is counted on its own queue
    queue: str = ""  # the queue of its declaration; '' for none, or where that is no text
    positional: tuple[str, ...] = ()  # the parameters by position, without `self`
    unannotated: frozenset[str] = frozenset()  # those without an annotation, and without a default of JSON
    base: str = ""  # the name of its base class; '' for none
    has_on_failure: bool = False  # its declaration has on_failure=


@dataclass
class ProjectIndex:
    """The names of a project."""

    tasks: dict[str, list[KnownTask]] = field(default_factory=lambda: defaultdict(list))
    apps: dict[str, list[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(list))
    modules: set[tuple[str, ...]] = field(default_factory=set)
    packages: set[tuple[str, ...]] = field(default_factory=set)
    names: Counter[str] = field(default_factory=Counter)  # how often each name and attribute is read
    is_django: bool = False
    transport: Transport = ""  # its broker with Celery; RabbitMQ if files name both
    task_modules: set[tuple[str, ...]] = field(default_factory=set)
    task_names: set[str] = field(default_factory=set)  # the names given by name=
    makers: dict[str, set[str]] = field(
        default_factory=dict
    )  # functions that make tasks, with their own parameters
    exports: dict[str, list[tuple[tuple[str, ...], str]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # what a name of a module was imported from, or is another name of: `from .tasks import charge as pay`
    events: set[str] = field(default_factory=set)  # the classes of celery5's events, which have `delay`, too
    failure_classes: set[str] = field(default_factory=set)  # classes with a method on_failure
    errbacks: set[str] = field(default_factory=set)  # the names of tasks that are called when a job fails
    names_default_queue: bool = False  # a setting says what the default queue is called
    missing: tuple[str, ...] = ()  # modules with tasks that no application would import
    moved: tuple[str, ...] = ()  # modules of the setting `imports`, which go into the application's `include`

    def find_task(self, origin: str, *, depth: int = MAX_DEPTH) -> KnownTask | None:
        """Return the task that a dotted name means, as seen from anywhere in the project."""
        *module, name = origin.lstrip(".").split(".")
        for task in self.tasks.get(name, ()):
            if not module or _ends_alike(task.module, module):
                return task
        return self.find_exported(tuple(module), name, depth=depth) if module else None

    def find_exported(
        self, module: tuple[str, ...], name: str, *, depth: int = MAX_DEPTH
    ) -> KnownTask | None:
        """Return the task that a module has another name for, or has imported."""
        for exporting, target in self.exports.get(name, ()) if depth else ():
            if exporting[-len(module) :] == module:
                found = self.find_task(target, depth=depth - 1)
                if found is not None:
                    return found
        return None

    def calls_on_failure(self, task: KnownTask) -> bool:
        """Return whether a task, or its base class, has a handler of its own for a job that failed."""
        return task.has_on_failure or task.base in self.failure_classes

    def has_read(self, origin: str) -> bool:
        """Return whether the module that a dotted name is in was read, or is itself that name."""
        *module, _ = origin.split(".")
        parts = [tuple(module), tuple(origin.split("."))]
        return any(part and known[-len(part) :] == part for known in self.modules for part in parts)

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

    @property
    def has_one_app(self) -> bool:
        """Whether the project has a single application."""
        return sum(map(len, self.apps.values())) == 1

    def has_module(self, name: str) -> bool:
        """Return whether a dotted name is a module of the project, and no package."""
        return tuple(name.split(".")) in self.modules - self.packages

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


def make_index(files: Sequence[SourceFile]) -> ProjectIndex:
    """Return the names of the files of a project."""
    index = ProjectIndex(packages={file.module for file in files if file.name.endswith("__init__.py")})
    for file in files:
        transport = find_transport(file.text)
        index.transport = transport if transport == "amqp" else index.transport or transport
        index.names_default_queue |= "default_queue" in file.text.lower()
        if file.tree is None:
            continue
        index.modules.add(file.module)
        index.is_django |= file.name.endswith("manage.py")
        index.errbacks |= _find_errbacks(file.tree)
        index.makers |= _find_makers(file.tree)
        _add_names(index, file.tree, file.module)
        variables = _find_variables(file.tree)
        makers = {*_APP_MAKERS, *(["App"] if imports_celery5(file.tree) else [])}
        for node in ast.walk(file.tree):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                    index.names[name] += 1
                    index.is_django |= name == "INSTALLED_APPS"
                case ast.Constant(value=str(text)):
                    index.names[text] += text.isidentifier() and id(node) not in variables
                    index.is_django |= text.startswith(("django.conf:settings", "celery5.contrib.django"))
                case ast.FunctionDef() | ast.AsyncFunctionDef() if find_task_decorator(node) is not None:
                    index.tasks[node.name].append(_describe_task(node, file.module))
                    index.task_modules.add(file.module)
                case ast.keyword(arg="name", value=ast.Constant(value=str(text))):
                    index.task_names.add(text)
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=called))
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=called))
                ):
                    if get_dotted(called).rpartition(".")[2] in makers:
                        index.apps[name].append(file.module)
                case _:
                    pass
    _add_made_tasks(index, files)
    return index


def _find_variables(tree: ast.Module) -> set[int]:
    """Return id() of each text that names a variable of the environment: these are no names of the project."""
    return {
        id(named)
        for node in ast.walk(tree)
        for named in (
            node.args[:1]
            if isinstance(node, ast.Call) and _ENVIRONMENT.search(get_dotted(node.func))
            else [node.slice]
            if isinstance(node, ast.Subscript) and _ENVIRONMENT.search(get_dotted(node.value))
            else ()
        )
    }


def _makes_task(called: ast.expr) -> bool:
    """Return whether a call makes a task of a function: `app.task(f)`, `shared_task(name="x")(f)`."""
    called = called.func if isinstance(called, ast.Call) else called
    return get_dotted(called).rpartition(".")[2] in DECORATORS


def _add_names(index: ProjectIndex, tree: ast.Module, module: tuple[str, ...]) -> None:
    """Add the tasks that a module makes by a call, its events, and the other names that it has for what it imports."""
    origins: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.ImportFrom(module=source, names=names):
                origins |= {
                    alias.asname or alias.name: f"{source or ''}.{alias.name}".lstrip(".") for alias in names
                }
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() | ast.Attribute() as value):
                first, _, rest = get_dotted(value).partition(".")
                origin = origins.get(first, ".".join([*module, first]))
                origins[name] = f"{origin}.{rest}" if rest else origin
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=called)) if _makes_task(called):
                index.tasks[name].append(KnownTask(name, module, (), is_flexible=True))
            case ast.ClassDef(name=name, decorator_list=decorators):
                if any(isinstance(member, Function) and member.name == "on_failure" for member in node.body):
                    index.failure_classes.add(name)
                called_names = [get_dotted(getattr(decorator, "func", decorator)) for decorator in decorators]
                if any(dotted.rpartition(".")[2] == "event" for dotted in called_names):
                    index.events.add(name)
            case _:
                pass
    for name, origin in origins.items():
        index.exports[name].append((module, origin))


def _add_made_tasks(index: ProjectIndex, files: Iterable[SourceFile]) -> None:
    """Add the tasks that are made by functions of the project."""
    for file in files if index.makers else ():
        for node in ast.walk(file.tree) if file.tree is not None else ():
            if isinstance(node, Function) and find_maker(node, index) is not None:
                index.tasks[node.name].append(_describe_task(node, file.module))
                index.task_modules.add(file.module)


def find_maker(function: Function, index: ProjectIndex) -> ast.Call | None:
    """Return the decorator, a function of the project, that makes a task of a function; None for none."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and get_dotted(decorator.func).rpartition(".")[2] in index.makers:
            return decorator
    return None


def imports_celery5(tree: ast.Module) -> bool:
    """Return whether a module imports names of celery5: it is already changed, as a whole or in part."""
    return any(
        name.partition(".")[0] == "celery5"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        )
    )


def _find_makers(tree: ast.Module) -> dict[str, set[str]]:
    """Return the functions of a module that make a task of another one: `def instrumented_task(name, **options)`."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or find_task_decorator(node) is not None:
            continue
        decorators = {
            id(decorator) for inner in ast.walk(node) for decorator in getattr(inner, "decorator_list", ())
        }
        makes_task = any(
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Call)
            and get_dotted(inner.func.func).rpartition(".")[2] in DECORATORS
            and id(inner) not in decorators
            for inner in ast.walk(node)
        )
        if makes_task:
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            found[node.name] = {argument.arg for argument in arguments}
    return found


def _find_errbacks(tree: ast.Module) -> set[str]:
    """Return the names of the tasks that a module has called when a job fails, with Celery's API or celery5's."""
    values: list[ast.expr] = []
    variables: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="link_error" | "on_failure", value=value):
                values.append(value)
            case ast.Call(func=ast.Attribute(attr="on_error" | "link_error"), args=[value, *_]):
                values.append(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                variables[name] = value
            case _:
                pass
    found: set[str] = set()
    for value in values:
        for part in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            resolved = variables.get(part.id, part) if isinstance(part, ast.Name) else part
            found.add(_find_task_name(resolved))
    return found - {""}


def _find_task_name(value: ast.expr) -> str:
    """Return the name of the task that a signature calls, or of the task itself; '' for other expressions."""
    match value:
        case ast.Call(
            func=ast.Name(id="signature" | "subtask") | ast.Attribute(attr="signature" | "subtask"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return name.rpartition(".")[2]
        case ast.Call(func=ast.Attribute(attr="s" | "signature" | "subtask" | "partial", value=task)):
            return get_dotted(task).rpartition(".")[2]
        case _:
            return get_dotted(value).rpartition(".")[2]


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
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    given = [(option.arg, option.value) for option in keywords]
    options = {name: value.value if isinstance(value, ast.Constant) else ... for name, value in given}
    queue = options.get("queue")
    return KnownTask(
        function.name,
        module,
        (*required, *only),
        bool(arguments.vararg),
        is_limited=translate_rate(options.get("rate_limit")) != "",
        queue=queue if isinstance(queue, str) else "",
        positional=tuple(names[1:] if is_bound else names),
        unannotated=frozenset(_find_unannotated(arguments)) - set(names[: 1 if is_bound else 0]),
        base=next((get_dotted(value).rpartition(".")[2] for name, value in given if name == "base"), ""),
        has_on_failure=options.get("on_failure") is not None,
    )


def _find_unannotated(arguments: ast.arguments) -> list[str]:
    """Return the parameters without an annotation, but for those whose default is a value of JSON."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    pairs = [
        *zip(positional, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return [
        argument.arg
        for argument, default in pairs
        if argument.annotation is None
        and not (isinstance(default, ast.Constant) and isinstance(default.value, int | float | str))
    ]


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
