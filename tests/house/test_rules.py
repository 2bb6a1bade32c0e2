"""Rules: the sizes, names and docstrings of every file in the house.

Each test lists all offenders, so that one run shows the whole work.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from celery5.protocol.job.delivery import Delivery
from tests.house.sources import EVERYWHERE, HERE, PACKAGE, files, functions, name, nodes, tree

LONGEST_FUNCTION = 50
WIRING_TABLE = re.compile(r"celery5/processes/.* make_\w*values$")
"""A table that gives each part of a process its value may be longer: nothing is decided in it."""
NO_MODULE = re.compile(r"^_?(util|helper|common|misc|base|manager|mixin)")
NO_CLASS = re.compile(r"(Manager|Helper|Util|Base|Mixin|Impl|Data|Info|Common)(?![a-z])")
NO_LOOP_VARIABLES = frozenset({"one", "each"})

SOURCES = (HERE / "noxfile.py", *files(*EVERYWHERE))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its decorators and its docstring; of a constructor without its parameters."""
    first = function.body[0]
    begin = first if function.name == "__init__" else function
    lines = (function.end_lineno or function.lineno) - begin.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_there_is_something_to_look_at() -> None:
    assert {name(path) for path in SOURCES} > {
        "noxfile.py",
        "celery5/__init__.py",
        "services/process/systemd_notify.py",
    }


def test_no_function_is_longer_than_50_lines() -> None:
    lengths = {
        f"{name(path)}:{function.lineno} {function.name}": length(function)
        for path in SOURCES
        for function in functions(path)
    }
    assert {
        where: lines
        for where, lines in lengths.items()
        if lines > LONGEST_FUNCTION and not WIRING_TABLE.match(where)
    } == {}


def test_no_module_is_named_like_a_junk_drawer() -> None:
    assert [name(path) for path in SOURCES if NO_MODULE.match(path.stem)] == []


def test_no_class_is_named_like_a_junk_drawer() -> None:
    classes = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and NO_CLASS.search(node.name)
    ]
    assert classes == []


def test_no_loop_variable_has_a_name_that_says_nothing() -> None:
    """`for worker in workers`, not `for one in workers`: the name says what the item is."""
    variables = [
        f"{name(path)}:{node.target.lineno} {variable.id}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        for variable in ast.walk(node.target)
        if isinstance(variable, ast.Name) and variable.id in NO_LOOP_VARIABLES
    ]
    assert variables == []


def test_handlers_of_decode_errors_also_catch_recursion_errors() -> None:
    """For bytes that are nested too deeply msgspec raises RecursionError, no ValueError. They must end no process."""
    incomplete = [
        f"{name(path)}:{handler.lineno}"
        for path in files("celery5", "services", "bootsteps")
        for node in nodes(path)
        for handler in _find_handlers(node)
        if _catches(handler, DECODE_ERRORS) and not _catches(handler, {"RecursionError", "Exception"})
    ]
    assert incomplete == []


DECODE_ERRORS = {"ValueError", "msgspec.DecodeError", "msgspec.MsgspecError"}
DECODERS = {"msgspec.json.decode", "msgspec.msgpack.decode", "json.loads"}


def _find_handlers(node: ast.AST) -> list[ast.expr]:
    """Return the types that a `try` or a `with suppress` around decoding catches."""
    if isinstance(node, ast.Try) and _decodes(node.body):
        return [handler.type for handler in node.handlers if handler.type is not None]
    if isinstance(node, ast.With) and _decodes(node.body):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        return [
            ast.copy_location(ast.Tuple(call.args), call)
            for call in calls
            if ast.unparse(call.func) == "suppress"
        ]
    return []


def _decodes(body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func) in DECODERS
        for statement in body
        for node in ast.walk(statement)
    )


def _catches(types: ast.expr, wanted: set[str]) -> bool:
    return any(ast.unparse(node) in wanted for node in ast.walk(types))


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in files("celery5", "services", "bootsteps"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{name(path)}:{node.lineno}")
    assert {class_name: where for class_name, where in places.items() if len(where) > 1} == {}


def test_no_constructor_of_a_service_only_unpacks_a_value_of_the_services() -> None:
    """Each collaborator has a parameter: a value that is made to be taken apart hides what a service needs."""
    classes = {
        path: [node for node in nodes(path) if isinstance(node, ast.ClassDef)]
        for path in files("services", "bootsteps")
    }
    values = {
        node.name
        for defined in classes.values()
        for node in defined
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert values
    unpacked = [
        f"{name(path)} {node.name}: {parameter.arg}"
        for path, defined in classes.items()
        for node in defined
        for function in node.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for parameter in [*function.args.args, *function.args.kwonlyargs]
        if parameter.annotation is not None
        and ast.unparse(parameter.annotation) in values
        and is_only_unpacked(parameter.arg, function)
    ]
    assert unpacked == []


def is_only_unpacked(parameter: str, function: ast.FunctionDef) -> bool:
    """Return whether a function reads two or more attributes of a parameter, and nothing but its attributes."""
    reads = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == parameter]
    attributes = [
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == parameter
    ]
    return len(attributes) == len(reads) and len(set(attributes)) > 1


def test_nothing_but_the_two_driver_protocols_describes_a_driver() -> None:
    protocols = [
        f"{name(path)} {node.name}"
        for path in files("celery5", "services", "bootsteps")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        and node.name != "Application"  # it performs calls by its drivers
        and any(isinstance(parent, ast.Name) and parent.id == "Protocol" for parent in node.bases)
        and any(getattr(part, "name", "") in ("perform", "perform_all") for part in node.body)
    ]
    assert protocols == ["celery5/broker/driver.py BlockingDriver", "celery5/broker/driver.py AsyncDriver"]


def docstring_fault(docstring: str | None) -> str:
    """Return what is wrong with a module's docstring, or nothing."""
    if docstring is None:
        return "no docstring"
    first = " ".join(docstring.split("\n\n")[0].split())
    if not first.endswith((".", ":")):
        return f"its first paragraph is no sentence: {first}"
    if re.search(r"^(Floor|Reads|Writes): ", docstring, re.MULTILINE):
        return "it has a plate: say what it reads and writes where the reader needs it"
    return ""


def test_every_module_says_in_a_sentence_what_it_is_for() -> None:
    faults = {name(path): docstring_fault(ast.get_docstring(tree(path))) for path in SOURCES}
    assert {path: fault for path, fault in faults.items() if fault} == {}


def test_no_module_is_empty() -> None:
    empty = [
        name(path) for path in SOURCES if path.stem != "__init__" and all(map(is_docstring, tree(path).body))
    ]
    assert empty == []


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is nothing but a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_every_public_class_and_function_of_the_package_has_a_docstring() -> None:
    bare = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in files(*PACKAGE)
        for node in tree(path).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and not any(is_of_a_stub(decorator) for decorator in node.decorator_list)
        and not has_help_of_its_definition(node)
    ]
    assert bare == []


def is_of_a_stub(decorator: ast.expr) -> bool:
    """Whether a decorator takes the docstring of another function: `@overload`, `@blocking(agather)`."""
    return ast.unparse(decorator).partition("(")[0] in ("overload", "blocking")


def has_help_of_its_definition(node: ast.stmt) -> bool:
    """Whether this is a command of the command line whose help stands in the definition of a control command."""
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "_command"
        for decorator in node.decorator_list
    )


NO_SERVICES = ("SystemdBus",)
"""Classes that have a `run` and are no step of a process: a connection, which the platform that opens it runs."""


def test_every_service_and_boot_step_has_the_one_shape() -> None:
    faults = []
    for path in files("services", "bootsteps"):
        for node in tree(path).body:
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and node.name not in NO_SERVICES
            ):
                faults += [f"{name(path)}:{node.lineno} {node.name} {fault}" for fault in shape_faults(node)]
    assert faults == []


def shape_faults(service: ast.ClassDef) -> list[str]:
    """What is wrong with a class that has `run`: a coroutine with `task_status`, and a keyword-only constructor."""
    methods = {
        node.name: node for node in service.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    run, made = methods.get("run"), methods.get("__init__")
    faults = []
    if run is None or any(isinstance(base, ast.Name) and base.id == "Protocol" for base in service.bases):
        return []
    if not isinstance(run, ast.AsyncFunctionDef):
        faults.append("has a run() that is no coroutine")
    if [argument.arg for argument in run.args.args + run.args.kwonlyargs] != ["self", "task_status"]:
        faults.append("has a run() that takes something else than task_status")
    if made is not None and (len(made.args.args) != 1 or made.args.vararg or made.args.kwarg):
        faults.append("has a constructor that is not keyword-only")
    return faults


SOCKET_IN_A_LONG_FOLDER = re.compile(
    r"""(tmp_path|mktemp).*("notify"|socket|[.]sock\b)|(bind[(]|connect[(]|SOCKET|address=).*(tmp_path|mktemp)"""
)
"""A line that puts a socket, by its file's name or by whom it is given to, into a folder that pytest has named."""


def test_the_sockets_of_tests_lie_in_a_folder_with_a_short_name() -> None:
    lines = [
        f"{name(path)}:{number}"
        for path in files("tests")
        if path.name != "test_rules.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SOCKET_IN_A_LONG_FOLDER.search(line)
    ]
    assert lines == [], "a socket's path has 107 bytes: take the fixture `short_path`"


DELIVERY_FIELDS = frozenset(Delivery.__struct_fields__)


def test_nobody_but_a_delivery_assigns_its_attributes() -> None:
    assignments = {
        f"{name(path)} {ast.unparse(target)}"
        for path in files("services", "celery5/processes", "bootsteps")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for targets in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in (targets.elts if isinstance(targets, ast.Tuple) else [targets])
        if isinstance(target, ast.Attribute) and target.attr in DELIVERY_FIELDS
        if ast.unparse(target.value) in ("delivery", "job", "each")
    }
    assert assignments == set()


def test_no_constructor_assigns_to_an_attribute_of_another_object() -> None:
    assignments = {
        f"{name(path)} {ast.unparse(target)}"
        for path in files("celery5", "services", "bootsteps")
        for function in functions(path)
        if function.name in ("__init__", "__post_init__")
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
    }
    assert assignments == set()


SCOPE_ATTRIBUTES = {"deadline", "shield"}  # of Trio's cancel scopes, which are made to be assigned
STRUCTURES = {"self._span.nanoseconds"}  # memory that the kernel reads


def test_no_service_assigns_to_an_attribute_of_another_service() -> None:
    assignments = {
        f"{name(path)} {ast.unparse(target)}"
        for path in files("services", "bootsteps")
        for function in functions(path)
        for target in assigned_attributes(function)
        if ast.unparse(target.value).startswith("self.") and target.attr not in SCOPE_ATTRIBUTES
        if ast.unparse(target) not in STRUCTURES
    }
    assert assignments == set()


def test_no_service_assigns_to_an_attribute_of_what_it_is_passed() -> None:
    assignments = {
        f"{name(path)} {ast.unparse(target)}"
        for path in files("services", "bootsteps")
        for function in functions(path)
        for target in assigned_attributes(function)
        if isinstance(target.value, ast.Name) and target.attr not in SCOPE_ATTRIBUTES
        if is_of_another_module(function, target.value.id, path)
    }
    assert assignments == set()


def assigned_attributes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.Attribute]:
    """The attributes that a function assigns to, those within tuples included."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (
                    part for part in ast.walk(target) if isinstance(part, ast.Attribute) and is_stored(part)
                )


def is_stored(node: ast.Attribute) -> bool:
    """Whether a node is assigned to, not only read on the way to what is."""
    return isinstance(node.ctx, ast.Store)


@cache
def own_classes(path: Path) -> frozenset[str]:
    """The names of the classes that a module defines."""
    return frozenset(node.name for node in nodes(path) if isinstance(node, ast.ClassDef))


def is_of_another_module(function: ast.FunctionDef | ast.AsyncFunctionDef, variable: str, path: Path) -> bool:
    """Whether a variable is a parameter whose class is not defined in the module that assigns to it."""
    own = own_classes(path)
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(
        argument.arg == variable
        and argument.annotation is not None
        and ast.unparse(argument.annotation).strip("'\"") not in own
        for argument in arguments
    )


def test_no_template_of_a_page_contains_an_import_line() -> None:
    """It would be text before `<!DOCTYPE html>`, which makes a browser use quirks mode."""
    lines = [
        f"{name(path)}: {line}"
        for path in files("celery5/dashboard/templates", suffix=".html")
        for line in path.read_text().splitlines()
        if re.match(r"(from|import) \w", line)
    ]
    assert lines == []
