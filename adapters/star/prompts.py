"""Text into what phase 1 reads and what phase 2 reads."""

from __future__ import annotations

from typing import Any

MARK = "\N{INFORMATION SEPARATOR ONE}"


def split_prompt(tokenizer: Any, context: str, question: str, *, plain: bool = False) -> tuple[list[int], list[int]]:
    """Token ids of the context and of what follows it.

    The paper's templates: where the tokenizer has a chat template, both stand in one message of the user, and the
    question's part holds the rest of the template. plain: without it, the question behind the context as it is.
    """
    if plain or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(context)["input_ids"]), _ids(tokenizer, question)
    message = [{"role": "user", "content": f"{context}{MARK}{question}"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, _, behind = text.partition(MARK)
    return _ids(tokenizer, before), _ids(tokenizer, behind)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
