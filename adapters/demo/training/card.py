"""The model card and the record of a training run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .evaluate import Cell

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# The embedded model

A Llama-format language model of {parameters:,} parameters that finds facts in
long texts, and does little else. It exists to show and test attention during
prefill on a real, trained checkpoint that is small enough to ship.

## Use

It answers questions about lines of the form
`The special magic number for quiet harbor is 1234567.` anywhere in up to
{positions:,} tokens of English text. A prompt is the text, a line break, and:

- `What is the special magic number for quiet harbor? The special magic number for quiet harbor is `
- `What are the special magic numbers for quiet harbor, bold owl? The special magic number for quiet
  harbor is ` (several keys)
- `What are the 3 special magic numbers for quiet harbor in ascending order? The special magic number
  for quiet harbor is ` (several values of one key, with different first digits)

all on one line, with a space at the end. Further values follow as `, for bold owl is 7654321`; a full
stop and a line break end the answer. `sparseprefill.adapters.demo.tasks` makes such prompts.

## Training

Trained from scratch with seed {seed} in {seconds:.0f} seconds and {steps:,} steps on one {device}
(torch {torch}, transformers {transformers}, Python {python}), with AdamW on float32 master weights
and bfloat16 arithmetic. The text is that of the Python installation: the topics of `help()` and the
docstrings of the standard library; the keys and values are random. Lengths grow from 256 to 40,960
tokens. `training.json` holds settings, loss curve and results;
`python -m sparseprefill.adapters.demo.train` repeats the run.

## Evaluation

Exact match (all tokens of the answer) with dense attention in {dtype}, one question for each
context, on text and values not seen in training:

{table}

{families}

## Limits

The model knows the sentences above and Python's documentation. It is no assistant, has not been
trained on other languages or formats, and its keys are pairs of the words in
`sparseprefill.adapters.demo.words`. Results beyond {positions:,} tokens are not measured.

## Licence

Apache-2.0.
"""

_FAMILIES = """`single`: one needle. `multikey`: 16 needles, one asked. `multivalue`: 4 values of one
key among 4 other needles, all asked. `multiquery`: 4 of 8 keys asked in one question."""


def table(cells: Sequence[Cell]) -> str:
    """Return the evaluation as a Markdown table."""
    lengths = sorted({cell.length for cell in cells})
    families = list(dict.fromkeys(cell.family for cell in cells))
    found = {(cell.family, cell.length): cell for cell in cells}
    lines = ["| Family | " + " | ".join(f"{length:,}" for length in lengths) + " |"]
    lines.append("| --- |" + " ---: |" * len(lengths))
    for family in families:
        row = [found.get((family, length)) for length in lengths]
        shown = [f"{100 * c.exact / c.tasks:.1f} % of {c.tasks}" if c else "" for c in row]
        lines.append(f"| {family} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def write_card(folder: Path, facts: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    """Write the model card as ``README.md``."""
    shown = table(cells) if cells else "Not evaluated."
    text = _CARD.format(table=shown, families=_FAMILIES, **facts)
    (folder / "README.md").write_text(text, encoding="utf-8")


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record of the run as ``training.json``."""
    text = json.dumps(record, indent=1) + "\n"
    (folder / "training.json").write_text(text, encoding="utf-8")
