"""A transformers model that reads samples for whoever makes a table of it (`profiles.table.ModelReader`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Result
from sparseprefill.profiles.identity import ModelIdentity

from .api import attach
from .inspection import find_decoder

Added = Callable[[int, Tensor, Tensor], None]


@frozen(eq=False)
class Reader:
    """A model, and what tables know it by."""

    model: Any
    identity: ModelIdentity

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        found: torch.device = self.model.device
        return found

    @torch.inference_mode()
    def read(
        self,
        samples: Sequence[Sequence[int]],
        pipeline: Pipeline,
        observe: Callable[[AttentionCall, Result], None],
        added: Added | None = None,
        *,
        verify: bool = False,
    ) -> Iterator[tuple[int, ...]]:
        """Implement `ModelReader.read`: the model reads samples, and tells of each layer."""
        for index, ids in enumerate(samples):
            first = verify and index == 0
            options: dict[str, Any] = {"strict": True, "gate": None, "tail": 0, "recall_every": 0, "verify": first}
            with _listening(self.model, added), attach(self.model, pipeline, observe=observe, **options) as handle:
                given = torch.tensor([list(ids)], dtype=torch.int64, device=self.model.device)
                self.model(given, use_cache=False, logits_to_keep=1)
                layers = tuple(one.layer for one in handle.report().layers)
            yield layers


@contextmanager
def _listening(model: Any, added: Added | None) -> Iterator[None]:
    """Tells `added` of each attention module, while the model reads, what it is given and what it adds."""
    decoder = find_decoder(model)
    with ExitStack() as hooks:
        for name, module in decoder.named_modules() if added else ():
            layer = getattr(module, "layer_idx", None)
            if "Attention" not in type(module).__name__ or not isinstance(layer, int):
                continue
            owner = decoder.get_submodule(name.rpartition(".")[0])
            given: list[Tensor] = []

            def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor] = given) -> None:
                given[:] = [args[0] if args else kwargs["hidden_states"]]

            def after(_: Any, args: Any, output: Any, layer: int = layer, given: list[Tensor] = given) -> None:
                if added is not None:
                    added(layer, given[0], output[0] if isinstance(output, tuple) else output)

            hooks.enter_context(owner.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after))
        yield
