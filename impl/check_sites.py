"""The places where the device may find an invariant broken, in the order in which they count.

A site is one comparison of one invariant. Sites stand in the order of the table and, within an invariant,
in the order in which its checker looks, so that the least (site, request, part) that is broken is what
``ddtree.invariants.check`` raises.
"""

from typing import NamedTuple

import triton.language as tl

from ddtree.invariants.checks import CHEAP


class Site(NamedTuple):
    """One comparison of one invariant."""

    invariant: str
    part: str = ""
    expected: bool = True
    """Whether a number says what was expected; else it is a range, a list or a word."""
    found: bool = True
    """Whether a number says what was found."""
    of_call: bool = False
    """Whether it speaks of the call as a whole."""
    is_float: bool = False
    """Whether its numbers are the bits of float64."""


SITES = (
    Site("batch", of_call=True),
    Site("tree_shape", expected=False, found=False, of_call=True),
    Site("rows", of_call=True),
    Site("dtypes", expected=False, found=False, of_call=True),
    Site("index_width", "qo_indptr", expected=False, of_call=True),
    Site("index_width", "kv_indptr", expected=False, of_call=True),
    Site("index_width", "mask_indptr", expected=False, of_call=True),
    Site("index_width", "custom_mask", expected=False, of_call=True),
    Site("index_width", "vocab", expected=False, of_call=True),
    Site("index_width", "row", expected=False, of_call=True),
    Site("index_width", "slot", expected=False, of_call=True),
    Site("log_probs", expected=False, is_float=True),
    Site("num_nodes", expected=False),
    Site("budget", expected=False),
    Site("root", "parents"),
    Site("root", "depths"),
    Site("root", "scores", is_float=True),
    Site("root", "token_ids"),
    Site("parent_order", expected=False),
    Site("depth"),
    Site("depth", "horizon", expected=False),
    Site("siblings_distinct", expected=False),
    Site("best_first", expected=False, found=False),
    Site("best_first", "order", expected=False, is_float=True),
    Site("tie_order", expected=False, found=False),
    Site("padding", "parents"),
    Site("padding", "token_ids"),
    Site("padding", "depths"),
    Site("padding", "scores", is_float=True),
    Site("token_range", expected=False),
    Site("best_candidates", expected=False, found=False),
    Site("path_score", is_float=True),
    Site("mask_len"),
    Site("mask_indptr", "start", of_call=True),
    Site("mask_indptr", "step", expected=False),
    Site("mask_indptr", "end", of_call=True),
    Site("qo_indptr", "start", of_call=True),
    Site("qo_indptr", "step", expected=False),
    Site("qo_indptr", "width"),
    Site("qo_indptr", "end", of_call=True),
    Site("qo_indptr", "rows", expected=False),
    Site("max_q_len", expected=False, of_call=True),
    Site("kv_indptr", "start", of_call=True),
    Site("kv_indptr", "step", expected=False),
    Site("kv_indptr", "len"),
    Site("kv_indptr", "end", expected=False, of_call=True),
    Site("kv_indices", expected=False),
    Site("kv_unique", expected=False),
    Site("out_cache_loc", expected=False),
    Site("write_unique", expected=False),
    Site("write_disjoint", expected=False),
    Site("slot_table"),
    Site("positions"),
    Site("input_ids"),
    Site("flat_len", of_call=True),
    Site("packed_len"),
    Site("packed_len", "end", of_call=True),
    Site("mask_shape", "words", of_call=True),
    Site("mask_shape", "rows", of_call=True),
    Site("mask_shape", "bias", expected=False, of_call=True),
    Site("mask_values", "custom_mask", expected=False, of_call=True),
    Site("mask_values", "bias", expected=False, is_float=True),
    Site("visibility"),
    Site("mask_is_tree", expected=False, found=False),
    Site("mask_positions"),
    Site("prefix_visible"),
    Site("padding_invisible"),
    Site("spare_bits"),
    Site("buffer_capacity", "positions", expected=False, of_call=True),
    Site("buffer_capacity", "out_cache_loc", expected=False, of_call=True),
    Site("buffer_capacity", "input_ids", expected=False, of_call=True),
    Site("buffer_capacity", "num_rows", expected=False, of_call=True),
    Site("buffer_capacity", "target_ids", expected=False, of_call=True),
    Site("buffer_capacity", "kv_indices", expected=False, of_call=True),
    Site("stale_tail", "qo_indptr"),
    Site("stale_tail", "kv_indptr"),
    Site("stale_tail", "mask_indptr"),
    Site("stale_tail", "positions", of_call=True),
    Site("stale_tail", "out_cache_loc", of_call=True),
    Site("stale_tail", "input_ids", of_call=True),
    Site("stale_tail", "custom_mask", of_call=True),
    Site("stale_tail", "pad_slot", expected=False, of_call=True),
    Site("num_accepted", expected=False),
    Site("accepted_end"),
    Site("accepted_path", "root"),
    Site("choice"),
    Site("bonus"),
    Site("walk_end"),
    Site("emitted", expected=False, found=False),
    Site("commit_once", of_call=True),
    Site("commit_len"),
    Site("commit_src"),
    Site("commit_dst"),
    Site("commit_order", expected=False),
    Site("slot_permutation", "shape", expected=False, found=False, of_call=True),
    Site("slot_permutation", expected=False, found=False),
    Site("prefix_kept"),
)

BEFORE = {
    "batch": "shapes (on the device, where buffers may hold fewer requests)",
    "tree_shape": "shapes",
    "rows": "shapes",
    "dtypes": "dtypes",
    "commit_once": "the number of commits before, which the host counts",
}
"""What nothing in a graph can change: the host evaluates these invariants once, when the check is made."""


def as_markdown() -> str:
    """The table of what the device evaluates, as it stands in ``invariants/README.md``."""
    lines = ["| invariant | level | evaluated | numbers of the record |", "|---|---|---|---|"]
    for name in dict.fromkeys(site.invariant for site in SITES):
        sites = [site for site in SITES if site.invariant == name]
        level = "cheap" if name in CHEAP else "full"
        where = f"by the host, once: {BEFORE[name]}" if name in BEFORE else "on the device"
        numbers = [
            ("expected", all(site.expected for site in sites)),
            ("found", all(site.found for site in sites)),
        ]
        told = " and ".join(word for word, has in numbers if has) or "none: they are lists or words"
        lines.append(f"| `{name}` | {level} | {where} | {told} |")
    return "\n".join(lines)


_NUMBERS = {(site.invariant, site.part): number for number, site in enumerate(SITES)}


def number(invariant: str, part: str = "") -> int:
    """A site's number."""
    return _NUMBERS[invariant, part]


def constant(invariant: str, part: str = "") -> tl.constexpr:
    """A site's number as kernels read it."""
    return tl.constexpr(number(invariant, part))
