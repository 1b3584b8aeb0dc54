"""SGLang's metadata of one tree verification as a ``Call``: eager, at capture, before a replay, at a kernel.

The width is never the backend's: that number comes from configuration. It is what the pass itself brings, its
query rows shared by its requests, and where those are padded what its ``spec_info`` says. Versions differ in
names (0.5.12 to 0.5.23 were read); what a version does not have is left out of the call.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index
from ddtree.invariants.hooks.watch import NotCheckedError
from ddtree.spec.contracts import FlatMask, QLen, VerifyLayout


def is_verify(forward_mode: Any) -> bool:
    """Whether a pass verifies drafts; prefill, decode and the draft model's own passes do not."""
    return bool(getattr(forward_mode, "is_target_verify", lambda: False)())


def eager_call(backend: Any, batch: Any) -> Call | None:
    """The call that ``init_forward_metadata`` has just made; None: nothing to verify.

    Args:
        backend: a ``TritonAttnBackend``.
        batch: its ``ForwardBatch``.

    Raises:
        NotCheckedError: a layout of another kind.
    """
    if not is_verify(batch.forward_mode):
        return None
    made = backend.forward_metadata
    room = int(made.qo_indptr.numel()) - 1
    padded_from = getattr(batch, "_original_batch_size", None)  # data-parallel ranks even out
    requests = room if padded_from is None else int(padded_from)
    if requests < 1:
        return None
    if _is_unfilled(batch.spec_info, made.custom_mask):
        return widths_call(batch, made)
    width = _width(batch, room, is_padded=padded_from is not None)
    prefix_lens = batch.seq_lens[:requests].long()
    mask = _cut(made.custom_mask, _entries(prefix_lens, width))
    is_longer = padded_from is not None or mask is not made.custom_mask
    return _call(
        backend, batch, width, prefix_lens,
        qo_indptr=made.qo_indptr, kv_indptr=made.kv_indptr, mask_indptr=made.mask_indptr,
        kv_indices=made.kv_indices, custom_mask=mask, max_q_len=made.max_extend_len,
        is_captured=is_longer or None,
    )  # fmt: skip


def widths_call(batch: Any, made: Any) -> Call | None:
    """The widths and room of metadata whose mask and slots are not filled: a capture's, a warm-up's.

    Args:
        batch: the ``ForwardBatch``.
        made: the backend's ``ForwardMetadata`` for it.

    Raises:
        NotCheckedError: a layout of another kind.
    """
    requests = int(made.qo_indptr.numel()) - 1
    if requests < 1:
        return None
    return Call(
        qo_indptr=made.qo_indptr, kv_indptr=made.kv_indptr, max_q_len=made.max_extend_len,
        mask_indptr=made.mask_indptr if made.custom_mask is not None else None,
        q_lens=torch.full((requests,), _width(batch, requests, is_padded=False)),
        prefix_lens=batch.seq_lens[:requests].long(), num_rows=rows_of(batch), is_captured=True,
        batch_size=requests,
    )  # fmt: skip


def room_call(backend: Any, batch: Any) -> Call | None:
    """The mask buffer of graphs and the call that was to be written to it; None: nothing to verify."""
    buffer = _mask_buffer(backend)
    if not is_verify(batch.forward_mode) or buffer is None:
        return None
    requests = int(batch.batch_size) - int(getattr(batch, "num_padding", None) or 0)
    return Call(
        custom_mask=buffer, is_captured=True, batch_size=requests,
        q_lens=torch.full((requests,), _width(batch, int(batch.batch_size), is_padded=False)),
        prefix_lens=batch.seq_lens[:requests].long(),
    )  # fmt: skip


def replay_call(backend: Any, batch: Any, baked: int | None) -> Call | None:
    """The call that a graph is about to be replayed with, from the buffers that it reads.

    Args:
        backend: a ``TritonAttnBackend``.
        batch: the view of the batch that the replay is prepared with.
        baked: the ``max_extend_len`` that the graph was captured with, where it is known.

    Raises:
        NotCheckedError: a layout of another kind.
    """
    if not is_verify(batch.forward_mode):
        return None
    room = int(batch.batch_size)
    requests = room - int(getattr(batch, "num_padding", None) or 0)
    if requests < 1 or _is_idle(batch):
        return None
    width = _width(batch, room, is_padded=False)
    prefix_lens = batch.seq_lens[:requests].long()
    mask = None
    if getattr(batch.spec_info, "custom_mask", None) is not None:
        mask = _cut(_mask_buffer(backend), _entries(prefix_lens, width))
    return _call(
        backend, batch, width, prefix_lens,
        qo_indptr=backend.qo_indptr, kv_indptr=backend.kv_indptr, mask_indptr=backend.mask_indptr,
        kv_indices=backend.cuda_graph_kv_indices, custom_mask=mask, max_q_len=baked, is_captured=True,
    )  # fmt: skip


def planned_call(
    backend: Any, batch: Any, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, mask: Tensor | None,
    *, max_q_len: int | None, is_graph: bool, is_filled: bool,
) -> Call | None:  # fmt: skip
    """The call that a FlashInfer wrapper is planned with; None: nothing to verify.

    FlashInfer's KV entries are the prefix and then the tree's own rows, and from both indptrs it makes the
    mask's segments: a row of a request has one entry for each of its KV entries.

    Args:
        backend: a ``FlashInferAttnBackend``.
        batch: its ``ForwardBatch``.
        qo_indptr, kv_indptr, kv_indices, mask: what ``begin_forward`` is given.
        max_q_len: the width that a plan without a look at the device is told.
        is_graph: the batch is padded to a graph's.
        is_filled: mask and slots are; not so at capture.

    Raises:
        NotCheckedError: a layout of another kind.
    """
    room = int(qo_indptr.numel()) - 1
    padding = getattr(batch, "num_padding", None) if is_graph else None
    padded_from = getattr(batch, "_original_batch_size", None)
    requests = room - int(padding or 0) if padded_from is None else int(padded_from)
    if requests < 1 or _is_idle(batch):
        return None
    qo, kv = (indptr.detach().cpu().long() for indptr in (qo_indptr, kv_indptr))
    made = {"qo_indptr": qo, "kv_indptr": kv - qo}
    if mask is not None:
        segments = qo.diff() * kv.diff()
        made["mask_indptr"] = torch.cat([segments.new_zeros(1), segments.cumsum(0)])
    width = _width(batch, room, is_padded=padded_from is not None)
    prefix_lens = batch.seq_lens[:requests].long()
    if not is_filled or _is_unfilled(batch.spec_info, mask):
        known: dict[str, Any] = {name: indptr[: requests + 1] for name, indptr in made.items()}
        return Call(
            **known, q_lens=torch.full((requests,), width), prefix_lens=prefix_lens, num_rows=rows_of(batch),
            max_q_len=max_q_len, is_captured=True, batch_size=requests,
        )  # fmt: skip
    prefix_slots, table = _read_slots(qo[: requests + 1], kv[: requests + 1], kv_indices)
    cut = _cut(mask, _entries(prefix_lens, width))
    call = _call(
        backend, batch, width, prefix_lens, kv_indices=prefix_slots, custom_mask=cut,
        mask_indptr=made.pop("mask_indptr", None), max_q_len=max_q_len,
        is_captured=is_graph or padded_from is not None or cut is not mask or None, **made,
    )  # fmt: skip
    return call if _translates(backend) else Call(**call.known() | {"slot_table": table})


def _read_slots(qo: Tensor, kv: Tensor, kv_indices: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of all prefixes, and of each request those of prefix and rows in a row of their own.

    Rows must be written where they are read: that is what a slot table says.
    """
    slots, starts = kv_indices.detach().cpu().long(), kv.tolist()
    own = [slots[start:end] for start, end in pairwise(starts)]
    prefixes = [s[: max(s.numel() - q, 0)] for s, q in zip(own, qo.diff().tolist(), strict=True)]
    table = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=-1)
    return torch.cat(prefixes), table


def kernel_call(args: dict[str, Any]) -> Call | None:
    """The call that ``extend_attention_fwd`` is given, where no metadata of it was seen before.

    Rows that are more than the indptrs tell may be padding. They are taken for the call's own where the mask
    has an entry for each of them.

    Args:
        args: its arguments by name; ``custom_mask`` is among them.
    """
    qo_indptr, mask = args["qo_indptr"], args["custom_mask"]
    requests, rows = int(qo_indptr.numel()) - 1, int(args["q_extend"].shape[0])
    if requests < 1 or rows % requests:
        return None
    prefix_lens = args["kv_indptr"][: requests + 1].long().diff()
    attested = mask.numel() == _entries(prefix_lens, rows // requests)
    return Call(
        qo_indptr=qo_indptr, kv_indptr=args["kv_indptr"], mask_indptr=args["mask_indptr"],
        kv_indices=_cut(args["kv_indices"], int(prefix_lens.sum())),
        custom_mask=mask if attested else _cut(mask, int(args["mask_indptr"][requests])),
        max_q_len=int(args["max_len_extend"]),
        q_lens=torch.full((requests,), rows // requests) if attested else None,
        num_rows=rows if attested else None,
        is_captured=None if attested else True,
        **pool_size(args["k_buffer"]),
    )  # fmt: skip


def captured_kernel_call(args: dict[str, Any]) -> Call | None:
    """What ``extend_attention_fwd`` is captured with, by shapes alone: the device cannot be read then."""
    requests, rows = int(args["qo_indptr"].numel()) - 1, int(args["q_extend"].shape[0])
    if requests < 1 or rows % requests:
        return None
    return Call(
        q_lens=torch.full((requests,), rows // requests), max_q_len=int(args["max_len_extend"]),
        num_rows=rows, is_captured=True, batch_size=requests,
    )  # fmt: skip


def attention_arguments(given: dict[str, Any], call: Call) -> dict[str, Any]:
    """The kernel's arguments as those of ``spec.verify_attention``, for ``ddtree replay``."""
    rows = given["q_extend"].shape[0]
    nothing = torch.zeros(rows, dtype=torch.int64)
    layout = VerifyLayout(
        qo_indptr=given["qo_indptr"].int(), kv_indptr=given["kv_indptr"].int(),
        kv_indices=given["kv_indices"].long(), mask_indptr=given["mask_indptr"].long(),
        max_q_len=QLen(int(given["max_len_extend"])),
        positions=nothing if call.positions is None else call.positions.long(),
        out_cache_loc=nothing if call.out_cache_loc is None else call.out_cache_loc.long(),
    )  # fmt: skip
    return {
        "query": given["q_extend"], "key": given["k_extend"], "value": given["v_extend"],
        "key_pool": given["k_buffer"], "value_pool": given["v_buffer"], "layout": layout,
        "mask": FlatMask(given["custom_mask"].bool()), "scale": given.get("sm_scale"),
        "softcap": given.get("logit_cap") or None,
    }  # fmt: skip


def pool_size(pool: Tensor) -> dict[str, Any]:
    """Slots of a KV pool ``[slots, heads, head_dim]``; paged views of it are left alone."""
    return {"kv_pool_size": int(pool.shape[0])} if pool.ndim == 3 else {}


def _call(
    backend: Any, batch: Any, width: int, prefix_lens: Tensor, *, custom_mask: Tensor | None,
    kv_indices: Tensor, mask_indptr: Tensor | None, is_captured: bool | None, max_q_len: int | None,
    **indptrs: Tensor,
) -> Call:  # fmt: skip
    """The part of the metadata that belongs to the requests in use, with what the batch says of them."""
    if getattr(backend, "dcp_size", 1) > 1:
        raise NotCheckedError("the KV cache is split over ranks (decode context parallelism)")
    mode = getattr(getattr(backend, "_verify_mask", None), "mode", None)
    if mode is not None and getattr(mode, "name", "FULL_MASK") != "FULL_MASK":
        raise NotCheckedError(f"the mask is of the form {mode.name}")
    requests = int(prefix_lens.numel())
    rows = requests * width
    known: dict[str, Any] = {name: value[: requests + 1] for name, value in indptrs.items()}
    if custom_mask is not None:  # without one the kernel reads no segments
        assert mask_indptr is not None
        known |= {"custom_mask": custom_mask, "mask_indptr": mask_indptr[: requests + 1]}
    if not _translates(backend):
        known["kv_indices"] = _cut(kv_indices, int(prefix_lens.sum()))
        if getattr(batch, "out_cache_loc", None) is not None:
            known["out_cache_loc"] = batch.out_cache_loc[:rows]
    if getattr(batch, "positions", None) is not None:
        known["positions"] = batch.positions[:rows]
    return Call(
        **known, **_tree(batch.spec_info, requests, width), max_q_len=max_q_len, is_captured=is_captured,
        q_lens=torch.full((requests,), width), prefix_lens=prefix_lens, batch_size=requests,
    )  # fmt: skip


def _width(batch: Any, requests: int, *, is_padded: bool) -> int:
    """Query rows of each request: those that there are, else those that ``spec_info`` tells.

    Raises:
        NotCheckedError: neither tells.
    """
    if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
        raise NotCheckedError("requests have widths of their own (ragged verify)")
    rows = None if is_padded else rows_of(batch)
    if rows and rows % requests == 0:
        return rows // requests
    told = told_width(batch.spec_info)
    if told is None:
        raise NotCheckedError(
            f"{rows or 'an unknown number of'} query rows for {requests} requests, no draft_token_num"
        )
    return told


def told_width(spec_info: Any) -> int | None:
    """What ``spec_info`` says that the width is."""
    for name in ("draft_token_num", "num_tokens_per_req"):
        value = getattr(spec_info, name, None)
        if value is not None and int(value) > 0:
            return int(value)
    return None


def rows_of(batch: Any) -> int | None:
    """Query rows of the pass."""
    for name in ("positions", "input_ids"):
        value = getattr(batch, name, None)
        if isinstance(value, Tensor):
            return int(value.shape[-1])
    return None


def _is_unfilled(spec_info: Any, mask: Tensor | None) -> bool:
    """Whether this is a pass of a warm-up: no tokens, or a mask in which no row sees anything."""
    if hasattr(spec_info, "draft_token") and spec_info.draft_token is None:
        return True
    return mask is not None and not bool(mask.any())


def _is_idle(batch: Any) -> bool:
    mode = getattr(batch, "actual_forward_mode", None)
    return bool(mode is not None and getattr(mode, "is_idle", lambda: False)())


def _entries(prefix_lens: Tensor, width: int) -> int:
    """Mask entries of requests of one width: ``index.mask_len`` summed."""
    return int(sum(index.mask_len(prefix_len, width) for prefix_len in prefix_lens.tolist()))


def _cut(buffer: Any, length: int) -> Any:
    """The part of a buffer that this call fills; a buffer that is too short as it is."""
    return buffer if buffer is None or buffer.numel() <= length else buffer[:length]


def _mask_buffer(backend: Any) -> Tensor | None:
    """The mask that graphs read: ``VerifyMask`` since 0.5.17."""
    held = getattr(backend, "_verify_mask", None)
    buffer: Tensor | None = getattr(held, "buffer", None)
    return buffer if held is not None else getattr(backend, "cuda_graph_custom_mask", None)


def _translates(backend: Any) -> bool:
    """Whether slots are named by two kinds of numbers, which cannot be compared."""
    translator = getattr(backend, "kv_index_translator", None)
    return bool(
        getattr(translator, "is_translating", False)
        or getattr(backend, "_translate_kv_loc", None) is not None
        or getattr(backend, "use_sliding_window_kv_pool", False)
    )


def _tree(spec_info: Any, requests: int, width: int) -> dict[str, Any]:
    """Parents, depths and node counts from the links to first children and next siblings; none where they
    are no tree whose nodes come before padding."""
    links = [
        getattr(spec_info, name, None) for name in ("retrieve_next_token", "retrieve_next_sibling")
    ]
    if any(not isinstance(link, Tensor) or link.numel() < requests * width for link in links):
        return {}
    children, siblings = (
        link.flatten()[: requests * width].view(requests, width).tolist()
        for link in links
        if isinstance(link, Tensor)
    )
    parents = torch.full((requests, width), -1, dtype=torch.int32)
    depths = torch.zeros(requests, width, dtype=torch.int32)
    counts: list[int] = []
    for b in range(requests):
        seen, open_nodes = {0}, [0]
        while open_nodes:
            node = open_nodes.pop()
            child = children[b][node]
            while child >= 0:
                if child in seen or child >= width:
                    return {}
                seen.add(child)
                open_nodes.append(child)
                parents[b, child], depths[b, child] = node, depths[b, node] + 1
                child = siblings[b][child]
        if max(seen) != len(seen) - 1:
            return {}
        counts.append(len(seen))
    return {"parents": parents, "depths": depths, "num_nodes": torch.tensor(counts)}
