"""The options of SGLang's backend: a table in an environment variable, which all processes of a server inherit."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from sparseprefill import structure
from sparseprefill.errors import ParameterError, printed

from ..serving.options import TABLE, Options, read_table
from ..serving.wishes import mistyped

VARIABLE = "SPARSEPREFILL_SGLANG"
FOREIGN = {
    "chunk": "SGLang cuts prompts by --chunked-prefill-size",
    "skip_unread": "SGLang's backend computes all rows of a prompt",
}
"""Keys that are for vLLM alone, and why."""
EXAMPLE = f"""{VARIABLE}='{{"method": "bfla"}}'"""


def given(text: str | None = None) -> Options:
    """The variable's content, by default that of this process: a JSON table, or the path of a .json or .toml file.

    ParameterError names the key at fault.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    if not text.strip():
        close = get_close_matches(VARIABLE, os.environ, n=1, cutoff=0.9)
        hint = f"; {close[0]} is set, did you mean {VARIABLE}?" if close else ""
        raise ParameterError(f"the attention backend sparseprefill is selected, but no method: set {EXAMPLE}{hint}")
    table = _table(text.strip())
    if not isinstance(table, Mapping):
        raise ParameterError(f"{VARIABLE} is {printed(table)}: give a table of keys and values, such as {EXAMPLE}")
    outer = [key for key in table if key == TABLE or mistyped([key])]
    if outer:
        raise ParameterError(
            f"{VARIABLE} has the key {printed(outer[0])}: that is vLLM's form; give what stands inside of it, such as "
            f"{EXAMPLE}"
        )
    for key in FOREIGN.keys() & table.keys():
        raise ParameterError(f"{TABLE}.{key} is for vLLM: {FOREIGN[key]}; leave it out")
    return read_table(table, FOREIGN)


def _table(text: str) -> Any:
    inline = text.startswith("{")
    try:
        if text.lower().endswith(".toml") and not inline:
            return structure.parsed(structure.read(text), tomllib.loads, "TOML")
        return structure.parsed(text if inline else structure.read(text))
    except ParameterError as error:
        remedy = "give a table in JSON, or the path of a .json or .toml file"
        raise ParameterError(f"{VARIABLE} is {printed(text)}: {error}; {remedy}") from error
