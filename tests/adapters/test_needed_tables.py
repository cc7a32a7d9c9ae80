"""A stranger's method with a table: it is read wherever parameters are, checked, and made by a command of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from sparseprefill.adapters.cli import options, tables
from sparseprefill.adapters.cli.commands import app
from sparseprefill.adapters.demo.tasks import key_value_prompts
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.identity import identity
from sparseprefill.adapters.serving.tensor_parallel import LocalRegistry
from typer.testing import CliRunner, Result

import sparseprefill as sp
from helpers import table_plugin
from helpers.correctors import blending
from helpers.table_plugin import TABLE, BandTable
from sparseprefill.errors import SparsePrefillError
from sparseprefill.profiles.identity import ModelIdentity

TESTS = Path(__file__).parents[1]
MODEL = ModelIdentity(name="tiny", architecture="Tiny", layers=2, heads=4, kv_heads=2, head_dim=16, digest="01")


@pytest.fixture
def registry() -> Iterator[sp.Registry]:
    known = sp.default_registry()
    known.register(table_plugin, "banded")
    yield known
    known.unregister("banded")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bands.json"
    path.write_text(BandTable(bands=(32, 64), model=MODEL).to_json())
    return path


def density(pipeline: Any, layer: int = 0, heads: int = 4) -> float:
    q, k = torch.randn(1, heads, 300, 16), torch.randn(1, heads // 2, 300, 16)
    found: float = pipeline.run(sp.AttentionCall(q, k, k, layer=layer)).density
    return found


@pytest.mark.usefixtures("registry")
def test_it_is_read_from_set_from_toml_and_from_plain_data(file: Path) -> None:
    (one,) = options.contenders(sp.default_registry(), ["banded"], [f"banded.bands={file}"])
    config = file.parent / "mine.toml"
    config.write_text('method = "banded"\nparameters = { bands = "bands.json" }\n')
    made = [one.pipeline, sp.from_config(config), sp.build("banded", bands=json.loads(file.read_text()))]
    assert len({density(pipeline) for pipeline in made}) == 1
    assert density(made[0]) < density(made[0], layer=1) < 1


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere.json", "bands is 'nowhere.json': No such file"),
        (3, "bands is 3: pass a path, or a table"),
        ({**BandTable.SCHEMA.facts, "bands": [0]}, r"bands\[0\] is 0: pass an integer >= 1"),
        ({**BandTable.SCHEMA.facts, "version": 2}, "version is 2.*make one with sparseprefill bands"),
    ],
)
def test_what_is_no_table_is_refused(given: Any, words: str) -> None:
    with pytest.raises(sp.ParameterError, match=words):
        sp.build("banded", bands=given)


def test_a_share_of_the_heads_is_served_and_another_model_is_not(registry: sp.Registry, file: Path) -> None:
    local = evolve(MODEL, heads=2, kv_heads=1)
    whole = registry.build("banded", bands=str(file))
    with pytest.raises(sp.UnsupportedCallError, match=r"model\.heads is 4"):
        density(whole, heads=2)
    assert density(LocalRegistry(MODEL, local).build("banded", bands=str(file)), heads=2) < 1
    with pytest.raises(sp.ParameterError, match=r"the table of bands was made for another model: model\.digest"):
        LocalRegistry(evolve(MODEL, digest="02"), local).build("banded", bands=str(file))


def test_a_share_of_the_heads_has_all_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    known, local = blending(), evolve(MODEL, heads=2, kv_heads=1)
    monkeypatch.setattr("sparseprefill.adapters.serving.tensor_parallel.default_registry", lambda: known)
    registry = LocalRegistry(MODEL, local)
    for kind in ("refiner", "corrector", "method", "kernel"):
        assert known.offered(kind) == registry.offered(kind)
    table = {"method": "streaming", "corrector": "blend", "refiners": [{"name": "value-weights"}]}
    made: Any = sp.from_config(table, registry=registry)
    assert made.corrects
    assert known.kernels() == made.executor.kernels


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parameter": "width"}, "Method.table is of 'width', which Config does not have"),
        ({"command": "Bands of it"}, "Method.table.command is 'Bands of it': use lower-case words"),
    ],
)
def test_a_declaration_that_does_not_fit(change: dict[str, Any], words: str) -> None:
    (method,) = table_plugin.sparseprefill_methods()
    with pytest.raises(sp.ParameterError, match=words):
        evolve(method, table=evolve(TABLE, **change))
    with pytest.raises(sp.ParameterError, match=r"Method\.table is 3: pass a NeededTable"):
        evolve(method, table=3)  # type: ignore[arg-type]


def test_settings_named_as_an_option_of_every_command() -> None:
    @frozen(kw_only=True)
    class Taken:
        """model: what every command has."""

        model: str = "x"

    with pytest.raises(sp.ParameterError, match="settings has the field 'model', an option of every such command"):
        evolve(TABLE, settings=Taken)


class Unresolved:
    """share: of no type that is known."""

    share: Nowhere = 0.5  # type: ignore[name-defined] # noqa: F821


FIT: Any = {"fit": None}


def offered(name: str, **change: Any) -> Any:
    """A plugin with one method, whose table has a command as changed."""

    class Offered:
        @staticmethod
        @sp.hookimpl
        def sparseprefill_methods() -> list[sp.Method]:
            (method,) = table_plugin.sparseprefill_methods()
            return [evolve(method, name=name, table=evolve(TABLE, **change))]

    return Offered


@pytest.mark.parametrize(
    ("change", "command", "words"),
    [
        (
            {"settings": frozen(Unresolved), "command": "unresolved"},
            "unresolved",
            "settings for the table of mine: name 'Nowhere' is not",
        ),
        ({"command": "anchors"}, "anchors", "the tables of .*kascade.* have the same command"),
        ({"command": "anchors"}, "anchors", "mine.*: rename one, or uninstall its package"),
    ],
)
def test_a_table_without_a_command_of_its_own_takes_no_other_down(
    change: dict[str, Any], command: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = sp.default_registry()
    known.register(offered("mine", **change), "mine")
    monkeypatch.setattr(
        tables, "needed", lambda: [(name, one.table) for name, one in known.methods().items() if one.table]
    )
    try:
        group = tables.WithTables(commands=dict(FIT))
        assert {"fit", "anchors", "cluster", command} == set(group.list_commands(None))
        with pytest.raises(SparsePrefillError, match=words):
            group.commands[command].main(["--model", "x"], standalone_mode=False)
    finally:
        known.unregister("mine")


def test_a_command_of_the_library_stays_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "needed", lambda: [("banded", evolve(TABLE, command="fit"))])
    group = tables.WithTables(commands=dict(FIT))
    group.list_commands(None)
    assert group.commands == FIT
    said = " ".join(capsys.readouterr().err.split())
    assert said == "the command that makes the table of banded cannot be fit, which is this library's: rename it"


HEAVY = """
import sys
from sparseprefill.adapters.cli.app import main
sys.argv = ["sparseprefill", *{arguments!r}]
try:
    main()
finally:
    print("imported:", *sorted(set(sys.modules) & {{"torch", "rich"}}), file=sys.stderr)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which the plugin is installed."""
    info = tmp_path / "site" / "banded-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: banded\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sparseprefill]\nbanded = helpers.table_plugin\n")
    return info.parent


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line of a process that sees what is installed in a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS)])}
    command = [sys.executable, "-c", HEAVY.format(arguments=arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_its_command_is_listed_where_the_plugin_is_installed(installed: Path) -> None:
    listed = run(installed, "--help")
    assert (listed.returncode, listed.stderr) == (0, "imported:\n")
    assert "bands " in listed.stdout
    assert TABLE.summary in " ".join(listed.stdout.split())


@pytest.mark.usefixtures("registry", "_one_tokenizer")
def test_its_command_makes_the_table(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: Any, embedded_tokenizer: Any
) -> None:
    def bands(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["bands", *arguments])

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(installed)
    shown = " ".join(bands("--help").stdout.split())
    for words in ("--share", "Of the attention that a band has:", "integer 16 to 99", "bands.json", "--seed"):
        assert words in shown
    assert "shortest is 3: pass an integer" in bands("--shortest", "3").stderr
    made = bands("--share", "0.9", "--device", "cpu")
    assert made.exit_code == 0, made.output
    assert "6 layers of embedded, 1 samples of 512 tokens" in " ".join(made.stdout.split())
    assert "table: bands.json" in made.stdout
    table = TABLE.read(tmp_path / "bands.json")
    assert table.model == evolve(identity(embedded.get_decoder()), name="embedded")
    facts = json.loads(bands("--share", "0.9", "--device", "cpu", "--json").stdout)
    assert (facts["model"], tuple(facts["bands"]), facts["output"]) == ("embedded", table.bands, "bands.json")
    pipeline = sp.build("banded", bands=tmp_path / "bands.json")
    with torch.inference_mode(), attach(embedded, pipeline, strict=True, gate=None) as handle:
        embedded(torch.tensor(key_value_prompts(embedded_tokenizer, 512, 1, 5)), logits_to_keep=1)
    assert all(layer.mode == "sparse" for layer in handle.report().layers)
