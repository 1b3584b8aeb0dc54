"""vLLM's attention metadata, hooked from ``vllm.general_plugins``, which every process of it runs.

vLLM 0.33 has no tree attention any more; its drafts are verified as chains. What its backends still hold is
the common metadata that each of them builds its own from: query rows, sequence lengths, slots and block
tables. All of it passes one class, ``AttentionGroup``.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.hooks.watch import (
    NotCheckedError,
    Watch,
    hook_settings,
    is_capturing,
    logger,
)
from ddtree.invariants.settings import Settings
from ddtree.spec.errors import InputError

MODULE, CLASS = "vllm.v1.worker.utils", "AttentionGroup"
TARGETS = {
    "build_metadata": "attention metadata",
    "build_metadata_for_cudagraph_capture": "attention metadata of a capture",
}
_PAGED = ("FullAttentionSpec", "SlidingWindowSpec")
"""Caches that are written token by token to the slots of the request's own blocks."""
_LARGEST_TABLE = 1 << 22
"""Entries of block tables, written out as slots, that are looked at: 32 MiB."""


class Hooks:
    """The hooks of one process."""

    def __init__(self, chosen: Settings) -> None:
        """Check as the settings say."""
        self.watch = Watch(f"vLLM {installed_version() or '(unknown version)'}", chosen)

    def install(self) -> None:
        """Put the hooks around the methods, look whether they are there, and say so."""
        where = status()
        for name in [name for name, why in where.items() if not why]:
            group = getattr(import_module(MODULE), CLASS)
            method = name.rpartition(".")[2]
            hooked = self._around(getattr(group, method), TARGETS[method])
            setattr(group, method, hooked)
            is_there = getattr(getattr(import_module(MODULE), CLASS), method) is hooked
            where[name] = "" if is_there else "it is not the hooked one"
        self.watch.installed(where)

    def _around(self, method: Callable[..., Any], where: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def checked(group: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            with self.watch.guarded(where):
                if self.watch.is_due("vllm"):
                    self._look(group, common_attn_metadata, where)
            return method(group, common_attn_metadata, *args, **kwargs)

        return checked

    def _look(self, group: Any, common: Any, where: str) -> None:
        if is_capturing():
            self.watch.once(f"{self.watch.engine}: not checked: {where}: prepared in a CUDA graph")
            return
        call = metadata_call(group, common)
        if call is None:
            return
        found = None if call.positions is None else _roots(call.positions, call.qo_indptr)
        if (
            found is not None
            and call.prefix_lens is not None
            and found != call.prefix_lens.tolist()
        ):
            # a drafter's passes may go on from positions of their own
            self.watch.once(
                f"{self.watch.engine}: a pass begins at positions {found}, its prefixes are "
                f"{call.prefix_lens.tolist()}: positions and slots not checked there"
            )
            left_out = ("positions", "slot_table")
            call = Call(**{name: v for name, v in call.known().items() if name not in left_out})
        self.watch.hold(call, "vllm", where)


def metadata_call(group: Any, common: Any) -> Call | None:
    """A batch's common metadata as a call: each request a chain behind its prefix; None: an empty batch.

    Args:
        group: the ``AttentionGroup`` that builds from it.
        common: vLLM's ``CommonAttentionMetadata``.

    Raises:
        NotCheckedError: a cache of another kind.
    """
    kind = type(group.kv_cache_spec).__name__
    if kind not in _PAGED:
        raise NotCheckedError(f"the cache is of the kind {kind}")
    starts = common.query_start_loc[: common.num_reqs + 1].cpu().long()
    widths = starts.diff()
    used = widths.nonzero()
    requests = int(used[-1]) + 1 if used.numel() else 0  # behind them padding, without rows
    if not requests:
        return None
    starts, widths = starts[: requests + 1], widths[:requests]
    prefix_lens = common.seq_lens[:requests].cpu().long() - widths
    rows = max(int(starts[-1]), 0)
    slots = common.slot_mapping[:rows].cpu()
    known: dict[str, Any] = {}
    # warm-ups and captures write nowhere (-1); so do rows that are left out of the cache
    is_written = bool((slots >= 0).all()) and bool((widths >= 0).all())
    if slots.numel() < rows or is_written:
        known["out_cache_loc"] = slots
    if is_written and bool((prefix_lens >= 0).all()):
        known |= _slots(group, common, requests, int((prefix_lens + widths).max()))
        positions = getattr(common, "positions", None)
        if isinstance(positions, Tensor) and positions.ndim == 1:
            known["positions"] = positions[:rows].cpu()
    if bool((prefix_lens >= 0).all()):
        known["prefix_lens"] = prefix_lens
    elif is_written:  # more query rows than entries: then kv_indptr goes back
        known["kv_indptr"] = torch.nn.functional.pad(prefix_lens.cumsum(0), (1, 0))
    return Call(
        qo_indptr=starts, max_q_len=int(common.max_query_len), batch_size=requests, is_captured=True, **known
    )  # fmt: skip


def _slots(group: Any, common: Any, requests: int, longest: int) -> dict[str, Any]:
    """The slots of each request's blocks; none where blocks are mapped or shared out over ranks."""
    builder = group.get_metadata_builder(0)
    config = getattr(builder, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    ranks = (
        getattr(parallel, "decode_context_parallel_size", 1),
        getattr(parallel, "prefill_context_parallel_size", 1),
    )
    if getattr(group, "kernel_block_size", None) is not None or any(n != 1 for n in ranks):
        return {}
    size = int(builder.kv_cache_spec.block_size)
    blocks = -(-longest // size)
    table = common.block_table_tensor[:requests, :blocks].cpu().long()
    if requests * blocks * size > _LARGEST_TABLE or table.shape != (requests, blocks):
        return {}
    return {"slot_table": (table[:, :, None] * size + torch.arange(size)).flatten(1)}


def _roots(positions: Tensor, starts: Tensor | None) -> list[int] | None:
    """The position of each request's first row."""
    if starts is None or int(starts[-1]) > positions.numel():
        return None
    return [int(positions[start]) for start in starts[:-1].tolist()]


def plugin() -> None:
    """Install the hooks in this process: what the entry point runs. A setting that is wrong is logged."""
    try:
        Hooks(hook_settings()).install()
    except InputError as error:
        logger.error("ddtree hooks: NOT installed on vLLM: %s", error)  # no fault of ours


def status() -> dict[str, str]:
    """Each target's name; why the installed version does not have it, or an empty string."""
    try:
        group = getattr(import_module(MODULE), CLASS)
    except Exception as error:  # noqa: BLE001  # an engine's module may fail in any way when imported
        why = f"not found: {MODULE}.{CLASS}: {type(error).__name__}: {error}"
        return {f"{CLASS}.{name}": why for name in TARGETS}
    return {
        f"{CLASS}.{name}": "" if hasattr(group, name) else "this version has no such method"
        for name in TARGETS
    }


def installed_version() -> str:
    """The version that is installed; empty: none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return ""
