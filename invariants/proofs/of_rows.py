"""Proofs of rows: the commit's moves, captured batches, windows by depth."""

from ddtree.invariants.proofs import cases
from ddtree.invariants.proofs.integers import Scope, every, pick, within
from ddtree.invariants.proofs.proof import Claim, Formulas, Proof, Twin


def accepted_rows_are_late(f: Formulas, s: Scope) -> Claim:
    """Induction down a path: an accepted row's entry lies where it is committed to or behind it."""
    prefix_len, step, node, next_node = s.naturals("prefix_len step node next_node")
    target, source = f.commit_entry(prefix_len, step + 1), f.kv_len(prefix_len, next_node)
    return Claim(
        given={
            "a child's row comes after its parent's": next_node > node,
            "so it is so far": f.kv_len(prefix_len, node) >= f.commit_entry(prefix_len, step),
        },
        shows={"next source >= next target": source >= target},
        where={"next source": source, "next target": target},
    )


def moves_read_before_overwriting(f: Formulas, s: Scope) -> Claim:
    """Moving in ascending order, no move reads an entry that an earlier one wrote."""
    prefix_len, step, node, later, later_node = s.naturals(
        "prefix_len step node later_step later_node"
    )
    written = f.commit_entry(prefix_len, step)
    read = f.kv_len(prefix_len, later_node)
    return Claim(
        given={
            "row 0 is the root and no other": every(
                (step == 0) == (node == 0), (later == 0) == (later_node == 0)
            ),
            "they are two moves": every(step != later, node != later_node),
            "the earlier move changes something": node != step,
            "moves go in the path's order": step < later,
            "a row is at least its step": every(node >= step, later_node >= later),
        },
        shows={"written != read": written != read},
        where={"written": written, "read later": read},
    )


def commits_follow_the_prefix(f: Formulas, s: Scope) -> Claim:
    """Accepted entries follow the prefix without a gap, and stay within the tree's entries."""
    prefix_len, q_len, count, step = s.naturals("prefix_len q_len num_accepted step")
    entry = f.commit_entry(prefix_len, step)
    return Claim(
        given={"the step is accepted": step < count, "no more rows than there are": count <= q_len},
        shows={
            "prefix_len <= entry < prefix_len + num_accepted": within(
                prefix_len, entry, f.commit_entry(prefix_len, count)
            ),
            "the first is entry prefix_len": f.commit_entry(prefix_len, 0) == prefix_len,
            "the next entry follows": f.commit_entry(prefix_len, step + 1) == entry + 1,
            "entry < prefix_len + q_len": entry < f.kv_len(prefix_len, q_len),
        },
        where={"entry": entry},
    )


COMMIT_MOVES = Proof(
    "commit_moves",
    "A commit's moves never read an entry that an earlier move of the same commit overwrote.",
    (accepted_rows_are_late, moves_read_before_overwriting, commits_follow_the_prefix),
    (
        Twin(
            "child_before_parent",
            "A path's rows do not ascend: a child stands before its parent.",
            without="a child's row comes after its parent's",
        ),
        Twin(
            "rows_in_any_order",
            "An accepted row may lie before its step, as on a path that does not ascend.",
            without="a row is at least its step",
            case=cases.move_over_source,
        ),
        Twin(
            "last_move_first",
            "Moves go from the path's end to its root.",
            without="moves go in the path's order",
        ),
        Twin(
            "entry_of_the_next",
            "Accepted node i goes to entry prefix_len + i + 1: the root is left where it was.",
            {"commit_entry": lambda prefix_len, step: prefix_len + step + 1},
            case=cases.commit_one_late,
        ),
    ),
)


def dropped_rows_fill_the_rest(f: Formulas, s: Scope) -> Claim:
    """The rows that are not accepted take the places behind the accepted ones."""
    q_len, count, row, before = s.naturals("q_len num_accepted row accepted_before")
    place = f.dropped_step(count, row, before)
    return Claim(
        given={
            "the row is one, behind the root": within(1, row, q_len),
            "the root is accepted": before >= 1,
            "no more are accepted before the row than rows are": before <= row,
            "nor than are accepted": before <= count,
            "the others are accepted behind it": count - before <= q_len - 1 - row,
        },
        shows={"num_accepted <= place < q_len": within(count, place, q_len)},
        where={"place": place},
    )


def dropped_rows_keep_their_order(f: Formulas, s: Scope) -> Claim:
    """Of two dropped rows the later goes behind the earlier, so no two share a place."""
    count, row, before, row2, before2 = s.naturals(
        "num_accepted row accepted_before row2 accepted_before2"
    )
    place, place2 = f.dropped_step(count, row, before), f.dropped_step(count, row2, before2)
    return Claim(
        given={
            "row2 is later": row < row2,
            "neither is accepted: those between are fewer": before2 - before <= row2 - row - 1,
            "no more are accepted before a row than rows are": every(
                before <= row, before2 <= row2
            ),
        },
        shows={"place < place2": place < place2},
        where={"place": place, "place2": place2},
    )


COMMIT_PLACES = Proof(
    "commit_places",
    "With page size 1 a commit permutes the tree's slots: accepted rows, then the others in order.",
    (dropped_rows_fill_the_rest, dropped_rows_keep_their_order),
    (
        Twin(
            "accepted_not_counted",
            "A dropped row goes behind all accepted ones by its own number.",
            {"dropped_step": lambda count, row, before: count + row},
            case=cases.slot_lost,
        ),
        Twin(
            "kept_where_it_was",
            "A dropped row stays where it was, on an accepted one's place.",
            {"dropped_step": lambda count, row, before: row},
            case=cases.slot_lost,
        ),
        Twin(
            "accepted_among_the_dropped",
            "An accepted row is counted among the dropped too.",
            without="neither is accepted: those between are fewer",
        ),
    ),
)


def rows_without_query_go_behind(f: Formulas, s: Scope) -> Claim:
    """A captured request's spare row goes behind every query row of the call, inside the buffer."""
    batch, rows, b, row, q_len, q_start, total = s.naturals("batch rows b row q_len q_start total")
    place = f.unused_row(total, b, rows, q_start, row, q_len)
    return Claim(
        given={
            "a request of the batch": b < batch,
            "the row is spare": every(q_len <= row, row < rows),
            "requests before have no more rows than there are": q_start <= b * rows,
            "nor have those after": total - q_start - q_len <= (batch - 1 - b) * rows,
            "rows are counted up": total >= q_start + q_len,
        },
        shows={
            "total <= place: no real request's row": place >= total,
            "place < batch * rows": place < batch * rows,
        },
        where={"place": place},
    )


def rows_without_query_differ(f: Formulas, s: Scope) -> Claim:
    """No two spare rows share a place, so the buffer is filled once."""
    rows, b, row, q_len, q_start = s.naturals("rows b row q_len q_start")
    b2, row2, q_len2, q_start2, total = s.naturals("b2 row2 q_len2 q_start2 total")
    place = f.unused_row(total, b, rows, q_start, row, q_len)
    place2 = f.unused_row(total, b2, rows, q_start2, row2, q_len2)
    return Claim(
        given={
            "both are spare": every(q_len <= row, row < rows, q_len2 <= row2, row2 < rows),
            "the second request is later": b < b2,
            "the requests between have no more rows than there are": every(
                q_start2 >= q_start + q_len, q_start2 - q_start - q_len <= (b2 - b - 1) * rows
            ),
        },
        shows={"place < place2": place < place2},
        where={"place": place, "place2": place2},
    )


def unused_requests_own_nothing(f: Formulas, s: Scope) -> Claim:
    """A request without rows has no mask entry, no byte and no word, and its end is its start."""
    prefix_len, q_len, block = s.naturals("prefix_len q_len block")
    entries = f.mask_len(prefix_len, q_len)
    return Claim(
        given={
            "a block holds an entry": block >= 1,
            "an unused request has no rows": q_len == 0,
        },
        shows={
            "mask_len == 0": entries == 0,
            "packed_len == 0": f.packed_len(entries) == 0,
            "bit_words == 0": f.bit_words(q_len) == 0,
            "no tree block": f.num_blocks(q_len, block) == 0,
        },
        where={"mask_len": entries},
    )


def capacities_hold_smaller_calls(f: Formulas, s: Scope) -> Claim:
    """Induction over the requests: what the largest sizes reserve holds any smaller call's entries."""
    used, b, prefix_len, q_len, max_prefix, max_q = s.naturals(
        "used b prefix_len q_len max_prefix max_q_len"
    )
    room = f.mask_len(max_prefix, max_q)
    return Claim(
        given={
            "no size exceeds the capacity's": every(prefix_len <= max_prefix, q_len <= max_q),
            "it holds the requests so far": used <= b * room,
        },
        shows={"it holds one more": used + f.mask_len(prefix_len, q_len) <= (b + 1) * room},
        where={"now used": used + f.mask_len(prefix_len, q_len), "room": (b + 1) * room},
    )


PADDED_ROWS = Proof(
    "padded_rows",
    "Padded rows and unused requests of a larger captured batch touch nothing of a real request.",
    (
        rows_without_query_go_behind,
        rows_without_query_differ,
        unused_requests_own_nothing,
        capacities_hold_smaller_calls,
    ),
    (
        Twin(
            "place_of_the_padded_batch",
            "A spare row goes where it would lie if every request had all rows.",
            {"unused_row": lambda total, b, rows, q_start, row, q_len: b * rows + row},
            case=cases.spare_row_on_real,
        ),
        Twin(
            "requests_before_forgotten",
            "Spare rows of all requests start at the call's end.",
            {"unused_row": lambda total, b, rows, q_start, row, q_len: total + row - q_len},
        ),
        Twin(
            "unused_has_a_root",
            "An unused request is given a row, as if it had a root: its indptr goes on behind the call's.",
            without="an unused request has no rows",
            case=cases.unused_request_with_row,
        ),
        Twin(
            "captured_for_less",
            "The graph was captured for smaller sizes than the call's.",
            without="no size exceeds the capacity's",
            case=cases.small_buffers,
        ),
    ),
)


def windows_go_by_depth(f: Formulas, s: Scope) -> Claim:
    """A node keeps itself and the ``window - 1`` positions before it, whatever its row is."""
    prefix_len, depth, placed, above, window, entry = s.naturals(
        "prefix_len depth placed_at above window entry"
    )
    start = f.window_start(f.position(prefix_len, placed), window)
    ancestor = f.position(prefix_len, depth - above)
    return Claim(
        given={
            "a window holds the row itself": window >= 1,
            "the ancestor is in the tree": above <= depth,
            "the entry is in the prefix": entry < prefix_len,
            "a node is placed by its depth, not by its row": placed == depth,
        },
        shows={
            "the root is at prefix_len": f.position(prefix_len, 0) == prefix_len,
            "it sees itself": start <= f.position(prefix_len, depth),
            "it sees an ancestor fewer than window levels above": (ancestor >= start)
            == (above < window),
            "it sees a prefix entry fewer than window before it": (entry >= start)
            == (f.position(prefix_len, depth) - entry < window),
        },
        where={"window start": start, "ancestor": ancestor},
    )


def the_root_reaches_back_farthest(f: Formulas, s: Scope) -> Claim:
    """No node sees a prefix entry that the root does not: blocks before the root's window are skipped."""
    prefix_len, depth, window, block, entry = s.naturals("prefix_len depth window block entry")
    root = f.window_start(f.position(prefix_len, 0), window)
    first_block = f.row_of(pick(root > 0, root, 0, s), block)
    node = f.window_start(f.position(prefix_len, depth), window)
    return Claim(
        given={
            "a block holds an entry": block >= 1,
            "the node sees the entry": entry >= node,
        },
        shows={
            "the root's start is no later": root <= node,
            "the entry is in no skipped block": entry >= f.block_start(first_block, block),
        },
        where={"root's start": root, "node's start": node, "first block": first_block},
    )


DEPTH_WINDOWS = Proof(
    "depth_windows",
    "A window of w keeps the w nearest on a node's path, by depth; none reaches back farther than the root.",
    (windows_go_by_depth, the_root_reaches_back_farthest),
    (
        Twin(
            "by_row",
            "A node is placed by its row: siblings get different windows.",
            without="a node is placed by its depth, not by its row",
            case=cases.placed_by_row,
        ),
        Twin(
            "without_itself",
            "The window's length is counted without the row itself.",
            {"window_start": lambda position, window: position - window},
        ),
        Twin(
            "position_from_one",
            "The root is placed one behind the prefix's end.",
            {"position": lambda prefix_len, depth: prefix_len + depth + 1},
            case=cases.placed_one_late,
        ),
    ),
)

OF_ROWS = (COMMIT_MOVES, COMMIT_PLACES, PADDED_ROWS, DEPTH_WINDOWS)
