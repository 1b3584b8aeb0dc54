"""A captured call: every number of one verify pass that an invariant may ask for, each optional.

Field names are the contracts' (and so the serving engines') own. What is None is not known, and the
invariants that need it are reported as not checked. ``B`` requests, ``Q`` padded rows of a tree,
``T`` query rows of the call, ``H`` horizon.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from ddtree.spec.contracts import (
    Acceptance,
    BitMask,
    Commit,
    DenseMask,
    DraftTree,
    FlatMask,
    PackedMask,
    PagedKV,
    VerifyLayout,
)
from ddtree.spec.errors import InputError, of_kind, require


def _tensor(kind: str, ndim: int, doc: str) -> Any:
    return field(default=None, metadata={"kind": kind, "ndim": ndim, "doc": doc})


def _number(doc: str, kind: str = "number") -> Any:
    return field(default=None, metadata={"kind": kind, "ndim": 0, "doc": doc})


def on_host() -> AbstractContextManager[object]:
    """Have PyTorch make tensors on the CPU, whatever default device the program around works under.

    Checks look at copies on the CPU; what they make beside them has to lie there too.
    """
    is_host = torch.get_default_device().type == "cpu"
    return nullcontext() if is_host else torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """One verify pass, as far as it is known. ``Call.of`` makes one from the contracts' objects."""

    # layout
    qo_indptr: Tensor | None = _tensor("index", 1, "`[B+1]` query rows of each request")
    kv_indptr: Tensor | None = _tensor("index", 1, "`[B+1]` prefix entries of each request")
    kv_indices: Tensor | None = _tensor("index", 1, "pool slots of the prefix entries")
    mask_indptr: Tensor | None = _tensor("index", 1, "`[B+1]` segments of `custom_mask`")
    max_q_len: int | None = _number("largest q_len; under capture the captured one")
    positions: Tensor | None = _tensor("index", 1, "`[T]` prefix_len + depth")
    out_cache_loc: Tensor | None = _tensor("index", 1, "`[T]` slots the tree's KV is written to")
    input_ids: Tensor | None = _tensor("index", 1, "`[T]` token fed to each query row")
    # mask, in any of the four forms
    custom_mask: Tensor | None = _tensor("any", 1, "flat form, True = may attend")
    packed: Tensor | None = _tensor("bytes", 1, "packed form")
    byte_indptr: Tensor | None = _tensor("index", 1, "`[B+1]` byte segments of `packed`")
    bias: Tensor | None = _tensor("float", 4, "`[B, 1, Q, K]` dense additive form")
    words: Tensor | None = _tensor("index", 2, "`[T, W]` ancestor bits, tree columns only")
    # draft
    draft_log_probs: Tensor | None = _tensor("float", 3, "`[B, H, vocab]` of the drafter")
    # tree
    token_ids: Tensor | None = _tensor("index", 2, "`[B, Q]` token of each node")
    parents: Tensor | None = _tensor("index", 2, "`[B, Q]` row of each node's parent")
    depths: Tensor | None = _tensor("index", 2, "`[B, Q]` distance from the root")
    scores: Tensor | None = _tensor("float", 2, "`[B, Q]` path log-probs")
    num_nodes: Tensor | None = _tensor("index", 1, "`[B]` real nodes, root included")
    root_token_ids: Tensor | None = _tensor("index", 1, "`[B]` bonus tokens of the round before")
    # what the call says of itself, independently of the layout
    batch_size: int | None = _number("requests of this call, where buffers hold more")
    q_lens: Tensor | None = _tensor("index", 1, "`[B]` query rows this call asked for")
    prefix_lens: Tensor | None = _tensor("index", 1, "`[B]` committed entries before the pass")
    num_rows: int | None = _number("rows of the query tensor")
    budget: int | None = _number("most non-root nodes")
    horizon: int | None = _number("deepest drafted position")
    is_captured: bool | None = _number("fixed buffers: longer than the call, inert tail", "flag")
    pad_slot: int | None = _number("what `out_cache_loc` holds in the tail of fixed buffers")
    # memory
    slot_table: Tensor | None = _tensor("index", 2, "`[B, max_context]` before the commit")
    slot_table_after: Tensor | None = _tensor("index", 2, "`[B, max_context]` after the commit")
    kv_pool_size: int | None = _number("slots of the KV pool")
    slot_stride: int | None = _number("elements of one slot: kv_heads * head_dim")
    vocab_size: int | None = _number("tokens of the vocabulary")
    offset_bits: int | None = _number("bits the engine computes addresses in: 32 or 64")
    # outputs
    nodes: Tensor | None = _tensor("index", 2, "`[B, H+1]` accepted rows, root first, then -1")
    num_accepted: Tensor | None = _tensor("index", 1, "`[B]` accepted nodes, root counted")
    bonus: Tensor | None = _tensor("index", 1, "`[B]` the target's choice at the last node")
    target_ids: Tensor | None = _tensor("index", 1, "`[T]` the target's choice at each row")
    committed_lens: Tensor | None = _tensor("index", 1, "`[B]` `Commit.prefix_lens`")
    src: Tensor | None = _tensor("index", 2, "`[B, H+1]` slots the accepted KV was in")
    dst: Tensor | None = _tensor("index", 2, "`[B, H+1]` slots it is in now")
    commits_before: int | None = _number("times that this acceptance was committed before")
    emitted: Tensor | None = _tensor("index", 2, "`[B, H+1]` accepted tokens, then the bonus")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is not None:
                object.__setattr__(self, spec.name, _accept(spec, value))

    @classmethod
    def of(cls, *objects: object, **known: Any) -> "Call":
        """Gather the fields of contract objects, in any order, then those named.

        Args:
            objects: any of ``DraftTree``, ``VerifyLayout``, the four masks, ``Acceptance``,
                ``Commit``, ``PagedKV``, ``VerifyBuffers``, ``Round``. A later one wins. None is
                passed over.
            known: single fields by name. None is passed over.

        Raises:
            InputError: an unknown field, an object of another kind, or a field of a wrong kind.
        """
        found: dict[str, Any] = {}
        for item in objects:
            if item is not None:
                found.update(contents(item))
        for name, value in known.items():
            if name not in FIELDS:
                raise InputError(unknown_name(name))
            if value is not None:
                found[name] = value
        return cls(**found)

    def known(self) -> dict[str, Any]:
        """The fields that are known, by name."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    def on_cpu(self) -> "Call":
        """The same call with its tensors on the CPU: one copy, so that checks never wait twice.

        The drafter's log-probs alone stay where they are: they are larger than all else together.
        """
        moved: dict[str, Any] = {
            n: v.detach().cpu()
            for n, v in self.known().items()
            if isinstance(v, Tensor) and n != "draft_log_probs"
        }
        return replace(self, **moved)


FIELDS: dict[str, "Field[Any]"] = {spec.name: spec for spec in fields(Call)}
"""The fields of a captured call by name, in the order of the class."""


def unknown_name(name: str) -> str:
    """The sentence that refuses a field name, with the nearest right one."""
    near = get_close_matches(name, FIELDS, n=1, cutoff=0.5)
    better = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(FIELDS)}"
    return f"a captured call has no field {name!r}{better}"


def contents(item: object) -> dict[str, Any]:
    """The fields of a call that one contract object holds.

    Raises:
        InputError: the object is none of the contracts'.
    """
    for kind, read in _READERS.items():
        if isinstance(item, kind):
            return read(item)
    # buffers and rounds are recognised by what they hold: spec's largest modules stay unimported
    if hasattr(item, "layout") and hasattr(item, "mask"):
        return _composite(item)
    if isinstance(item, Call):
        raise InputError("a Call is a captured call, no part of one: give it by name, call=...")
    raise InputError(f"{of_kind(item)} is no part of a captured call")


def _composite(item: Any) -> dict[str, Any]:
    """A ``Round`` (tree to commit) or ``VerifyBuffers`` (layout, mask and the rows' tokens)."""
    found: dict[str, Any] = {}
    for name in ("tree", "layout", "mask", "acceptance", "commit"):
        if hasattr(item, name):
            found.update(contents(getattr(item, name)))
    if hasattr(item, "tree"):
        found["emitted"] = item.token_ids
    else:
        found |= {"input_ids": item.token_ids, "pad_slot": item.pad_slot}
    return found


def _layout(layout: VerifyLayout) -> dict[str, Any]:
    return dict(layout.__dict__)


def _tree(tree: DraftTree) -> dict[str, Any]:
    return dict(tree.__dict__)


def _paged_kv(kv: PagedKV) -> dict[str, Any]:
    known: dict[str, Any] = {"slot_table": kv.slot_table}
    if kv.keys:
        slots, heads, head_dim = kv.keys[0].shape
        known |= {"kv_pool_size": slots, "slot_stride": heads * head_dim}
    return known


def _commit(commit: Commit) -> dict[str, Any]:
    return {"committed_lens": commit.prefix_lens, "src": commit.src, "dst": commit.dst}


_READERS: dict[type[Any], Callable[[Any], dict[str, Any]]] = {
    DraftTree: _tree,
    VerifyLayout: _layout,
    FlatMask: lambda mask: {"custom_mask": mask.allowed},
    PackedMask: lambda mask: {"packed": mask.packed, "byte_indptr": mask.byte_indptr},
    DenseMask: lambda mask: {"bias": mask.bias},
    BitMask: lambda mask: {"words": mask.words},
    Acceptance: lambda acceptance: dict(acceptance.__dict__),
    Commit: _commit,
    PagedKV: _paged_kv,
}

_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_KINDS: dict[str, tuple[str, Callable[[torch.dtype], bool]]] = {
    "index": ("an integer dtype", lambda dtype: dtype in _INDEX_DTYPES),
    "float": ("a floating dtype", lambda dtype: dtype.is_floating_point),
    "bytes": ("torch.uint8", lambda dtype: dtype is torch.uint8),
    "any": ("a real dtype", lambda dtype: not dtype.is_complex),
}


# of what describes the engine; what a call claims about itself is for the invariants to judge
_LEAST = {
    "batch_size": 0,
    "kv_pool_size": 0,
    "slot_stride": 1,
    "vocab_size": 1,
    "commits_before": 0,
}


def _accept(spec: "Field[Any]", value: Any) -> Any:
    """Refuse a field that no invariant could read: the wrong kind, dtype or number of axes."""
    name, kind, ndim = spec.name, spec.metadata["kind"], spec.metadata["ndim"]
    if kind in {"number", "flag"}:
        if isinstance(value, Tensor):
            whole = (
                value.numel() == 1
                and not value.dtype.is_floating_point
                and not value.dtype.is_complex
            )
            require(
                whole,
                f"{name} is a {value.dtype} tensor of shape {list(value.shape)}; expected one integer",
            )
            value = value.item()
        require(isinstance(value, int), f"{name} is {value!r}; expected an integer")
        require(kind != "flag" or value in {0, 1}, f"{name} is {value}; expected 0 or 1")
        least = _LEAST.get(name)
        require(least is None or value >= least, f"{name} is {value}; the least is {least}")
        require(name != "offset_bits" or value in {32, 64}, f"{name} is {value}; expected 32 or 64")
        return bool(value) if kind == "flag" else int(value)
    require(isinstance(value, Tensor), f"{name} is {of_kind(value)}; expected a tensor")
    wanted, right = _KINDS[kind]
    require(right(value.dtype), f"{name} has dtype {value.dtype}; expected {wanted}")
    shape = list(value.shape)
    require(
        value.ndim == ndim,
        f"{name} has shape {shape}; expected {ndim} axes: {spec.metadata['doc']}",
    )
    return value
