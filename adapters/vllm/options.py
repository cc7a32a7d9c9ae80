"""The options in vLLM's ``additional_config``."""

from __future__ import annotations

from collections.abc import Mapping

from sparseprefill.errors import ParameterError

from ..serving.options import TABLE, Options, read_table


def parse(additional: object) -> Options:
    """Checked before the engine serves anything; ParameterError names the key at fault."""
    table = additional.get(TABLE) if isinstance(additional, Mapping) else None
    if table is None:
        example = '--additional-config \'{"sparseprefill": {"method": "streaming"}}\''
        raise ParameterError(f"the backend CUSTOM is selected, but no method: add {example}")
    return read_table(table)
