"""Transformers' models: every forward that is given a 4-D mask behind a prefix, held to the table."""

import functools
import inspect
import os
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.hooks.watch import NotCheckedError, Watch, hook_settings
from ddtree.spec.errors import of_kind, require


class Attachment:
    """The hook on one model. Leaving its context, or ``detach``, takes it off."""

    def __init__(self, model: Any) -> None:
        """Put the hook on, look whether it is there, and log it.

        Raises:
            InputError: a model whose forward takes no ``attention_mask``: nothing would ever be checked.
        """
        # with or without a head, all passes go through the decoder
        model = getattr(model, "base_model", model)
        names = _parameters(model)
        self.model, self._forward = model, model.forward
        self.watch = Watch(type(model).__name__, hook_settings(os.environ))

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            where = f"forward of {type(model).__name__}"
            with self.watch.guarded(where):
                given = dict(zip(names, args, strict=False)) | kwargs
                call = forward_call(given) if self.watch.is_due("transformers") else None
                if call is not None:
                    self.watch.hold(call, "transformers", where)
            return self._forward(*args, **kwargs)

        model.forward = forward
        is_there = model.forward is forward
        self.watch.installed(
            {"forward": "" if is_there else "the model does not let it be replaced"}
        )

    def detach(self) -> None:
        """Take the hook off; again does nothing."""
        if "forward" in vars(self.model):
            del self.model.forward
        if self.model.forward != self._forward:  # it was the instance's own before
            self.model.forward = self._forward

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.detach()


def _parameters(model: Any) -> list[str]:
    """The parameters of a model's forward.

    Raises:
        InputError: it has none that a mask could be.
    """
    forward = getattr(model, "forward", None)
    known = inspect.signature(forward).parameters if callable(forward) else {}
    takes = "attention_mask" in known or any(p.kind is p.VAR_KEYWORD for p in known.values())
    has = f"forward({', '.join(known)})" if callable(forward) else "no forward"
    require(
        takes,
        f"attach was given {of_kind(model)}, which has {has}; expected a Transformers model, or a "
        "module whose forward takes attention_mask",
    )
    return list(known)


def forward_call(given: dict[str, Any]) -> Call | None:
    """A forward's mask and positions as a call; None: no 4-D mask, or no prefix, so nothing to verify.

    Args:
        given: the arguments by name.

    Raises:
        NotCheckedError: a mask of another kind.
    """
    mask = given.get("attention_mask")
    if isinstance(mask, dict):  # one for each type of layer
        mask = mask.get("full_attention")
    prefix_len = _prefix_len(
        given.get("cache", given.get("past_key_values"))
    )  # later versions renamed it
    if not isinstance(mask, Tensor) or mask.ndim != 4 or prefix_len == 0:
        return None
    requests, heads, rows, columns = mask.shape
    if heads != 1:
        raise NotCheckedError(f"the mask has {heads} heads")
    length = prefix_len + rows
    if columns < length:
        raise NotCheckedError(f"the mask has {columns} columns for {prefix_len} + {rows} entries")
    mask = mask.detach().cpu()
    allowed = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0
    if bool(allowed[:, :, length:].any()):
        raise NotCheckedError(f"rows see entries behind the {prefix_len} + {rows} that there are")
    allowed = allowed[:, :, :length].clone()
    hidden = ~allowed[:, :, :prefix_len].any(
        dim=1
    )  # [B, prefix_len]: a prompt's padding, which no row sees
    known: dict[str, Any] = {
        "q_lens": torch.full((requests,), rows),
        "prefix_lens": torch.full((requests,), prefix_len),
    }
    if mask.dtype is torch.bool or columns > length or bool(hidden.any()):
        allowed[:, :, :prefix_len] |= hidden[:, None]
        known["custom_mask"] = allowed.flatten()
        known["mask_indptr"] = torch.arange(requests + 1) * rows * length
    else:
        known["bias"] = mask
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape[-1] == rows and positions.ndim == 2:
        shifted = positions.detach().cpu() + hidden.sum(dim=1, keepdim=True)
        known["positions"] = shifted.expand(requests, rows).flatten()
    return Call(**known)


def _prefix_len(cache: Any) -> int:
    """Entries that the cache holds."""
    return 0 if cache is None else int(cache.get_seq_length())
