"""Proofs of how a long prefix is split: chunks, blocks, and the spans of the attention schedule."""

from ddtree.invariants.proofs.integers import Int, Scope, implies, within
from ddtree.invariants.proofs.proof import Claim, Formulas, Proof, Twin


def chunks_cover(f: Formulas, s: Scope) -> Claim:
    """Every entry is in one chunk, for every block size and split count."""
    entries, splits, block, entry, chunk = s.naturals("entries splits block entry chunk")
    length = f.chunk_len(entries, splits, block)
    owner = f.row_of(entry, length)

    def is_in(chunk: Int) -> object:
        start = f.chunk_start(chunk, length)
        return within(start, entry, start + length)

    return Claim(
        given={
            "there is a split": splits >= 1,
            "a block holds an entry": block >= 1,
            "the entry is one": entry < entries,
        },
        shows={
            "the chunk entry // chunk_len is one of the splits": within(0, owner, splits),
            "that chunk holds the entry": is_in(owner),
            "no other chunk does": implies(is_in(chunk), chunk == owner),
        },
        where={"chunk_len": length, "chunk of the entry": owner},
    )


def chunks_are_whole_blocks(f: Formulas, s: Scope) -> Claim:
    """A chunk is whole blocks, starts on one, and is no longer than an even share needs."""
    entries, splits, block, chunk = s.naturals("entries splits block chunk")
    length = f.chunk_len(entries, splits, block)
    blocks = f.row_of(length, block)
    return Claim(
        given={"there is a split": splits >= 1, "a block holds an entry": block >= 1},
        shows={
            "chunk_len % block == 0": f.col_of(length, block) == 0,
            "a chunk starts on a block": f.chunk_start(chunk, length)
            == f.block_start(chunk * blocks, block),
            "with a block less the chunks would not cover": implies(
                length > 0, (length - block) * splits < entries
            ),
        },
        where={"chunk_len": length},
    )


CHUNKS = Proof(
    "chunks",
    "Chunks of a split cover the prefix exactly once, in whole blocks, for every block size and split count.",
    (chunks_cover, chunks_are_whole_blocks),
    (
        Twin(
            "share_rounded_down",
            "An even share is rounded down: the last entries belong to no chunk.",
            {"chunk_len": lambda n, splits, block: n // splits // block * block},
        ),
        Twin(
            "not_whole_blocks",
            "An even share is rounded up to an entry, not to a block.",
            {"chunk_len": lambda n, splits, block: (n + splits - 1) // splits},
        ),
        Twin(
            "chunks_overlap",
            "A chunk begins one entry before the last one ends.",
            {"chunk_start": lambda chunk, length: chunk * (length - 1)},
        ),
        Twin(
            "a_block_too_many",
            "Where the share is whole blocks already, one more is added: the last splits have nothing to do.",
            {"chunk_len": lambda n, splits, block: (n // (splits * block) + 1) * block},
        ),
    ),
)


def blocks_cover(f: Formulas, s: Scope) -> Claim:
    """Every entry is in one of the blocks, and no block is empty."""
    entries, size, entry, block = s.naturals("entries block_size entry block")
    count = f.num_blocks(entries, size)
    owner = f.row_of(entry, size)

    def is_in(block: Int) -> object:
        start = f.block_start(block, size)
        return within(start, entry, start + size)

    return Claim(
        given={"a block holds an entry": size >= 1, "the entry is one": entry < entries},
        shows={
            "the block of the entry is one of them": within(0, owner, count),
            "that block holds the entry": is_in(owner),
            "no other block does": implies(is_in(block), block == owner),
            "the last block holds an entry": f.block_start(count - 1, size) < entries,
        },
        where={"num_blocks": count, "block of the entry": owner},
    )


BLOCKS = Proof(
    "blocks",
    "Blocks of a fixed size cover their entries exactly once, the last perhaps in part.",
    (blocks_cover,),
    (
        Twin(
            "part_block_forgotten",
            "The last entries that fill no block are not counted.",
            {"num_blocks": lambda n, size: n // size},
        ),
        Twin(
            "whole_spare_block",
            "A block is added even where the entries fill the last one.",
            {"num_blocks": lambda n, size: n // size + 1},
        ),
    ),
)


def spans_cover(f: Formulas, s: Scope) -> Claim:
    """Whatever a span's length is, if the spans are long enough each unit is in one."""
    units, groups, span, unit, group = s.naturals("units groups span unit group")
    owner = f.row_of(unit, span)

    def is_in(group: Int) -> object:
        start = f.chunk_start(group, span)
        return within(start, unit, start + span)

    return Claim(
        given={
            "the spans are long enough": units <= span * groups,
            "the unit is one": unit < units,
        },
        shows={
            "the span of the unit is one of the groups'": within(0, owner, groups),
            "that span holds the unit": is_in(owner),
            "no other span does": implies(is_in(group), group == owner),
        },
        where={"span of the unit": owner},
    )


def shared_spans_are_long_enough(f: Formulas, s: Scope) -> Claim:
    """An equal share of all units is long enough, and rounding an item up never cuts it short."""
    units, groups, blocks, piece = s.naturals("units groups blocks piece")
    share = f.round_up(blocks, piece)
    return Claim(
        given={"there is a group": groups >= 1, "a piece holds a block": piece >= 1},
        shows={
            "units <= chunk_len * groups": units <= f.chunk_len(units, groups, 1) * groups,
            "blocks <= share < blocks + piece": within(blocks, share, blocks + piece),
            "a share is whole pieces": f.col_of(share, piece) == 0,
        },
        where={"share": share, "chunk_len": f.chunk_len(units, groups, 1)},
    )


def items_tile_their_request(f: Formulas, s: Scope) -> Claim:
    """A unit of a request is one block, or one spare unit, of one of its KV heads."""
    before, share, heads, unit = s.naturals("before share kv_heads unit")
    head = f.row_of(unit - before, share)
    start = before + f.block_start(head, share)
    return Claim(
        given={"the unit is the request's": within(before, unit, before + share * heads)},
        shows={
            "0 <= head < kv_heads": within(0, head, heads),
            "the unit is that head's": within(start, unit, start + share),
        },
        where={"head": head, "item start": start},
    )


def splits_of_an_item(f: Formulas, s: Scope) -> Claim:
    """How many spans an item meets: those of its first unit to its last."""
    start, stop, span = s.naturals("item_start item_stop span")
    splits = f.num_blocks(stop, span) - f.row_of(start, span)
    return Claim(
        given={"the item has a unit": start < stop, "a span holds a unit": span >= 1},
        shows={
            "splits == span(last) - span(first) + 1": splits
            == f.row_of(stop - 1, span) - f.row_of(start, span) + 1
        },
        where={"splits": splits},
    )


SPANS = Proof(
    "spans",
    "Every block of every (request, KV head) is in exactly one span of the attention schedule.",
    (spans_cover, shared_spans_are_long_enough, items_tile_their_request, splits_of_an_item),
    (
        Twin(
            "spans_too_short",
            "The spans together are shorter than the line of blocks.",
            without="the spans are long enough",
        ),
        Twin(
            "share_rounded_down",
            "An item's share is rounded down to whole pieces: its last blocks are nobody's.",
            {"round_up": lambda n, size: n // size * size},
        ),
        Twin(
            "spans_overlap",
            "A span begins one unit before the last one ends.",
            {"chunk_start": lambda chunk, length: chunk * (length - 1)},
        ),
        Twin(
            "cut_not_counted",
            "A span that holds an item's last part is not counted.",
            {"num_blocks": lambda n, size: n // size},
        ),
    ),
)

OF_SPLITS = (CHUNKS, BLOCKS, SPANS)
