"""The switch: under which names a decoder's configs run, who needs them switched, and what they named before.

A layer reads the name from its config at every call. So a config is switched when the first attachment needs it, and
switched back when the last has gone and the forwards that began with it have ended.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from sparseprefill.errors import AttachError

from .inspection import configurations, implementations

PREFIX = "sparseprefill_"
DOOR = "sparseprefill"  # under which a model is attached as its first forward begins
STAR = f"{PREFIX}star_"  # names of Star Attention, which switches a model for the length of a phase
LOCK = threading.RLock()
"""Held while anything is attached, detached, or a forward begins or ends."""

_names: dict[tuple[str, int], str] = {}  # (original implementation, min_query) -> the one name for both, for ever
_switches: weakref.WeakSet[Switch] = weakref.WeakSet()
_coming: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # that are looked at, to be attached


class User(Protocol):
    """A user of a switch. active: it takes new forwards; if not, some that it took have not ended."""

    active: bool


class Name(str):
    """A registered name, as a config holds it. In a copy or a pickle of the config it is what stood there before."""

    before: str | None

    @classmethod
    def over(cls, name: str, before: str | None) -> Name:
        """The name in the place of what a config named before."""
        made = cls(name)
        made.before = before
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str | None:
        return self.before

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ()) if self.before is None else (str, (self.before,))


def name_of(original: str, min_query: int) -> tuple[str, bool]:
    """The name for an implementation, and whether it is new. The names that there are do not grow with attachments."""
    with LOCK:
        new = (original, min_query) not in _names
        return _names.setdefault((original, min_query), f"{PREFIX}{len(_names)}"), new


def is_ours(name: str | None) -> bool:
    """True if a config names one of our functions."""
    return name in _names.values()


def named_before(name: str | None) -> str | None:
    """The name that stood in a config before ours."""
    if isinstance(name, Name):
        return name.before
    return next((original for (original, _), ours in _names.items() if ours == name), name)


def settle(model: torch.nn.Module) -> list[PreTrainedConfig]:
    """Give the parts of a model that are to be attached by the name what transformers would choose for them.

    Returns the configurations that had the name.
    """
    named = [config for config in configurations(model) if config._attn_implementation == DOOR]
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts if named else ():
        if part.config._attn_implementation == DOOR:
            part.config._attn_implementation_internal = part.get_correct_attn_implementation(None)
    for config in named:
        if config._attn_implementation == DOOR:  # of no part
            config._attn_implementation_internal = parts[0].config._attn_implementation if parts else None
    return named


class Switch:
    """One decoder's. users: attachments that take forwards, or have some that have not ended."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.users: weakref.WeakSet[User] = weakref.WeakSet()
        self._decoder = weakref.ref(decoder)
        self._before: list[tuple[PreTrainedConfig, str | None]] = []

    @classmethod
    def of(cls, decoder: PreTrainedModel) -> Switch:
        """The decoder's switch; all attachments of a decoder share one."""
        with LOCK:
            found = next((switch for switch in _switches if switch._decoder() is decoder), None)
            if found is None:
                found = cls(decoder)
                _switches.add(found)
            return found

    def take(self, user: User, decoder: PreTrainedModel, name: str) -> None:
        """Switch the decoder to `name`. Raises AttachError if it does not take it."""
        known = {id(config): before for config, before in self._before}
        found = implementations(decoder)
        self._before = [(c, known.get(id(c), named_before(value)) if is_ours(value) else value) for c, value in found]
        self.users.add(user)
        decoder.set_attn_implementation(name)
        if decoder.config._attn_implementation != name:
            raise AttachError(f"{type(decoder).__name__} did not accept another attention implementation")
        for config, before in self._before:
            if config._attn_implementation_internal == name:
                config._attn_implementation_internal = Name.over(name, before)

    def release(self, user: User) -> None:
        """Switch back if nobody else needs it; what somebody chose meanwhile stays."""
        self.users.discard(user)
        while self._before and not self.users:
            config, name = self._before.pop()
            if is_ours(config._attn_implementation_internal):
                config._attn_implementation_internal = name

    def holds(self, config: PreTrainedConfig) -> bool:
        """True if this switch has switched the config."""
        return bool(self.users) and any(config is one for one, _ in self._before)


@contextmanager
def attaching(decoder: PreTrainedModel) -> Iterator[None]:
    """Within, nobody else attaches the decoder: of several threads that do so at once, all but one have an AttachError
    before they have run it."""
    with LOCK:
        if decoder in _coming:
            raise AttachError(f"{type(decoder).__name__} is being attached already: attach it once, in one thread")
        claim(decoder)
        _coming.add(decoder)
    try:
        yield
    finally:
        with LOCK:
            _coming.discard(decoder)


def claim(decoder: PreTrainedModel) -> None:
    """Make sure that a decoder can be attached. Raises AttachError if somebody uses one of its configs.

    A config that names our function though nobody switched it is a copy, or its model is gone: it gets its own back.
    """
    name = type(decoder).__name__
    with LOCK:
        mine = Switch.of(decoder)
        if any(user.active for user in mine.users):
            raise AttachError(
                f"{name} is already attached: detach it by its handle, or by detach(model) if that is lost, or replace "
                "what it is attached by: attach(..., replace=True)"
            )
        for config, value in implementations(decoder):
            holder = next((switch for switch in _switches if switch.holds(config)), None)
            if holder not in (None, mine):
                raise AttachError(
                    f"{name} shares its config object with another model that is already attached: detach that first"
                )
            if holder is None and is_ours(value):
                config._attn_implementation_internal = named_before(value)
