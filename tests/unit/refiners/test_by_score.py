"""The settings of `python -m lab.by_score` are pipelines that choose what its table says."""

from __future__ import annotations

import pytest

import sparseprefill as sp
from lab.by_score import BETA, SUBJECTS, choices


@pytest.mark.parametrize("method", SUBJECTS)
def test_every_row_is_a_pipeline(method: str) -> None:
    subject = SUBJECTS[method]
    assert len(subject.tried) == len(subject.closest)
    sp.default_registry().get(method).configure({subject.parameter: subject.tried[0]})
    relative, even, falling = subject.closest[0]
    ends = dict(subject.ends)
    threshold = sp.RelativeThreshold(relative, **ends)
    falls = sp.PositionDecay(share=falling, decay=0.7, **ends)
    expected = [
        (threshold,),
        (sp.PositionDecay(share=even, decay=1.0, **ends),),
        (falls,),
        (sp.ValueWeights(BETA), threshold),
        (sp.ValueWeights(BETA), falls),
    ]
    for (name, refiners), wanted in zip(choices(subject, subject.closest[0]), expected, strict=True):
        made = sp.from_config({"method": method, "parameters": subject.every, "refiners": list(refiners)})
        assert wanted == made.refiners[-len(wanted) :], name  # type: ignore[union-attr]
