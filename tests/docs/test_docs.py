"""The documentation holds: its Python runs and prints what it says, its links resolve, every public name is there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import NOTHING, fields
from sparseprefill.adapters.cli.commands import app
from typer.testing import CliRunner

import sparseprefill as sp
from docs.pages import ROOT, SKIP, anchors, blocks, headings, links, name, pages, repeated, section
from helpers.harness_tasks import few_words
from sparseprefill import errors, method, stages, testing
from sparseprefill.breakeven.gate import TABLE

PAGES = pages()
API = ROOT / "docs" / "api"
METHODS = ROOT / "docs" / "methods"
PLUGINS = [record for record in sp.default_registry().plugins() if record.distribution == "sparseprefill"]
OURS = {method for record in PLUGINS for method in record.methods}
SOURCES = "\n".join(
    path.read_text() for folder in ("core", "plugins", "adapters") for path in sorted((ROOT / folder).rglob("*.py"))
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HEADINGS = ("Parameters", "What it computes", "Differences from the paper", "Grain")


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory to run in; plugins that a page registers are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TABLE, raising=False)  # a reader has not set it
    few_words(monkeypatch)  # the harness starts sooner
    before = set(sp.default_registry().plugins())
    with torch.random.fork_rng():
        yield
    for record in set(sp.default_registry().plugins()) - before:
        sp.default_registry().unregister(record.name)


WITH_PYTHON = [
    page
    for page in PAGES
    if "examples" not in page.parts and any(block.runs for block in blocks(page.read_text()))  # those are not installed
]


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_blocks_run_and_print_what_the_page_says(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for block in blocks(page.read_text()):
        if not block.runs:
            continue
        code = compile("\n" * (block.line - 1) + block.code, name(page), "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None:
            shown = [line.rstrip() for line in printed.getvalue().splitlines()]
            told = f"{name(page)}:{block.line} prints what stands on the right: put it below <!-- output -->"
            assert [line.rstrip() for line in block.output.splitlines()] == shown, told


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_quoted_files_are_quoted_as_they_are(page: Path) -> None:
    quotes = [block for block in blocks(page.read_text()) if block.file is not None]
    changed = [block.line for block in quotes if block.code not in (ROOT / "docs" / str(block.file)).read_text()]
    assert changed == [], "copy the file that <!-- file: --> names into the blocks at these lines, word for word"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in links(page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        there = file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(file.read_text()))
        broken += [] if there else [target]
    assert broken == [], "no such file, or no such heading in it: correct these links"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_skipped_block_says_why(page: Path) -> None:
    text = page.read_text()
    comments = re.findall(r"^\s*<!-- skip.*$", text, flags=re.M)
    assert [block.skip for block in blocks(text) if block.skip] == [
        match["reason"] for comment in comments if (match := SKIP.fullmatch(comment.strip()))
    ]
    assert len(comments) == sum(block.skip is not None for block in blocks(text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_says_everything_once(page: Path) -> None:
    assert repeated(page.read_text()) == [], "say these once, and link to them from the other place"


@pytest.mark.parametrize(
    ("more", "twice"),
    [
        ("## One\n\nmore", ["# Page / One"]),
        ("## Two\n\nA first\nparagraph.", ["A first paragraph."]),
        ("## Two\n\n- Another\n- An item,\n  wrapped", ["- An item, wrapped"]),
        ("## Two\n\n| x | y |\n|---|---|\n| a | b |\n| c | d |\n| e | f |", ["| a | b |\n| c | d |\n| e | f |"]),
        ("## Two\n\n| x | y |\n|---|---|\n| a | b |\n| c | d |", []),
        ("## Two\n\n### One\n\n```\ncode\n```\n\n<!-- output -->\n```\ncode\n```", []),
    ],
    ids=["section", "paragraph", "item", "rows", "some rows", "code"],
)
def test_what_stands_twice_is_found(more: str, twice: list[str]) -> None:
    begun = "# Page\n\n## One\n\nA first paragraph.\n\n- An item, wrapped\n\n"
    table = "| x | y |\n|---|---|\n| a | b |\n| c | d |\n| e | f |\n\n<!-- output -->\n```\ncode\n```\n\n"
    assert repeated(begun + table + more) == twice


def entries(page: Path) -> set[str]:
    """Names that a page explains: in a heading, or in backticks at the start of a list or table entry."""
    text = page.read_text()
    listed = re.findall(r"^\s*(?:[-*] |\| ?)`(?:\w+\.)*(\w+)", text, flags=re.M)
    return set(listed) | {word for title in headings(text) for word in re.findall(r"\w+", title)}


def public() -> list[str]:
    return [*sp.__all__, *testing.__all__]


def shown(*pages: str) -> set[str]:
    """Names whose docstrings the API pages show."""
    texts = [(API / f"{page}.md").read_text() for page in pages] or [page.read_text() for page in API.glob("*.md")]
    return {name for text in texts for name in re.findall(r"^::: (?:\w+\.)*(\w+)$", text, flags=re.M)}


def test_every_public_name_is_on_an_api_page() -> None:
    assert sorted(set(public()) - shown()) == [], "add a line ::: sparseprefill.NAME to a page under docs/api/"


def test_every_error_is_on_its_api_page() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    missing = sorted({kind.__name__ for kind in kinds} - shown("errors"))
    assert missing == [], "add a line ::: sparseprefill.NAME to docs/api/errors.md"


def test_every_hook_is_explained_to_plugin_authors() -> None:
    hooks = {hook for hook in vars(method) if hook.startswith("sparseprefill_")}
    assert sorted(hooks - entries(ROOT / "docs" / "write-a-plugin.md")) == [], "name them in docs/write-a-plugin.md"
    assert sorted(hooks - shown("functions")) == [], "add a line ::: sparseprefill.method.NAME to docs/api/functions.md"


def test_every_refiner_is_in_the_configurations_table() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    missing = [name for name in sp.default_registry().refiners() if f"\n| `{name}` | " not in text]
    assert missing == [], "add a row | `NAME` | ... to the table of refiners in docs/config.md"


def test_every_stage_method_says_what_it_does() -> None:
    """What has no docstring is not on the site."""
    interfaces = (stages.PatternEstimator, stages.MaskRefiner, stages.SparseExecutor, stages.Corrector, stages.Observer)
    for interface in interfaces:
        assert interface.__name__ in shown("pipelines")
        verbs = stages.missing(object(), interface)
        assert [verb for verb in verbs if not getattr(interface, verb).__doc__] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_and_modules_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    files = re.findall(r"`((?:core|plugins|adapters)/[\w/]+\.py)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == [], "these files are gone: correct their names"
    gone = [module for module in re.findall(r"`((?:sparseprefill|lab)(?:\.\w+)+)`", text) if not there(module)]
    assert gone == [], "these modules are gone: correct their names"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_that_a_page_runs_are_there(page: Path) -> None:
    """Those of the package from anywhere, those of the repository in its folder tests."""
    run = set(re.findall(r"-m ((?:sparseprefill|lab|helpers|mutation)\b[\w.]*)", page.read_text()))
    found = {module: find_spec(module) for module in run}
    assert [module for module, spec in found.items() if spec is None] == []
    packages = [module for module, spec in found.items() if spec and spec.submodule_search_locations is not None]
    assert [module for module in packages if find_spec(f"{module}.__main__") is None] == []


def there(dotted: str) -> bool:
    """Whether a dotted name is a module, or something that one holds. Hosts that are not installed count as there."""
    head, _, last = dotted.rpartition(".")
    try:
        if find_spec(dotted) is not None:
            return True
    except ModuleNotFoundError:
        pass
    try:
        return hasattr(import_module(head), last)
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("sparseprefill")


def test_the_page_of_the_break_even_table_names_what_is_read() -> None:
    """Its schema and version, and every field of the file."""
    (block,) = [one.code for one in blocks((ROOT / "docs" / "breakeven.md").read_text()) if "schema," in one.code]
    named = re.search(r'^schema, version +"([\w.]+)", (\d+)$', block, flags=re.M)
    assert named is not None
    (file, *_) = sorted((ROOT / "core" / "sparseprefill" / "breakeven" / "tables").glob("*.json"))
    facts = json.loads(file.read_text())
    read = sp.BreakEven.of({**facts, "schema": named[1], "version": int(named[2])})
    assert json.loads(read.to_json()) == facts
    words = set(re.findall(r"[a-z_]+", block))
    shape = facts["shapes"][0]
    assert {*facts, *facts["device"], *shape, *shape["points"][0], *shape["points"][0]["executor"][0]} <= words


@pytest.mark.parametrize("method", sorted(OURS))
def test_every_method_has_its_page(method: str) -> None:
    page = METHODS / f"{method}.md"
    assert page.is_file(), f"write docs/methods/{method}.md, with the headings {method}, {', '.join(HEADINGS)}"
    text = page.read_text()
    assert headings(text)[0] == method, "the page begins with the method's name"
    assert sorted(set(HEADINGS) - set(headings(text))) == [], f"add these headings to {name(page)}"


@pytest.mark.parametrize("method", sorted(OURS))
def test_every_parameter_is_on_its_methods_page_with_its_default(method: str) -> None:
    config = sp.default_registry().get(method).config
    table = section((METHODS / f"{method}.md").read_text(), "Parameters")
    for attribute in fields(config):
        default = "" if attribute.default is NOTHING else f"`{attribute.default!r}`"
        row = f"| `{attribute.alias}` | {default} |"
        assert row in table, f"add the row {row} to the table of Parameters in docs/methods/{method}.md"


def test_skipping_is_by_the_same_default_as_a_method_and_as_a_refiner() -> None:
    assert sp.SkipSoftmax().below == sp.default_registry().get("skip-softmax").config().skip_below


def test_every_page_of_a_method_belongs_to_a_method() -> None:
    stems = {page.stem for page in METHODS.glob("*.md")}
    assert stems == OURS, "each page under docs/methods/ is named as a method: take it out, or register the method"


def test_the_changelog_knows_the_version() -> None:
    titles = headings((ROOT / "CHANGELOG.md").read_text())
    assert any(title.startswith(sp.__version__) for title in titles), f"begin a section ## {sp.__version__} there"


def test_contributing_says_how_to_run_one_test() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"^pytest (?:-\S+ )*(tests/\S+\.py)::(\w+)", page, flags=re.M)
    assert named
    assert [one for file, one in named if f"def {one}(" not in (ROOT / file).read_text()] == []


def test_contributing_lists_every_environment() -> None:
    """`vllm-29` stands for those of older versions, and one per Python for all."""
    defined = set()
    for head in re.findall(r"^\[testenv:(.+)\]$", (ROOT / "tox.ini").read_text(), flags=re.M):
        start, brace, rest = head.partition("{")
        defined |= {start + one for one in rest.rstrip("}").split(",")} if brace else {head}
    listed = set(re.findall(r"^\| `tox -e (\S+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M))
    told = "CONTRIBUTING's table has a row for each environment of tox.ini, and no others"
    assert defined - {"vllm-30", "vllm-31"} == listed - {"py311"}, told


def test_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in links(index.read_text())}
    wanted = {page for page in PAGES if page.is_relative_to(index.parent) and page != index}
    wanted -= set((ROOT / "docs" / "examples").rglob("*.md"))
    assert sorted(name(page) for page in wanted - linked) == [], "link to these pages in docs/index.md"


def refusals(text: str) -> Iterator[tuple[str, str]]:
    """Commands in samples of a terminal whose whole answer is an error, and that error."""
    for sample in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S):
        lines = sample.splitlines()
        yield from ((line[2:], said) for line, said in pairwise(lines) if line[:2] == "$ " and said[:7] == "error: ")


REFUSALS = [pytest.param(*one, id=f"{name(page)}: {one[0]}") for page in PAGES for one in refusals(page.read_text())]


@pytest.mark.parametrize(("command", "said"), REFUSALS)
def test_a_command_is_refused_in_the_words_of_the_page(command: str, said: str) -> None:
    program, *given = shlex.split(command)
    assert program == "sparseprefill"
    done = CliRunner().invoke(app, given)
    assert [said] == done.stderr.splitlines()


def test_the_pages_say_where_times_come_from_in_one_voice() -> None:
    """Some were measured on an H100: no page says that none was."""
    measured = [name(page) for page in PAGES if re.search(r"(one|an) H100", page.read_text())]
    assert {"docs/real-models-each.md", "docs/performance.md"} <= set(measured)
    assert [name(page) for page in PAGES if re.search(r"H100\s+was\s+not", page.read_text())] == []


def test_what_is_missing_is_installed_from_a_clone() -> None:
    """No index has the package, so no error sends anybody there."""
    assert errors.extra("hf") == 'pip install -e ".[hf]" in a clone of sparseprefill'
    assert set(re.findall(r"extra\(['\"](\w+)['\"]\)", SOURCES)) == {"hf", "eval"}
    assert re.findall(r"pip install [^\n]*sparseprefill\[.*", SOURCES) == []
    assert set(EXTRAS) >= {"hf", "eval", "cli", "vllm", "sglang"}


def test_rowmax_says_what_it_guarantees_for_each_precision() -> None:
    page = (METHODS / "rowmax.md").read_text()
    part = page[page.index("### What is guaranteed") : page.index("## Cost")]
    for word in ('`"exact"`', '`"fp8"`', '`"auto"`', "python -m lab.rowmax"):
        assert word in part
    assert page.count("no\ncolumn is dropped") == 1
