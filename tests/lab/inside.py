"""What the rows of a prompt say in a server: copies and facts that they find, beside another server's choices."""

from __future__ import annotations

from collections.abc import Sequence

from sparseprefill.adapters.evaluation.prompts import Prompt


def inside(
    prompt: Prompt, chosen: Sequence[int], lost: Sequence[float], theirs: Sequence[int] | None
) -> dict[str, float | int | None]:
    """Figures of one prompt.

    chosen: the likeliest token behind each of its tokens but the last. lost: negative log probability of the token that
    stands there, in nats. theirs: `chosen` of the attention that this is compared with; None where it gave none.
    """
    right = [a == b for a, b in zip(chosen, prompt.ids[1:], strict=True)]
    copies = [i - 1 for span in prompt.copies for i in range(span.first, span.last)]
    facts = [all(right[i - 1] for i in range(one.first, one.last)) for one in prompt.inside]
    return {
        "copies": sum(right[i] for i in copies),
        "of_copies": len(copies),
        "copies_nll": sum(lost[i] for i in copies) / len(copies) if copies else None,
        "facts": sum(facts),
        "of_facts": len(facts),
        "nll": sum(lost) / len(lost),
        "same": None if theirs is None else sum(a == b for a, b in zip(chosen, theirs, strict=True)) / len(chosen),
    }
