"""SGLang's Triton kernels of tree verification, from its wheel alone: no engine, no server.

Attention (``extend_attention_fwd``), tree mask (``sgl_build_tree_kernel_efficient_triton``), and greedy
verification (``verify_tree_greedy_kernel_triton``). The last two take EAGLE's own metadata, made here
from our trees. Without a GPU they run in Triton's interpreter.
"""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ddtree import spec
from ddtree.invariants.conformance.backend import Refused
from ddtree.peers.own import interpret_without_gpu

ATTENTION = "sglang.kernels.ops.attention.extend_attention"
TREE = "sglang.kernels.ops.speculative.spec_tree"


@cache
def sglang_module(name: str) -> ModuleType:
    """A kernel module of the installed SGLang by its dotted name, without the engine around it.

    ``import sglang`` would load a whole engine, of which a kernel file uses a handful of switches. So the
    packages above it enter ``sys.modules`` as bare folders, and the modules that hold the switches as
    stubs that say: CUDA if there is any, nothing else. The kernel's own files run as they are.
    """
    root = _folder()
    interpret_without_gpu()
    folders = (
        "",
        "kernels",
        "kernels/ops",
        "kernels/ops/attention",
        "kernels/ops/speculative",
        "srt",
    )
    for folder in folders:
        package = ModuleType(".".join(["sglang", *folder.split("/")]).rstrip("."))
        package.__path__ = [str(root / folder)]
        sys.modules.setdefault(package.__name__, package)
    names = ("is_hip", "is_gfx95_supported", "is_gfx1250_supported", "is_musa", "is_npu", "is_cpu")
    utils = _stub(
        "sglang.srt.utils",
        get_device_core_count=None,
        is_cuda=torch.cuda.is_available,
        is_xpu=lambda: True,  # of the tree kernels the Triton ones
        **dict.fromkeys(names, lambda: False),
    )
    _stub("sglang.srt.environ", envs=None)
    _stub("sglang.srt.platforms", current_platform=None)
    _stub("sglang.srt.platforms.interface", reject_out_of_tree_path=lambda *_: None)
    if name == TREE:  # with CUDA it would load compiled kernels beside the Triton ones
        was, utils.is_cuda = utils.is_cuda, lambda: False  # type: ignore[attr-defined]
        try:
            return import_module(name)
        finally:
            utils.is_cuda = was  # type: ignore[attr-defined]
    return import_module(name)


@cache
def _folder() -> Path:
    """Where the wheel's package lies."""
    found = find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise ImportError("sglang is not installed")
    return Path(next(iter(found.submodule_search_locations)))


def _stub(name: str, **members: Any) -> ModuleType:
    """A module that holds these members, unless there is one."""
    module = ModuleType(name)
    vars(module).update(members)
    return sys.modules.setdefault(name, module)


class Triton:
    """SGLang's Triton path, as ``TritonAttnBackend`` and its EAGLE workers call it."""

    mask_forms = ("flat",)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # the interpreter computes nonsense from bf16 operands of tl.dot
    dtypes = (
        (torch.float16, torch.bfloat16)
        if torch.cuda.is_available()
        else (torch.float32, torch.float16)
    )

    def __init__(self) -> None:
        """Load the kernels."""
        self.attention, self.tree = sglang_module(ATTENTION), sglang_module(TREE)

    def verify_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        layout: spec.VerifyLayout,
        mask: spec.FlatMask,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        window: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend. ``is_causal`` stays True as in the engine: parents come before their children.

        Its models give a window of w as ``sliding_window_size`` w - 1: rows see so many entries before
        their own.
        """
        if window == 1:
            raise Refused(
                "a window of 1 would be a sliding_window_size of 0, which turns windows off"
            )
        output = torch.zeros_like(query)
        lse = query.new_zeros(query.shape[:2], dtype=torch.float32)
        self.attention.extend_attention_fwd(
            query, key, value, output, key_pool, value_pool,
            layout.qo_indptr, layout.kv_indptr, layout.kv_indices,
            mask.allowed.view(torch.uint8), True, layout.mask_indptr, layout.max_q_len, 1.0, 1.0,
            sm_scale=scale, logit_cap=softcap or 0.0, sinks=sinks,
            sliding_window_size=-1 if window is None else window - 1,
            window_kv_offsets=torch.zeros_like(layout.kv_indptr),
            lse_extend=lse if return_lse else None,
        )  # fmt: skip
        return (output, lse) if return_lse else output

    def tree_mask(
        self, tree: spec.DraftTree, layout: spec.VerifyLayout, form: str
    ) -> spec.FlatMask:
        """The full mask by the tree builder, from candidates that are our nodes."""
        parents, selected, width, prefix_lens = _candidates(tree, layout)
        rows = tree.parents.numel()
        mask = torch.ones(int(layout.mask_indptr[-1]), dtype=torch.bool, device=tree.parents.device)
        links = [torch.full((rows,), -1, device=tree.parents.device) for _ in range(4)]
        self.tree.sgl_build_tree_kernel_triton(
            parents, selected, prefix_lens, mask, *links,
            topk=width, depth=width, draft_token_num=width,
        )  # fmt: skip
        return spec.FlatMask(mask)

    def accept_greedy(
        self, tree: spec.DraftTree, target_ids: Tensor, layout: spec.VerifyLayout, horizon: int
    ) -> spec.Acceptance:
        """Walk along linked children and siblings, made from our parents."""
        batch, width = tree.parents.shape
        device = tree.parents.device
        choices = torch.zeros(batch, width, dtype=torch.int64, device=device)
        for b, (start, end) in enumerate(
            zip(layout.qo_indptr.tolist(), layout.qo_indptr[1:].tolist(), strict=False)
        ):
            choices[b, : end - start] = target_ids[start:end]
        child, sibling = linked(tree)
        rows = torch.arange(batch * width, device=device).view(batch, width)
        predicted = torch.zeros(batch * width, dtype=torch.int64, device=device)
        accepted = torch.full((batch, horizon + 1), -1, dtype=torch.int64, device=device)
        counts = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tree.verify_tree_greedy_kernel_triton[(batch,)](
            predicted, accepted, counts, tree.token_ids.contiguous(), rows, child, sibling,
            choices, batch, horizon + 1, width,
        )  # fmt: skip
        last = accepted.gather(1, counts[:, None]).flatten()
        base = torch.arange(batch, device=device)[:, None] * width
        nodes = torch.where(accepted >= 0, accepted - base, -1)
        return spec.Acceptance(nodes.int(), (counts + 1).int(), predicted[last])


def linked(tree: spec.DraftTree) -> tuple[Tensor, Tensor]:
    """``[B, Q]`` int64 first child and next sibling of each node, -1 for none; padding has no links."""
    batch, width = tree.parents.shape
    child, sibling = (torch.full((batch, width), -1, dtype=torch.int64) for _ in range(2))
    parents = tree.parents.tolist()
    for b, nodes in enumerate(tree.num_nodes.tolist()):
        for row in range(nodes - 1, 0, -1):
            parent = parents[b][row]
            sibling[b, row], child[b, parent] = child[b, parent].clone(), row
    return child.to(tree.parents.device), sibling.to(tree.parents.device)


def _candidates(
    tree: spec.DraftTree, layout: spec.VerifyLayout
) -> tuple[Tensor, Tensor, int, Tensor]:
    """EAGLE's ``parent_list`` and ``selected_index`` for our nodes, the width, and prefix lengths.

    Candidate ``row * width + rank`` is a child of the row-th candidate that was expanded. Expanded are all
    rows, so ``parent_list[row]`` is the row's own candidate. Padding rows become children of the root.
    """
    batch, width = tree.parents.shape
    widths = layout.qo_indptr.diff()
    if not bool((widths == width).all()):
        raise Refused("the tree builder takes one width for all requests")
    parents = torch.zeros(batch, width, dtype=torch.int64)
    selected = torch.zeros(batch, max(width - 1, 1), dtype=torch.int64)
    for b in range(batch):
        children = [0] * width
        for row in range(1, width):
            parent = max(int(tree.parents[b, row]), 0)
            selected[b, row - 1] = parent * width + children[parent]
            parents[b, row] = selected[b, row - 1]
            children[parent] += 1
    device = tree.parents.device
    return parents.to(device), selected.to(device), width, layout.kv_indptr.diff().long()
