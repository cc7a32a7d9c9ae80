"""Loading what commands run on: the model and the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import evolve, frozen

from sparseprefill.errors import AttachError

from ..evaluation.reading import threads
from .group import CommandError
from .loading import REMEDIES, reading

if TYPE_CHECKING:
    from sparseprefill.profiles.identity import ModelIdentity

EMBEDDED = "embedded"
STRETCHED = (
    ". If the model's card says how to stretch its context (rope scaling in config.json), pass a folder where that "
    "is done"
)
"""Further help where a model reads too little; ours is no recipe for it."""
THREADS, AT_ONCE = 16, 4
"""Threads that any machine may have, and for each of its cores: with too many, the libraries below PyTorch crash."""


@frozen
class Place:
    """The model's device, its type, and PyTorch's threads."""

    device: torch.device
    dtype: torch.dtype
    threads: int

    def __str__(self) -> str:
        threads = "thread" if self.threads == 1 else "threads"
        where = f"{self.device} ({self.threads} {threads})" if self.device.type == "cpu" else str(self.device)
        return f"{where}, {self.dtype_name}"

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The kind of device that defaults go by."""
        return "cpu" if self.device.type == "cpu" else "cuda"

    @property
    def dtype_name(self) -> str:
        """The dtype's name without PyTorch's."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def facts(self) -> dict[str, Any]:
        """Device, dtype and threads, as JSON has them."""
        return {"device": str(self.device), "dtype": self.dtype_name, "threads": self.threads}

    @property
    def memory(self) -> int | None:
        """Bytes of the device, None where they are not known."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
        if self.device.type != "cpu" or not set(names) <= set(getattr(os, "sysconf_names", ())):
            return None
        pages, size = map(os.sysconf, names)
        return pages * size

    def check_room(self, option: str, tokens: int, each: int, what: str, least: int = 1) -> None:
        """CommandError where so many tokens do not fit into the device's memory, at so many bytes each.

        what: takes these bytes. least: tokens that the option takes at least.
        """
        memory = self.memory
        if memory is None or tokens * each <= memory:
            return
        most = memory // each
        remedy = f"pass {most} or less" if most >= least else "pass fewer or smaller heads"
        raise CommandError(
            f"{option} {tokens}: {what} takes {tokens * each / 1e9:,.0f} GB, and {self.device} has "
            f"{memory / 1e9:,.0f} GB; {remedy}"
        )

    def threaded(self) -> AbstractContextManager[None]:
        """Runs the block with this many threads."""
        return threads(self.threads)

    @classmethod
    def of(cls, device: str, dtype: str, threads: int) -> Place:
        """The place that the options name; CommandError where there is no such device."""
        try:
            found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
            torch.zeros(1, dtype=torch.float32, device=found).item()  # a device such as meta holds no values
        except (RuntimeError, AssertionError, ImportError) as error:
            reason = str(error).split("\n")[0].split(". ")[0]
            raise CommandError(f"--device {device}: {reason}; pass cpu, or cuda where PyTorch sees a GPU") from error
        most = max(THREADS, AT_ONCE * (os.cpu_count() or 1))
        if threads > most:
            raise CommandError(f"--threads {threads}: this machine has {os.cpu_count()} cores; pass {most} or less")
        if dtype == "auto":
            dtype = "float32" if found.type == "cpu" else "bfloat16"
        chosen: torch.dtype = getattr(torch, dtype)
        return cls(found, chosen, threads)


@frozen(eq=False)
class Source:
    """Origin of a model: all that can be told of it, and checked, before it is loaded.

    path: folder or name of a transformers model, None for the embedded one. device_map: how to spread it over devices.
    option: that gave the path, for messages. said: what others had to say of the tokenizer, for later.
    """

    path: str | None
    place: Place
    config: Any
    tokenizer: Any
    device_map: str | None = None
    option: str = "--model"
    said: Sequence[Callable[[], None]] = ()

    @classmethod
    def of(cls, path: str | None, place: Place, device_map: str | None = None, option: str = "--model") -> Source:
        """Reads a model's configuration and its tokenizer. CommandError where there is none."""
        if path is None:
            from ..demo import model

            with reading(None, option, "config.json"):
                return cls(None, place, model.load_config(), model.load_tokenizer(), device_map)
        with reading(path, option, "config.json"):
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            from ..huggingface.identity import check_attention

            try:
                check_attention(
                    config.get_text_config(), (getattr(config, "architectures", None) or [type(config).__name__])[0]
                )
            except AttachError as error:
                raise CommandError(f"{option} {path}: {error}") from error
        with reading(path, option, "tokenizer") as said:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        return cls(path, place, config, tokenizer, device_map, option, said)

    def load(self) -> Any:
        """The model, ready to read. CommandError where it cannot be loaded whole, or where no method could serve it."""
        with reading(self.path, self.option, "weights") as said:
            if self.path is None:
                from ..demo import model

                return model.load_model(self.place.dtype, self.place.device)
            from transformers import AutoModelForCausalLM

            spread = {} if self.device_map is None else {"device_map": self.device_map}
            whole: Any = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=self.place.dtype, trust_remote_code=False, output_loading_info=True, **spread
            )
            found, how = whole
            self._check_whole(found, sorted(how.get("missing_keys", ())))
            found = (found.to(self.place.device) if self.device_map is None else found).eval()
            from ..huggingface.dry_run import windows

            try:
                windows(found)  # with that all weights have been read, too: the first prefill takes what later ones do
            except AttachError as error:
                raise CommandError(
                    f"{self.option} {self.path}: {error}; pass a causal language model that attach takes"
                ) from error
        for again in (*self.said, *said):
            again()
        return found

    def _check_whole(self, model: Any, missing: list[str]) -> None:
        """CommandError where weights are missing, or the tokenizer has tokens that the model has not."""
        if missing:
            raise CommandError(
                f"{self.option} {self.path}: its weights lack {len(missing)} of the tensors of {type(model).__name__}, "
                f"such as {missing[0]}; {REMEDIES['weights']}"
            )
        table, tokens = model.get_input_embeddings(), getattr(self.tokenizer, "vocab_size", 0)
        rows = getattr(getattr(table, "weight", None), "shape", (tokens,))[0]
        if tokens > rows:  # added tokens may stand behind the last row: texts hold none of them
            raise CommandError(
                f"{self.option} {self.path}: its tokenizer has {tokens:,} tokens, and the model {rows:,}; "
                f"{REMEDIES['tokenizer']}"
            )

    @property
    def positions(self) -> int | None:
        """Tokens that the model reads at most, None where its configuration does not say."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(found) if isinstance(found, int) and found > 0 else None

    def check_tokens(self, tokens: int) -> None:
        """CommandError where the model does not read so many."""
        most = self.positions
        if most is not None and tokens > most:
            raise CommandError(f"--tokens {tokens}: the model reads at most {most}; pass that or less{STRETCHED}")
        width = getattr(self.config.get_text_config(), "hidden_size", None) or 1
        if most is None and self.device_map is None:
            self.place.check_room("--tokens", tokens, width * self.place.dtype.itemsize, "one hidden state of them")

    def check_greedy(self, what: str, tokens: int, greedy: int) -> None:
        """CommandError where the model does not read so many tokens and a greedy continuation of so many."""
        most = self.positions
        if most is not None and tokens + greedy > most:
            raise CommandError(
                f"{what}, {greedy} greedy ones follow, and the model reads at most {most}: pass --tokens "
                f"{most - greedy} or less{STRETCHED}"
            )

    def fitted(self, tokens: int, greedy: int, say: Callable[[str], None]) -> int:
        """So many --tokens of a text, or what is left of the model's own length for a greedy continuation of so many.

        say: hears where that is less. CommandError where the model does not read the text itself.
        """
        most = self.positions
        if most is None or tokens + greedy <= most:
            return tokens
        if tokens > most:
            self.check_greedy(f"--tokens {tokens}: texts have so many tokens", tokens, greedy)
        left = most - greedy
        say(f"--tokens {tokens:,}: texts have {left:,}, as the model reads {most:,}, and {greedy} more follow a text")
        return left

    def check_layers(self, layer: int, head: int) -> None:
        """CommandError where the model has no such layer or query head."""
        text = self.config.get_text_config()
        for option, value, count in (
            ("layer", layer, text.num_hidden_layers),
            ("head", head, text.num_attention_heads),
        ):
            if value >= count:
                raise CommandError(f"--{option} {value}: the model has {count}; pass 0 to {count - 1}")


def identity_of(model: Any, path: str | None) -> ModelIdentity:
    """The identity by which a profile knows the model. path: where it is from, None for the embedded one."""
    from ..huggingface.identity import identity
    from ..huggingface.inspection import find_decoder

    known = identity(find_decoder(model))
    return evolve(known, name=EMBEDDED) if path is None else known
