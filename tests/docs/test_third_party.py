"""The example packages of docs/examples, installed as a stranger would: found, built, run, listed; broken or sound."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.examples import few_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PACKAGES = ("sparseprefill-last-block", "sparseprefill-first-layers", "sparseprefill-broken")
PIP = ("pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")

TOML = """
method = "streaming"
parameters = { sink = 16, window = 32, block = 16 }

[[refiners]]
name = "first-layers"
layers = 1
"""
SCRIPT = """
import json, logging
import torch
import sparseprefill as sp

logging.disable(logging.CRITICAL)
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, 300, 32) for heads in (4, 2, 2))
result = sp.build("last-block", keep=20, band=40, block=16).run(sp.AttentionCall(q, k, v))
truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
full = sp.build("last-block", keep=300)(q, k, v)
dense = sp.build("dense")(q, k, v)

with open("refined.toml", "w") as file:
    file.write(TOML)
refined = sp.from_config("refined.toml")
densities = [refined.run(sp.AttentionCall(q, k, v, layer=layer)).density for layer in (0, 1)]


def failure(name, build=sp.build, **parameters):
    try:
        build(name, **parameters)
    except sp.SparsePrefillError as error:
        cause = error.__cause__
        return [type(error).__name__, str(error), None if cause is None else type(cause).__name__]


records = {
    record.name: [record.distribution, record.version, [*record.methods, *record.refiners], repr(record.error)]
    for record in sp.default_registry().plugins()
}
answer = {
    "methods": dict(sp.methods()),
    "records": records,
    "density": result.density,
    "shape": list(result.out.shape),
    "full": sp.output_error(full, truth),
    "dense": sp.output_error(dense, truth),
    "broken": failure("broken-example"),
    "unknown": failure("last-blok"),
    "parameter": failure("last-block", keep=-1),
    "refiners": [repr(one) for one in refined.refiners],
    "densities": densities,
    "refiner": failure({"method": "dense", "refiners": [{"name": "first-layer"}]}, sp.from_config),
    "refiner's": failure({"method": "dense", "refiners": [{"name": "first-layers", "layers": -1}]}, sp.from_config),
}
print(json.dumps(answer))
"""


SHOW = ("show", "first-layers")
COMMANDS = """
import contextlib, io, json, sys
from sparseprefill.adapters.cli.app import main

said = []
for sys.argv in json.loads(sys.argv[1]):
    out, error, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    said.append([code, out.getvalue(), error.getvalue()])
print(json.dumps(said))
"""


def commands(site: Path, *lines: Sequence[str], **environment: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of command lines, one after the other in a fresh Python."""
    done = run(site, "-c", COMMANDS, json.dumps([["sparseprefill", *line] for line in lines]), **environment)
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, str, str]] = json.loads(done.stdout)
    return found


def run(site: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python that sees the installed packages, outside the repository."""
    settings = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **environment}
    kept = {name: value for name, value in os.environ.items() if name != "SPARSEPREFILL_PLUGINS"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=site, env=kept | settings, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the packages installed in it."""
    folder = tmp_path_factory.mktemp("third_party")
    sources = []
    for name in PACKAGES:  # pip builds in place: never in the working tree
        unbuilt = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*")
        sources.append(str(shutil.copytree(EXAMPLES / name, folder / "source" / name, ignore=unbuilt)))
    target = folder / "site"
    done = run(folder, "-m", *PIP, "--target", str(target), *sources)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def answer(site: Path) -> dict[str, Any]:
    """What a user sees with the packages installed."""
    done = run(site, "-c", f"TOML = {TOML!r}\n{SCRIPT}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_method_is_listed_among_the_others(answer: dict[str, Any]) -> None:
    assert {"last-block", "dense", "anchor-attention"} <= set(answer["methods"])
    expected = "the key columns that the last queries look at, and a local band"
    assert expected == answer["methods"]["last-block"]
    assert answer["records"]["last-block"] == ["sparseprefill-last-block", "0.1.0", ["last-block"], "None"]


def test_the_method_runs(answer: dict[str, Any]) -> None:
    assert answer["shape"] == [1, 4, 300, 32]
    assert 0.0 < answer["density"] < 0.8
    assert answer["full"] < 1e-5


def test_the_methods_parameters_are_checked(answer: dict[str, Any]) -> None:
    assert answer["parameter"][:2] == ["ParameterError", "keep is -1: pass an integer >= 0"]


def test_the_refiner_runs_from_toml(answer: dict[str, Any]) -> None:
    assert answer["refiners"] == ["FirstLayers(layers=1)"]
    assert answer["records"]["first-layers"] == ["sparseprefill-first-layers", "0.1.0", ["first-layers"], "None"]
    first, second = answer["densities"]
    assert second < 0.5 < first == 1


def test_the_refiners_name_and_parameters_are_checked(answer: dict[str, Any]) -> None:
    kind, message, _ = answer["refiner"]
    assert kind == "ParameterError"
    assert "refiners[0].name: no refiner is named 'first-layer'; did you mean 'first-layers'?" in message
    assert answer["refiner's"][:2] == ["ParameterError", "refiners[0].layers is -1: pass an integer >= 0"]


def test_the_command_line_shows_the_refiner(site: Path) -> None:
    (_, shown, _), (_, told, _) = commands(site, (*SHOW, "--json"), SHOW)
    facts = json.loads(shown)
    (layers,) = facts.pop("parameters")
    assert (layers["name"], layers["default"], layers["bounds"]) == ("layers", 2, "integer >= 0")
    assert layers["doc"] == "so many layers get every key."
    assert facts == {
        "name": "first-layers",
        "kind": "refiner",
        "summary": "Gives the first layers every key.",
        "class": "FirstLayers",
        "from": "plugin 'first-layers' of sparseprefill-first-layers 0.1.0",
    }
    expected = "refiner: FirstLayers, from plugin 'first-layers' of sparseprefill-first-layers 0.1.0"
    assert expected in " ".join(told.split())


def test_the_broken_package_is_listed_with_its_error(answer: dict[str, Any]) -> None:
    distribution, version, methods, error = answer["records"]["broken-example"]
    assert (distribution, version, methods) == ("sparseprefill-broken", "0.1.0", [])
    assert error.startswith("ModuleNotFoundError")


def test_asking_for_the_broken_method_raises_from_the_original(answer: dict[str, Any]) -> None:
    kind, message, cause = answer["broken"]
    assert (kind, cause) == ("PluginLoadError", "ModuleNotFoundError")
    assert "plugin 'broken-example' of sparseprefill-broken 0.1.0 failed to load" in message


def test_the_broken_package_takes_nothing_down(answer: dict[str, Any]) -> None:
    assert answer["dense"] < 1e-5
    assert answer["records"]["classic"][3] == "None"


def test_an_unknown_name_gets_the_nearest_and_mentions_the_broken_package(answer: dict[str, Any]) -> None:
    kind, message, _ = answer["unknown"]
    assert kind == "UnknownMethodError"
    assert "did you mean 'last-block'" in message
    assert "plugin 'broken-example' of sparseprefill-broken 0.1.0" in message


@pytest.mark.parametrize("package", few_of(PACKAGES[:2], PACKAGES[:1]))
def test_the_examples_own_contract_test_passes(site: Path, package: str) -> None:
    tests = site.parent / "source" / package / "tests"
    done = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_environment_variable_leaves_the_broken_package_out(site: Path) -> None:
    listing = "import sparseprefill as sp; print([r.name for r in sp.default_registry().plugins()])"
    done = run(site, "-c", listing, SPARSEPREFILL_PLUGINS="last-block")
    assert (done.stdout, done.stderr) == ("['core', 'last-block']\n", "")


def test_the_environment_variable_leaves_the_refiner_out(site: Path) -> None:
    done = run(site, "-m", "sparseprefill", "show", "first-layers", SPARSEPREFILL_PLUGINS="last-block")
    assert done.returncode == 1
    assert "no method, refiner or corrector is named 'first-layers'" in done.stderr
    assert "excluded by SPARSEPREFILL_PLUGINS" in done.stderr


@pytest.mark.thorough
def test_the_demo_takes_the_method_and_the_refiner_like_any_other(site: Path) -> None:
    command = ("demo", "--tokens", "512", "--questions", "1", "--threads", "1", "--device", "cpu", "--json")
    method = ("--method", "last-block", "--set", "last-block.keep=16", "--set", "last-block.band=64")
    plugins = "last-block,first-layers"
    refiners = ("--set", 'last-block.refiners=[{"name": "first-layers", "layers": 3}]')
    lines = [(*command, *method, *layers, "--tail", "0") for layers in ((), refiners)]
    densities = []
    for code, shown, error in commands(site, *lines, SPARSEPREFILL_PLUGINS=plugins):
        assert code == 0, error
        stock, ours = json.loads(shown)["methods"]
        assert (stock["method"], ours["method"]) == ("stock", "last-block")
        assert stock["density"] == 1
        densities.append(ours["density"])
    bare, refined = densities
    assert 0 < bare < refined < 1
    assert refined == pytest.approx((bare + 1) / 2, abs=0.05)  # three of the model's six layers
