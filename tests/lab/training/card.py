"""The model card and the record of a training run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cells import Cell

RECORD = "training.json"
"""The file of a run's record."""

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# {title}

A Llama-format language model of {parameters:,} parameters that finds facts in
long texts, and does little else. It exists to show and test attention during
prefill on a real, trained checkpoint.

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
stop and a line break end the answer. `sparseprefill.adapters.demo.tasks` makes such prompts. A question
for one key may also be as long as people make them (`wording="long"`).

It also reads the prompts of RULER's niah_single_1, niah_multikey_2, niah_multikey_3, ruler_vt and ruler_fwe
as lm-evaluation-harness 0.4.13 words them, with any words as keys; `lab.training.ruler`
makes such prompts without the harness.

## Training

Trained from scratch with seed {seed} in {seconds:.0f} seconds and {steps:,} steps on one {device}
(torch {torch}, transformers {transformers}, Python {python}), with AdamW on float32 master weights
and bfloat16 arithmetic. The text is that of the Python installation: the topics of `help()` and the
docstrings of the standard library; keys and values are random. Lengths grow to {longest:,} tokens
as the answers become right. `training.json` holds the command, stages, settings, curve and results.
The command, in the folder `tests` of the repository, with a folder for `DIR`:

    {command}

## Evaluation

With dense attention in {dtype}, one question for each context, on text, words and values not seen in
training; tasks from seed {evaluation_seed} on. The first rows are exact match (all tokens of the answer), those
of RULER's names the harness's own score, the share of expected strings in the generated text:

{table}

{families}

## Limits

The model knows the sentences above and Python's documentation. It is no assistant and has not been
trained on other languages or formats. Results beyond {positions:,} tokens are not measured.

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
    lines = ["| Task | " + " | ".join(f"{length:,}" for length in lengths) + " |"]
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


def compare(folders: Sequence[Path]) -> str:
    """Return the results of several runs side by side, with the points between the best and the worst.

    Raises:
        FileNotFoundError: A folder has no record.
        ValueError: A record holds no results, or the records have no task in common.
    """
    records = [json.loads((folder / RECORD).read_text(encoding="utf-8")) for folder in folders]
    results = [
        {(c["family"], c["length"]): 100 * c["exact"] / c["tasks"] for c in record.get("evaluation", ())}
        for record in records
    ]
    for folder, result in zip(folders, results, strict=True):
        if not result:
            raise ValueError(f"{folder / RECORD} holds no results: its run was cut before the evaluation")
    shared = [cell for cell in results[0] if all(cell in result for result in results)]
    if not shared:
        raise ValueError("the records have no task and length in common")
    names = [f"{folder.name} (seed {record['seed']})" for folder, record in zip(folders, records, strict=True)]
    lines = ["| Task | Tokens | " + " | ".join(names) + " | Spread |", "| --- |" + " ---: |" * (len(names) + 2)]
    families = list(dict.fromkeys(family for family, _ in shared))
    worst = 0.0
    for family in families:
        cells = [cell for cell in shared if cell[0] == family]
        rows = [(f"{length:,}", [result[family, length] for result in results]) for _, length in cells]
        means = [sum(values) / len(rows) for values in zip(*(values for _, values in rows), strict=True)]
        worst = max(worst, max(means) - min(means))
        for length, values in [*rows, ("mean", means)]:
            shown = " | ".join(f"{value:.1f}" for value in (*values, max(values) - min(values)))
            lines.append(f"| {family} | {length} | {shown} |")
    left_out = sum(len(result) - len(shared) for result in results)
    lines += ["", f"Largest spread of a task's mean: {worst:.1f} points."]
    if left_out:
        lines.append(f"{left_out} results that some runs lack are left out.")
    return "\n".join(lines)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record of the run."""
    text = json.dumps(record, indent=1) + "\n"
    (folder / RECORD).write_text(text, encoding="utf-8")
