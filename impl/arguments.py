"""What the launchers refuse of their arguments: kinds, dtypes, and shapes of two that do not agree.

A kernel takes a size from one tensor and reads another by it. So whatever the host knows of both is compared
here, before a launch; what only the device knows is debug mode's to check.
"""

from torch import Tensor

from ddtree.spec.contracts import DraftTree, VerifyLayout
from ddtree.spec.dtypes import require_kind
from ddtree.spec.errors import InputError, require


def require_tree(tree: DraftTree) -> None:
    """Refuse what is no tree, and one whose fields have not one shape."""
    require_kind("tree", tree, DraftTree)
    shape = tree.token_ids.shape
    if tree.parents.shape == shape == tree.depths.shape and tree.num_nodes.numel() == shape[0]:
        return
    held = {name: list(getattr(tree, name).shape) for name in ("parents", "depths", "num_nodes")}
    raise InputError(
        f"DraftTree.token_ids has {shape[0]} requests of {shape[1]} rows; the shapes of others are {held}"
    )


def require_layout(layout: VerifyLayout) -> None:
    """Refuse what is no layout, and one whose fields speak of other numbers of requests or rows."""
    require_kind("layout", layout, VerifyLayout)
    qo, kv, mask = layout.qo_indptr.numel(), layout.kv_indptr.numel(), layout.mask_indptr.numel()
    if qo != kv or qo != mask or not qo:
        raise InputError(
            f"VerifyLayout.qo_indptr has {qo} entries, kv_indptr {kv}, mask_indptr {mask}; each has one "
            "more than there are requests"
        )
    rows, slots = layout.positions.numel(), layout.out_cache_loc.numel()
    if rows != slots:
        raise InputError(f"VerifyLayout.positions has {rows} rows, out_cache_loc {slots}")


def require_requests(layout: VerifyLayout, whose: str, batch: int) -> None:
    """Refuse a layout of fewer requests, and of more where it is not marked as larger than its call."""
    requests = layout.qo_indptr.numel() - 1
    if requests < batch or (requests > batch and not layout.is_captured):
        raise InputError(f"the layout has {requests} requests, the {whose} {batch}")


def require_made_for(layout: VerifyLayout, tree: DraftTree) -> None:
    """Refuse a layout of another batch than the trees', or of more rows a request than they have."""
    (batch, rows), requests = tree.token_ids.shape, layout.qo_indptr.numel() - 1
    if requests != batch:
        raise InputError(f"the layout has {requests} requests, the tree {batch}")
    if layout.max_q_len > rows:
        raise InputError(f"the layout has max_q_len {layout.max_q_len}; its tree has {rows} rows")


def require_rows(name: str, tensor: Tensor, layout: VerifyLayout) -> None:
    """Refuse a tensor of fewer rows than the layout's, each of which may be one of the call's."""
    rows = layout.positions.numel()
    if tensor.shape[0] < rows:
        raise InputError(f"{name} has shape {list(tensor.shape)}; the layout has {rows} query rows")


def require_logits(logits: Tensor) -> None:
    """Refuse what is no table of rows of logits."""
    require(
        logits.ndim == 2 and logits.shape[1] >= 1,
        "logits have shape {}; expected [rows, vocab] with a token at least",
        list(logits.shape),
    )
    require(
        logits.stride(1) == 1,
        "logits have strides {}; a row's logits must lie side by side",
        logits.stride(),
    )


def require_table(name: str, tensor: Tensor, *shape: int) -> None:
    """Refuse another shape, and numbers that do not lie side by side: a kernel computes where each one is."""
    if tensor.shape != shape or not tensor.is_contiguous():
        raise InputError(
            f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}; "
            f"expected {list(shape)}, contiguous"
        )
