"""Commands that make a table of a model, one for each method that needs one (`Method.table`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from attrs import fields

from sparseprefill import structure
from sparseprefill.errors import MethodCollisionError, ParameterError, told
from sparseprefill.profiles.table import NeededTable
from sparseprefill.registry import Registry

from . import options, render
from .catalog import parameters
from .group import CommandError, Group, check_writable, write
from .render import Table

ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}
SEED = "seed"
"""The option of the command that chooses the samples; settings with such a field are given it, too."""


class WithTables(Group):
    """The commands, and behind them those that make tables: plugins are asked for them when somebody wants to know."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all."""
        self._find()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, or None."""
        if cmd_name not in self.commands:
            self._find()
        return super().get_command(ctx, cmd_name)

    def _find(self) -> None:
        same: dict[str, dict[str, NeededTable]] = {}
        for method, table in needed():
            same.setdefault(table.command, {})[method] = table
        for name, tables in same.items():
            if name in self._own:
                made = f"the command that makes the table of {' and '.join(tables)}"
                render.note(f"{made} cannot be {name}, which is this library's: rename it")
            elif name not in self.commands:
                self.commands.update(_commands(name, tables))

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset(self.commands)


def needed() -> Iterator[tuple[str, NeededTable]]:
    """The tables that installed methods need, with their names, found without torch; none where two plugins collide."""
    registry = Registry(kinds=("method",))
    try:
        registry.load_entry_points()
    except MethodCollisionError:  # every command that builds something says so
        return
    yield from ((name, one.table) for name, one in registry.methods().items() if one.table is not None)


def short(text: str) -> str:
    """The first paragraph of a docstring in one line: whole, where typer would cut it off with dots."""
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def _commands(name: str, tables: Mapping[str, NeededTable]) -> Mapping[str, Any]:
    """The command of a name; one that says why there is none, if several claim it or its options do not work.

    tables: by method, those whose command it is.
    """
    methods = " and ".join(tables)
    if len(tables) > 1:
        return _refusing(name, f"the tables of {methods} have the same command: rename one, or uninstall its package")
    (table,) = tables.values()
    made = typer.Typer(rich_markup_mode=None, add_completion=False)
    try:
        made.command(name, short_help=short(table.summary))(_command(table))
        return _grouped(made)
    except Exception as error:  # of a stranger's settings: the other commands work
        return _refusing(name, f"the settings for the table of {methods}: {told(error)}")


def _refusing(name: str, reason: str) -> Mapping[str, Any]:
    made = typer.Typer(rich_markup_mode=None, add_completion=False)

    @made.command(name, short_help=f"not there: {reason}", context_settings=ANYTHING)
    def run() -> None:
        raise CommandError(f"{name}: {reason}")

    return _grouped(made)


def _grouped(made: typer.Typer) -> Mapping[str, Any]:
    made.callback()(lambda: None)  # with one command alone typer makes no group
    found: Mapping[str, Any] = typer.main.get_group(made).commands
    return found


def _command(table: NeededTable) -> Callable[..., None]:
    """The command of a table, with the options of its settings among those that all have."""

    def run(**given: Any) -> None:
        _run(table, **given)

    options = list(_options(table))
    run.__doc__ = table.summary
    run.__annotations__ = {one.name: one.annotation for one in options}
    vars(run)["__signature__"] = inspect.Signature(options)
    return run


def _options(table: NeededTable) -> Iterator[inspect.Parameter]:
    kinds = get_type_hints(table.settings)
    known = {one.name: one for one in parameters(table.settings)}
    helps = {name: f"{one.doc[:1].upper()}{one.doc[1:].rstrip('.')}: {one.bounds}." for name, one in known.items()}

    def one(name: str, default: Any, kind: Any, **more: Any) -> inspect.Parameter:
        annotation = Annotated[kind, typer.Option(*more.pop("names", ()), **more)] if more else kind
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    yield one("model", None, options.Model)
    least = 1 if hasattr(table.settings, "check") else 256  # which says it by its own options
    yield one("tokens", table.tokens, int, min=least, help="Tokens of a sample.")
    yield one("samples", table.samples, int, min=1, help="Samples to average over.")
    for name, parameter in known.items():
        if name != SEED:
            yield one(name, parameter.default, kinds[name], help=helps[name])
    yield one(SEED, 0, int, min=0, max=options.SEEDS, help=helps.get(SEED, "Chooses the samples."))
    file = Path(f"{table.parameter}.json")
    yield one("output", file, Path, names=("--output", "-o"), help="Write the table to this file.")
    yield one("device", "auto", options.Device)
    yield one("dtype", options.Dtype.AUTO, options.Type)
    yield one("threads", 1, options.Threads)
    yield one("json", False, options.Json)


def _run(
    table: NeededTable,
    *,
    model: str | None,
    tokens: int,
    samples: int,
    seed: int,
    output: Path,
    device: str,
    dtype: options.Dtype,
    threads: int,
    json: bool,
    **own: Any,
) -> None:
    if table.lacking:
        raise CommandError(f"{table.command} needs {table.lacking}")
    from ..demo.tasks import key_value_prompts
    from .progress import bars
    from .setup import Place, Source, identity_of

    structure.check_finite(own, "")
    check_writable("--output", output)
    place = Place.of(device, dtype.value, threads)
    names = [one.name for one in fields(table.settings)]
    settings = table.settings(**own, **({SEED: seed} if SEED in names else {}))
    with bars(1) as shown, place.threaded():
        source = Source.of(model, place)
        source.check_tokens(tokens)
        try:
            if hasattr(settings, "check"):
                settings.check(tokens)
            prompts = key_value_prompts(source.tokenizer, tokens, samples, seed)
        except (ValueError, ParameterError) as error:
            raise CommandError(f"--tokens {tokens}: {error}") from error
        found = source.load()
        from ..huggingface.reader import Reader

        identity = identity_of(found, model)
        with shown.contender(table.of) as progress:
            made = table.make(Reader(found, identity), prompts, settings, progress)
    write("--output", output, made.table.to_json())
    if json:
        render.write_json({"model": identity.name, **made.facts, "useless": made.useless, "output": output})
        return
    title = f"{made.measured} of {identity.name}, {samples} samples of {tokens:,} tokens"
    render.show(
        Table(title=title, heads=made.heads, rows=made.rows, words=made.words, drop=made.drop, remarks=made.remarks)
    )
    if made.useless:
        render.line(f"the method can do nothing with this table: {made.useless}")
    render.line(f"table: {output}", whole=True)
