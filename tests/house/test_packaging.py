"""The package list by hand against the folders on disk."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUP = PROJECT["tool"]["setuptools"]


def packages_on_disk() -> list[str]:
    """Folders with an `__init__.py` under the three places that the mapping names."""
    found = []
    for prefix, folder in SETUP["package-dir"].items():
        place = ROOT / folder
        for init in place.rglob("__init__.py"):
            found.append(".".join([prefix, *init.parent.relative_to(place).parts]))
    return sorted(found)


def test_package_list_equals_the_folders() -> None:
    assert packages_on_disk() == sorted(SETUP["packages"])


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
        assert target in SETUP["packages"]


def test_typing_marker_is_shipped() -> None:
    assert "py.typed" in SETUP["package-data"]["sparseprefill"]
    assert (ROOT / "core" / "sparseprefill" / "py.typed").exists()


def test_own_version_is_the_project_version() -> None:
    import sparseprefill as sp

    assert PROJECT["project"]["version"] == sp.__version__


def test_ci_runs_the_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = next(line for line in readme.splitlines() if ".venv/bin/pytest" in line)
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_constraints_agree_with_what_is_declared() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(line.split("==") for line in text.splitlines() if "==" in line)
    needs = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["hf"]]
    for need in map(Requirement, needs):
        assert need.name not in pinned or pinned[need.name] in need.specifier
