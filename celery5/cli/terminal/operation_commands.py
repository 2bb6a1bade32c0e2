"""Make click commands from operations: arguments, flags, `--json`, `--yes`, and what a result looks like."""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_origin

import click
import msgspec

from celery5.cli.terminal.errors import EXIT_FAILED, skip_unreachable
from celery5.cli.terminal.flags import BoundedText, Duration
from celery5.cli.terminal.output import (
    CommandGroup,
    echo,
    echo_hint,
    format_fields,
    format_table,
    format_time,
    to_json,
    to_one_line,
)
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerError, Misconfigured
from celery5.operations.columns import ResultColumn
from celery5.operations.operation import DRY_RUN, Changed, NotFound, Operation
from celery5.operations.parameters import Parameter, list_parameters
from celery5.protocol.durations import format_duration, format_shortest
from celery5.protocol.text_values import parse_json, parse_json_array, parse_json_object

if TYPE_CHECKING:
    from celery5.app import App

Row = Callable[[Any], Mapping[str, object]]


class Started(NamedTuple):
    """A command that begins."""

    app: "App"
    asked: Any
    wants_json: bool
    # The values of the flags of the view.
    flags: Mapping[str, Any]
    # Whether it must ask before it changes something.
    asks: bool = False


class Finished(NamedTuple):
    """A command that has printed its result."""

    app: "App"
    asked: Any
    result: Any
    wants_json: bool
    # The values of the flags of the view.
    flags: Mapping[str, Any]
    # The brokers that could not be reached, with their errors.
    unreachable: Mapping[str, BrokerError]
    # What `before` of the view has returned.
    before: Any = None


@dataclass(frozen=True)
class CommandView:
    """What a command shows of an operation's result, beside what follows from the operation.

    Without a view, rows and fields are those of the result, and a change is told in its own words.
    """

    # The fields of one row of a table, or of a result that is no list; default: the columns of the operation.
    row: Row | None = None
    # Does all of it and shows it, in place of the operation: what goes on for long is shown while it goes on.
    run: Callable[[Started], object] | None = None
    # Prints all that there is to say, instead of what follows; it is told of `--json`.
    show: Callable[[Finished], object] | None = None
    # What a change has done, with the names of its parameters: `{id}: cancelled`. Default: its own words.
    done: str = ""
    # What is shown of a list without rows.
    empty: str = "none"
    # The whole text, instead of a table or fields; '' for none.
    text: Callable[[Any], str] | None = None
    # What `--json` prints; default: the result, and of a change what was changed.
    value: Callable[[Any], object] | None = None
    # Waits for what has only begun; returns what is shown in place of the result.
    follow: Callable[["App", Any], Any] | None = None
    # Called at the end: hints, or an exit code.
    after: Callable[[Finished], object] | None = None
    # Flags that the operation does not have, for `after`.
    flags: Sequence[click.Option] = ()
    # What a change does, to ask before it: `revoke all jobs that wait on mail`. None: as the operation says of itself.
    would: Callable[[Any], str] | None = None
    # Whether a change that a page asks about is asked about here, too. One that destroys always is.
    asks: bool = True
    # The help of the command, where there is more to say; default: the operation's summary.
    help: str = ""
    # Whether it goes on without brokers that cannot be reached, and warns of them; or what says so of its parameters.
    skips_unreachable: bool | Callable[[Any], bool] = False
    # Whether it needs the application's code; or what says so of the values of its flags and arguments.
    needs_code: bool | Callable[[Mapping[str, Any]], bool] = False
    # Whether an argument may be a negative number, which click else takes for a flag.
    takes_negative_numbers: bool = False
    # Defaults that are not those of the operation, by parameter.
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Parameters that are given otherwise than follows from the operation, by name; None for one that is not given.
    parameters: Mapping[str, click.Parameter | None] = field(
        default_factory=dict[str, click.Parameter | None]
    )
    # Returns the values of the operation's parameters from those that are given, and from the flags of the view.
    prepare: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    # Called before it is done, with the errors of the brokers that cannot be reached; what it returns is in `Finished`.
    before: Callable[["App", Any, Mapping[str, BrokerError]], object] | None = None
    # The result where there is nothing that could do it; default: an error.
    missing: object = None


def make_group(
    name: str, text: str, operations: Sequence[Operation], views: Mapping[str, CommandView]
) -> click.Group:
    """Return a group with a command for each operation of the noun.

    Args:
        name: The noun.
        text: The help of the group.
        operations: The operations; those of other nouns are left out.
        views: What commands show, by their verbs.
    """
    group = CommandGroup(name, help=text, no_args_is_help=False)
    for operation in operations:
        if operation.noun == name:
            group.add_command(make_command(operation, views.get(operation.verb, CommandView())))
    return group


def make_group_of(noun: str) -> click.Group:
    """Return the group of a noun whose commands need no view."""
    from celery5.operations.table import OPERATIONS

    operations = [operation for operation in OPERATIONS.values() if operation.noun == noun]
    text = sys.modules[operations[0].function.__module__].__doc__ or ""
    return make_group(noun, text.strip(), operations, {})


def make_command(operation: Operation, view: CommandView) -> click.Command:
    """Return the command of an operation."""
    parameters = [
        replace(parameter, default=view.defaults.get(parameter.name, parameter.default))
        for parameter in list_parameters(operation.parameters)
        if view.parameters.get(parameter.name, True)
    ]
    options = [
        *(view.parameters.get(parameter.name) or _make_parameter(parameter) for parameter in parameters),
        *view.flags,
    ]
    asks = operation.destroys or (operation.access == "danger" and view.asks)
    if asks:
        options.append(click.Option(["--yes"], is_flag=True, help="Do not ask."))
    options.append(click.Option(["--json", "wants_json"], is_flag=True, help="For programs."))

    @click.pass_obj
    def run(target: Target, /, *, wants_json: bool, **values: Any) -> None:
        needs_code = view.needs_code
        app = target.load(needs_code=needs_code(values) if callable(needs_code) else needs_code)
        flags = {flag.name: values[flag.name] for flag in view.flags if flag.name}
        given = {parameter.name: _parse(parameter, values[parameter.name]) for parameter in parameters}
        given = {name: value for name, value in given.items() if value is not None}
        with _naming_flags(parameters):
            asked = operation.make(view.prepare(given, flags) if view.prepare else given)
        with _reaching(app, view, asked, wants_json=wants_json) as errors, _naming_flags(parameters):
            must_ask = asks and not (values["yes"] or given.get("dry_run"))
            if view.run is not None:
                view.run(Started(app, asked, wants_json, flags, must_ask))
                return
            if must_ask:
                _confirm(app, operation, asked, view)
            before = view.before(app, asked, errors) if view.before else None
            result = _perform(app, operation, asked, view)
            finished = Finished(app, asked, result, wants_json, flags, errors, before)
            _show(operation, view, finished)
            _end(view, finished)

    return click.Command(
        operation.verb,
        callback=run,
        params=[*options],
        help=view.help or operation.summary,
        context_settings={"ignore_unknown_options": view.takes_negative_numbers},
    )


@contextmanager
def _reaching(
    app: "App", view: CommandView, asked: Any, *, wants_json: bool
) -> Generator[Mapping[str, BrokerError], None, None]:
    """Leave out brokers that cannot be reached where the view does so; yield their errors, by name."""
    skips = view.skips_unreachable
    if not (skips(asked) if callable(skips) else skips):
        yield {}
        return
    with skip_unreachable(app, wants_json=wants_json, queues=get_queues(asked)) as reached:
        yield reached.errors


def get_queues(asked: Any) -> list[str]:
    """Return the queues that were asked for, each maybe a list with commas; none for all."""
    queues: str | list[str] = getattr(asked, "queue", None) or []
    texts = [queues] if isinstance(queues, str) else queues
    return [name for text in texts for name in text.split(",") if name]


def _perform(app: "App", operation: Operation, asked: Any, view: CommandView) -> Any:
    try:
        result = perform(app, operation, asked)
    except NotFound:
        if view.missing is None:
            raise
        return view.missing
    return result if view.follow is None else view.follow(app, result)


def perform(app: "App", operation: Operation, asked: Any) -> Any:
    """Return the result of an operation."""
    import trio  # when a command runs, and not for its help

    return trio.run(operation.perform, app, asked)


@contextmanager
def _naming_flags(parameters: Sequence[Parameter]) -> Generator[None, None, None]:
    """Name flags in errors where an operation names parameters: of `cron` it says --cron."""
    try:
        yield
    except Misconfigured as error:
        text = str(error)
        for parameter in parameters:
            text = text.replace(f"`{parameter.name}`", _get_flag(parameter))
        if type(error) is Misconfigured and text != str(error):
            raise Misconfigured(text) from error
        raise


def _get_flag(parameter: Parameter) -> str:
    return parameter.flag or f"--{parameter.name.replace('_', '-')}"


def _show(operation: Operation, view: CommandView, finished: Finished) -> None:
    """Print the result."""
    result = finished.result
    if view.show is not None:
        view.show(finished)
    elif finished.wants_json:
        echo(to_json(_get_value(view, result)))
    elif not (isinstance(result, Changed) and result.has_failed):
        echo_hint(_format(operation, view, finished))


def _end(view: CommandView, finished: Finished) -> None:
    result = finished.result
    if view.after is not None:
        view.after(finished)
    if isinstance(result, Changed) and result.failure:
        echo_hint(f"Error: {to_one_line(result.failure)}", err=True)
        click.get_current_context().exit(EXIT_FAILED)


def _confirm(app: "App", operation: Operation, asked: Any, view: CommandView) -> None:
    """Ask before an operation that destroys, or changes many things. Raises Misconfigured where nobody can answer."""
    would = view.would(asked) if view.would else operation.summary.rstrip(".")
    would = would[0].lower() + would[1:]
    count = ""
    if "dry_run" in asked.__struct_fields__:
        preview: Changed = perform(app, operation, msgspec.structs.replace(asked, dry_run=True))
        count = f" ({preview.count} now)"
    check_answerable(f"{would}{count}")
    click.confirm(f"{would[0].upper()}{would[1:]}{count}?", err=True, abort=True)


def check_answerable(would: str) -> None:
    """Raise Misconfigured where there is no terminal to ask at.

    Args:
        would: What would be done: `delete dead jobs for good`.
    """
    if not sys.stdin.isatty():
        raise Misconfigured(f"this would {would}: add --yes")


def _get_value(view: CommandView, result: Any) -> object:
    if view.value is not None:
        return view.value(result)
    return result.value if isinstance(result, Changed) and result.value is not None else result


def _format(operation: Operation, view: CommandView, finished: Finished) -> str:
    """Return a result for people."""
    result = finished.result
    if view.text is not None:
        return view.text(result)
    row = view.row or partial(make_row, operation.shown_columns)
    if isinstance(result, Changed):
        if not view.done:
            return to_one_line(result.summary)
        return f"{DRY_RUN if result.dry_run else ''}{to_one_line(_describe(view, finished))}"
    if isinstance(result, list | tuple):
        return format_table([row(item) for item in cast("list[Any]", result)], empty=view.empty)
    return view.empty if result is None else format_fields(row(result))


def _describe(view: CommandView, finished: Finished) -> str:
    return view.done.format_map(msgspec.structs.asdict(finished.asked))


def make_row(columns: Sequence[ResultColumn], item: Any) -> dict[str, object]:
    """Return the cells of one item of a result, by the names of their columns."""
    return {column.name: _format_value(column, column.get(item)) for column in columns}


def _format_value(column: ResultColumn, value: Any) -> object:
    match column.kind:
        case "time":
            return format_time(value or 0)
        case "duration":
            return "" if value is None else format_duration(value)
        case _:
            return "" if value is None else value


def _make_parameter(parameter: Parameter) -> click.Parameter:
    """Return the argument or the flag of a parameter."""
    if not (parameter.required or parameter.is_argument) or parameter.is_option:
        flag, settings = _describe_flag(parameter)
        return click.Option([flag, parameter.name], **settings)
    is_list = parameter.widget == "lines"
    metavar = parameter.metavar
    if parameter.required:
        metavar = metavar or ("" if parameter.widget == "select" else parameter.name.upper())
    elif metavar:
        metavar = f"[{metavar}]{'...' if is_list else ''}"
    return click.Argument(
        [parameter.name],
        metavar=metavar or None,  # click's own has brackets, dots and choices
        type=_choose_type(parameter),
        nargs=-1 if is_list else 1,
        required=parameter.required,
    )


def _describe_flag(parameter: Parameter) -> tuple[str, dict[str, Any]]:
    """Return the flag of a parameter, and what click is told of it."""
    help_line = parameter.help.replace("`", "'")
    if parameter.widget == "checkbox":
        return _get_flag(parameter), {"is_flag": True, "default": parameter.default, "help": help_line}
    is_list = parameter.widget == "lines"
    has_default = parameter.default not in (None, "", 0.0) and parameter.widget not in ("lines", "json")
    settings = {"default": _format_default(parameter)} if has_default else {}  # None would be a default, too
    return _get_flag(parameter), {
        "type": _choose_type(parameter),
        "multiple": is_list,
        "required": parameter.required,
        "show_default": has_default,
        "metavar": parameter.metavar or ("JSON" if parameter.widget == "json" else None),
        "help": f"{help_line} May be given several times." if is_list else help_line,
        **settings,
    }


def _format_default(parameter: Parameter) -> object:
    return format_shortest(parameter.default) if parameter.widget == "duration" else parameter.default


def _choose_type(parameter: Parameter) -> Any:
    match parameter.widget:
        case "duration":
            return Duration(parameter.least, parameter.most)
        case "select":
            return click.Choice(parameter.choices)
        case "number" if parameter.kind is int:
            least, most = (
                None if bound is None else int(bound) for bound in (parameter.least, parameter.most)
            )
            return click.IntRange(least, most)
        case "number":
            return click.FloatRange(parameter.least, parameter.most)
        case "text" | "lines" if (parameter.shortest, parameter.longest) != (None, None):
            return BoundedText(parameter.shortest, parameter.longest)
        case _:
            return str


def _parse(parameter: Parameter, value: Any) -> Any:
    """Return the value of a parameter from that of its argument or flag; None when it was not given."""
    flag = _get_flag(parameter)
    match parameter.widget:
        case "lines":
            return list(value) or None
        case "json" if isinstance(value, str):
            return _parse_json(get_origin(parameter.kind), value, flag)
        case "select" if value is not None:
            return msgspec.convert(value, parameter.kind, strict=False)
        case _:
            return value


def _parse_json(kind: Any, text: str, flag: str) -> object:
    if kind is list:
        return parse_json_array(text, flag)
    return parse_json_object(text, flag) if kind is dict else parse_json(text, flag)
