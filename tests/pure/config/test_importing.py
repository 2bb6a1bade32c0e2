"""Importing: `import celery5` loads nothing, a public name comes when it is asked for, and a probe loads very
little."""

import ast
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path

import celery5
from celery5.cli.main import CHILD, COMMANDS, cli, get_module_name
from celery5.protocol.cluster.members import PARENT_VARIABLE

SOURCE = Path(celery5.__file__)
HEAVY = {"trio", "asyncio", "redis", "msgspec", "eliot", "cryptography", "joserfc", "dependencies", "ssl"}
OF_A_PROBE = {"", ".cli", ".cli.main", ".cli.standalone", ".cli.standalone.health", ".cli.terminal",
              ".cli.terminal.errors", ".cli.terminal.output", ".cli.terminal.target", ".errors", ".lazy_modules",
              ".protocol", ".protocol.masking", ".similar_names"}  # fmt: skip


def fresh(code: str) -> str:
    """What an interpreter of its own prints that runs this."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def homes_for_checkers() -> dict[str, str]:
    """Where each public name comes from, as type checkers read it."""
    (block,) = [node for node in ast.parse(SOURCE.read_text()).body if is_for_checkers(node)]
    return {
        alias.asname or alias.name: str(node.module)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def is_for_checkers(node: ast.stmt) -> bool:
    """Whether it is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_checkers_and_the_interpreter_find_the_same_names_in_the_same_places() -> None:
    checkers = homes_for_checkers()
    assert sorted(celery5.__all__) == sorted(checkers)
    for name, home in checkers.items():
        assert vars(import_module(home))[name] is getattr(celery5, name), name


def test_all_names_come_with_a_star_and_are_listed() -> None:
    assert {*celery5.__all__} <= {*dir(celery5)}
    assert fresh("from celery5 import *; import celery5; print({*celery5.__all__} - {*globals()})") == "set()"


def test_importing_celery5_imports_nothing_of_it() -> None:
    assert fresh("import sys, celery5; print([n for n in sys.modules if n.startswith('celery5.')])") == "[]"


def test_a_name_that_was_asked_for_is_not_looked_up_again() -> None:
    assert fresh("import celery5; celery5.App; print('App' in vars(celery5))") == "True"


def test_task_is_the_decorator_whatever_was_imported_before() -> None:
    code = (
        "import celery5.tasks.task, celery5.app\nfrom celery5 import task\n"
        "@task\ndef f() -> None: ...\nprint(isinstance(f, celery5.tasks.Task))"
    )
    assert fresh(code) == "True"


def test_modules_of_public_names_need_no_import_of_their_own() -> None:
    assert fresh("import celery5; print(celery5.errors.Misconfigured.__name__)") == "Misconfigured"


class Ready(BaseHTTPRequestHandler):
    """Answers as a worker does that is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"worker": "w1"}')

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's word
        """Nothing."""


def test_a_probe_loads_what_it_needs_and_no_more() -> None:
    """Containers run it every few seconds: each module more is paid for again and again."""
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        code = (
            "import sys\nfrom celery5.cli.main import main\n"
            f"try: main(['health', '--port', '{server.server_port}'])\n"
            "except SystemExit as ended: print(ended.code)\n"
            "print(*sys.modules)"
        )
        said, ended, loaded = fresh(code).splitlines()
    assert said.endswith("w1 is ready")
    assert ended == "0"
    modules = set(loaded.split())
    assert {module for module in modules if module.split(".")[0] == "celery5"} == {
        f"celery5{name}" for name in OF_A_PROBE
    }
    assert modules & HEAVY == set()


def test_the_command_knows_a_member_by_what_a_controller_sets() -> None:
    assert CHILD == PARENT_VARIABLE


def test_each_command_is_in_its_module_and_in_the_help() -> None:
    said = fresh("from celery5.cli.main import main; main(['--help'])")
    for name, summary in COMMANDS.items():
        command = import_module(get_module_name(name)).__dict__[name]
        assert command.name == name
        assert command.get_short_help_str(200) == summary
        assert f"\n  {name} " in said
        assert summary[:30] in said


def test_help_of_celery5_imports_no_command() -> None:
    code = "import sys\nfrom celery5.cli.main import cli\ncli.main(['--help'], standalone_mode=False)\n"
    modules = "('celery5.cli.commands.', 'celery5.cli.standalone.')"
    said = fresh(f"{code}print([name for name in sys.modules if name.startswith({modules})])")
    assert said.endswith("[]")


def test_commands_made_from_operations_import_no_engine_for_help() -> None:
    modules = ("alert", "audit", "bulk", "metrics", "queue", "schedule")
    imports = "\n".join(f"import celery5.cli.commands.{name}" for name in modules)
    loaded = fresh(f"{imports}\nimport sys; print(*sys.modules)").split()
    engine = {"celery5.app", "celery5.application", "celery5.broker", "trio", "asyncio", "redis"}
    assert engine.isdisjoint(loaded)


def test_workers_and_producers_start_without_redis_py() -> None:
    """Its import takes as long as that of Trio, and only connections of asyncio use it."""
    code = "import sys, celery5.processes.worker, celery5.broker.drivers.blocking; print(*sys.modules)"
    assert "redis" not in fresh(code).split()


def test_who_mistypes_a_command_is_compared_with_all_of_them() -> None:
    context = cli.make_context("celery5", [], resilient_parsing=True)
    assert cli.get_command(context, "helth") is None
    assert sorted(cli.commands) == sorted(COMMANDS)


def test_a_lazy_module_keeps_an_attribute_that_is_set_before_it_is_used() -> None:
    code = "from celery5.processes.lifecycle import fleet; fleet.KILL_AFTER = 0.2; dir(fleet); print(fleet.KILL_AFTER)"
    assert fresh(code) == "0.2"


def test_the_names_of_a_lazy_module_are_those_of_the_loaded_one() -> None:
    code = "from celery5.streams import lags; print('GroupLag' in vars(lags))"
    assert fresh(code) == "True"


def test_the_scripts_of_lazy_modules_are_among_those_that_a_user_may_call() -> None:
    """`celery5 acl` loads none of them before."""
    code = "from celery5.broker.permissions import load_scripts; print(*sorted(load_scripts()))"
    assert {"settle", "erase", "probe_permissions"} <= set(fresh(code).split())


LATE_PACKAGE = """
from celery5.lazy_modules import load_lazily

load_lazily(__name__, "slow")
"""
SLOW_MODULE = """
import sys, time

print("loaded")
getattr(sys.modules[__name__], "nothing", None)
time.sleep(0.2)
NUMBER = 7
"""
TWO_THREADS = """
import inspect, sys, threading
from late import slow

inspect.unwrap(slow), getattr(slow, "__path__", None)
print("looked at")
found = []
threads = [threading.Thread(target=lambda: found.append(slow.NUMBER)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(found)
"""


def test_a_lazy_module_is_loaded_once_and_whole_when_several_threads_use_it_first(tmp_path: Path) -> None:
    """And not when somebody looks at all modules."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text(LATE_PACKAGE)
    (tmp_path / "late" / "slow.py").write_text(SLOW_MODULE)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{TWO_THREADS}"
    assert fresh(code).splitlines() == ["looked at", "loaded", "[7, 7, 7, 7]"]
