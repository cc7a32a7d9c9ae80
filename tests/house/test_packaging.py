"""What is built: every package is found by itself, and nothing else is shipped."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUP = PROJECT["tool"]["setuptools"]
NOT_SHIPPED = (".git", ".github")
"""What the sdist leaves out, besides what git ignores."""


def setup_file() -> ModuleType:
    """setup.py, which builds nothing when it is imported."""
    spec = importlib.util.spec_from_file_location("setup_of_sparseprefill", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages() -> list[str]:
    """What setup.py finds."""
    found: list[str] = setup_file().packages(SETUP["package-dir"])
    return found


def test_every_package_is_found_once() -> None:
    """Folders with an `__init__.py` under the three places that the mapping names; no list is kept by hand."""
    on_disk = [
        ".".join([prefix, *init.parent.relative_to(ROOT / folder).parts])
        for prefix, folder in SETUP["package-dir"].items()
        for init in (ROOT / folder).rglob("__init__.py")
    ]
    assert "packages" not in SETUP
    assert sorted(on_disk) == sorted(packages())
    assert set(SETUP["package-data"]) <= set(on_disk)


def test_every_folder_with_code_is_a_package() -> None:
    bare = {
        path.parent.relative_to(ROOT)
        for folder in SETUP["package-dir"].values()
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert set() == bare


def test_entry_points_name_packages() -> None:
    for target in PROJECT["project"]["entry-points"]["sparseprefill"].values():
        assert target in packages()


def test_typing_marker_is_shipped() -> None:
    assert "py.typed" in SETUP["package-data"]["sparseprefill"]
    assert (ROOT / "core" / "sparseprefill" / "py.typed").exists()


def test_own_version_is_the_project_version() -> None:
    import sparseprefill as sp

    assert PROJECT["project"]["version"] == sp.__version__


def test_ci_runs_the_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = next(line for line in readme.splitlines() if ".venv/bin/pytest" in line)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command in ci
    assert ".venv/bin/pytest -n 2 -m thorough" in ci  # what that command leaves out


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository to build in, without what git ignores."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    anywhere = shutil.ignore_patterns(*(line.rstrip("/") for line in lines if not line.startswith("/")))
    at_top = {line.strip("/") for line in lines if line.startswith("/")} | set(NOT_SHIPPED)
    at_top |= {path.name for path in ROOT.iterdir() if path.is_dir() and path.name.startswith(".")} - {".ci"}

    def ignored(folder: str, names: list[str]) -> set[str]:
        return set(anywhere(folder, names)) | (at_top if Path(folder) == ROOT else set())

    copy = tmp_path_factory.mktemp("checkout") / "sparseprefill"
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def build(what: str, folder: Path, out: Path) -> Path:
    """Let setuptools build ("sdist" or "wheel") what lies in the folder."""
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(out)!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return out / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    before = files(checkout)
    archive = build("sdist", checkout, out)
    (out / "files.txt").write_text("\n".join(before), encoding="utf-8")
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    return out / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, made of the sdist."""
    return zipfile.ZipFile(build("wheel", sdist, tmp_path_factory.mktemp("wheel")))


def files(folder: Path) -> list[str]:
    """The files of a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_sdist_holds_the_repository(sdist: Path) -> None:
    wanted = set((sdist.parent / "files.txt").read_text(encoding="utf-8").splitlines())
    made = {"PKG-INFO", "setup.cfg"}
    got = {name for name in files(sdist) if not name.startswith("sparseprefill.egg-info/")}
    assert wanted | made == got


def test_what_the_readmes_commands_need_is_in_the_sdist(sdist: Path) -> None:
    for name in ("README.md", "constraints.txt", "CHANGELOG.md", "tests/conftest.py", "docs/index.md", ".ci/run"):
        assert (sdist / name).is_file(), name


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    places = {prefix.replace(".", "/"): ROOT / folder for prefix, folder in SETUP["package-dir"].items()}
    wanted = {
        f"{prefix}/{path.relative_to(place).as_posix()}"
        for prefix, place in places.items()
        for path in place.rglob("*.py")
    }
    data = {
        f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"
        for package, patterns in SETUP["package-data"].items()
        for folder in [folder_of(package)]
        for pattern in patterns
        for path in folder.glob(pattern)
    }
    assert "sparseprefill/adapters/demo/checkpoint/model.safetensors" in data
    assert wanted | data == {name for name in wheel.namelist() if ".dist-info/" not in name}


ALONE = """
import sys
from importlib.metadata import entry_points
sys.meta_path[:] = [one for one in sys.meta_path if "__editable__" not in getattr(one, "__module__", "")
                    and "__editable__" not in getattr(one, "__name__", "")]
wheel, script, *arguments = sys.argv[1:]
clone = script.split("|")[1]
sys.path[:] = [wheel, *(one for one in sys.path if "site-packages" in one or not one.startswith(clone))]
sys.argv = ["sparseprefill", *arguments]
import sparseprefill
assert sparseprefill.__file__.startswith(wheel), sparseprefill.__file__
if script.startswith("module"):
    import runpy
    runpy.run_module("sparseprefill", run_name="__main__", alter_sys=True)
else:
    (door,) = [one for one in entry_points(group="console_scripts", name="sparseprefill") if one.value]
    door.load()()
"""


@pytest.mark.parametrize("door", ["script", "module"])
def test_the_wheel_runs_by_both_doors_without_a_clone(wheel: zipfile.ZipFile, door: str, tmp_path: Path) -> None:
    """Unpacked far from the clone, and with nothing of it to be imported."""
    wheel.extractall(tmp_path / "site")
    (tmp_path / "here").mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = [sys.executable, "-P", "-c", ALONE, str(tmp_path / "site"), f"{door}|{ROOT}", *arguments]
        return subprocess.run(code, cwd=tmp_path / "here", capture_output=True, text=True, check=False)

    asked = run("--version")
    assert (0, PROJECT["project"]["version"]) == (asked.returncode, asked.stdout.strip()), asked.stderr
    done = run("methods", "--json")
    assert done.returncode == 0, done.stderr
    names = {one["name"] for one in json.loads(done.stdout)}
    assert {"rowmax", "share-prefill", "streaming"} <= names


def folder_of(package: str) -> Path:
    """Where a package lies in the repository."""
    prefix = max((one for one in SETUP["package-dir"] if f"{package}.".startswith(f"{one}.")), key=len)
    return ROOT.joinpath(SETUP["package-dir"][prefix], *package.removeprefix(prefix).strip(".").split("."))


def test_an_index_can_show_the_readme(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert text.lstrip().startswith("# sparseprefill")
    assert re.findall(r"\]\((?!https?:)[^)]*\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)) == []


README = """[one](docs/one.md#there), [two](https://two.example), ![picture](docs/picture.png)

and
```
[kept](as/it/is.md)
```
"""


def test_links_of_the_readme_lead_to_the_source_once_it_has_an_address() -> None:
    expected = README.replace("(docs/one.md", "(https://host.example/us/blob/main/docs/one.md")
    expected = expected.replace("(docs/picture", "(https://host.example/us/raw/main/docs/picture")
    assert expected == setup_file().described(README, "https://host.example/us/")


def test_without_an_address_the_readme_has_texts_for_links_and_no_pictures() -> None:
    expected = README.replace("[one](docs/one.md#there)", "one").replace("![picture](docs/picture.png)\n\n", "")
    assert expected == setup_file().described(README, None)


def test_pythons_are_the_same_everywhere() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    named = [name for one in classifiers if re.fullmatch(r"3\.\d+", name := one.rpartition(" :: ")[2])]
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.exists():
        pytest.skip("an sdist holds no workflow")
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    assert named == jobs["install"]["strategy"]["matrix"]["python-version"]
    assert all(SpecifierSet(PROJECT["project"]["requires-python"]).contains(one) for one in named)
    assert {"run": ".ci/run"} in jobs["all"]["steps"]


def test_citation_has_the_version_and_the_authors() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["project"]["version"] == citation["version"]
    assert PROJECT["project"]["license"] == citation["license"]
    assert PROJECT["project"]["authors"] == citation["authors"]


def test_hooks_before_a_commit_have_the_versions_of_ci() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    pinned = {need for hook in hooks for need in hook["additional_dependencies"] if "==" in need}
    assert any(need.startswith("ruff==") for need in pinned)
    assert pinned <= set(constraints)


def test_tox_builds_the_site_with_the_extra() -> None:
    tox = configparser.RawConfigParser()
    tox.read(ROOT / "tox.ini")
    assert PROJECT["project"]["optional-dependencies"]["docs"] == tox["testenv:docs"]["deps"].split()


def test_constraints_agree_with_what_is_declared() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(line.split("==") for line in text.splitlines() if "==" in line)
    needs = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["hf"]]
    for need in map(Requirement, needs):
        assert need.name not in pinned or pinned[need.name] in need.specifier
