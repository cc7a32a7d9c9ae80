"""Modules of packages that are not installed, made up for a test."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


def as_module(name: str, monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    """Installs a package of one module, and those that it lies in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for attribute, value in attributes.items():
        monkeypatch.setattr(sys.modules[name], attribute, value, raising=False)
