"""Checks inside a graph: the table of invariants as kernels, launched beside the call that they check.

``CapturedCheck`` is made once, from the tensors that a captured call reads, and launched in the capture (or
eagerly). Each replay then evaluates the table on the device and writes the first violation into a record.
Nothing
stalls: the record goes to pinned memory by an asynchronous copy, and the call's metadata, as it was when it
broke, to a snapshot on the device. ``poll`` reads the pinned words, and only when they tell of a violation
does it fetch the snapshot, on a stream of its own, and hold it to the host's table: the violation is then
the very one that ``ddtree.check`` raises, hint included.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from ddtree.impl import check_kernels as kernels
from ddtree.impl.check_sites import SITES, Site, number
from ddtree.impl.op import require_kernels
from ddtree.invariants.call import Call
from ddtree.invariants.checks import violations
from ddtree.invariants.debug import install_capture
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.settings import Settings
from ddtree.invariants.sizes import (
    INDPTRS,
    Sizes,
    batch_counts,
    batch_of,
    room_counts,
    row_counts,
    total_rows,
)
from ddtree.invariants.streams import apart, relaxed
from ddtree.invariants.table import TABLE
from ddtree.invariants.violation import InvariantViolation, Value
from ddtree.spec.contracts import QLen
from ddtree.spec.errors import require
from ddtree.spec.index import bit_words

Level = Literal["cheap", "full"]

SLOTS = 2**20
"""Slots that are marked where the pool's size is not known; a call with others is left to the host."""
SNAPSHOT_BLOCK = 4096
ENTRIES = 8192
"""Mask entries of one program that looks at values and tails."""
COLUMNS = 1024
"""Prefix entries that a program looks at, at a time."""
MAX_Q_LEN = 4096
"""Rows of one request that flat and packed masks are read for; wider ones are left to the host."""
CHANGES = 64
"""Entries of a slot table that a commit changes, at most; more are left to the host."""
NOWHERE = kernels.NOWHERE.value
FORMS = ("words", "custom_mask", "packed", "bias")
"""Forms of the mask in the order in which the host reads them."""
_SHAPES = ("batch", "tree_shape", "rows", "dtypes")
"""Invariants of shapes and dtypes, which a graph cannot change."""
_ROWS: dict[str, Invariant] = {row.id: row for row in TABLE}


class Found(NamedTuple):
    """What the device's record holds: the first violation as the device saw it."""

    invariant: str
    request: int | None
    expected: Value | None
    """None where it is a range, a list or a word, which the host's violation has."""
    found: Value | None
    call: int
    """Which launch it was, counted from 1."""


class CapturedCheck:
    """The table of invariants, held to one set of tensors at every launch.

    Make it before the capture, from the buffers that the captured pass reads, and ``launch()`` it inside,
    where the buffers hold the call. ``poll()`` whenever the host passes by.

    Attributes:
        call: the tensors and numbers that are checked.
        where: what is checked, for the message.
    """

    def __init__(
        self,
        call: Call,
        *,
        level: Level = "full",
        where: str = "",
        trap: bool = False,
        snapshot: bool = True,
        num_slots: int | None = None,
        watched: bool = False,
    ) -> None:
        """Allocate what the launches need; nothing is allocated later.

        Args:
            call: fields by name (``Call.of(buffers, tree, ...)``); tensors on one device, which are read at
                every launch.
            level: ``cheap``: shapes, indptrs and lengths, in one launch; ``full``: the whole table.
            where: what is checked, for the message: "the captured verify pass".
            trap: end the launch with a trap when something is broken. The error then surfaces at the next
                synchronisation, the record stays readable to a debugger alone.
            snapshot: keep the metadata of the call that broke. It takes as much memory as the call's own.
            Without
                it the host reads the buffers as they are when it polls.
            num_slots: slots of the pool, where ``call.kv_pool_size`` does not tell.
            watched: debug mode polls it too, whenever it polls its own, and does with a violation what its
            settings
                say.

        Raises:
            InputError: no tensor at all, tensors of two devices, a device without
                kernels, or an unknown level.
        """
        require(level in {"cheap", "full"}, f"level is {level!r}; known are 'cheap' and 'full'")
        given = {name: value for name, value in call.known().items() if isinstance(value, Tensor)}
        require(bool(given), "there is nothing on the device to check: the call holds no tensor")
        devices = {value.device for value in given.values()}
        require(
            len(devices) == 1, f"the call's tensors are on {sorted(map(str, devices))}; one device"
        )
        self.call, self.level, self.where, self.trap = call, level, where, trap
        self.device = devices.pop()
        require_kernels(self.device, "the call")
        self._given = given
        with torch.inference_mode(mode=False):  # else only in that mode the record could be freed
            self._staged = {
                name: torch.empty_like(value, memory_format=torch.contiguous_format)
                for name, value in given.items()
                if not value.is_contiguous()
            }
            """Contiguous copies of strided fields, made anew at each launch."""
            self._fields = given | self._staged
            self._set_sizes(num_slots)
            self._allocate(snapshot)
        self.watched, self.function = watched, "CapturedCheck"
        self.broken_call: Call | None = None
        """The call that the last violation was found in."""
        self._handled = 0
        """The launch whose violation was last taken from the record."""
        self._lock = threading.Lock()
        _live[next(_made)] = self

    # what a launch needs

    def _set_sizes(self, num_slots: int | None) -> None:
        """Read what shapes tell."""
        call = self.call
        counts, room = batch_counts(call), room_counts(call)
        self.is_dynamic = bool(call.is_captured) and call.batch_size is None and not counts
        shapes = _shapes_of(call)
        self.batch = next(iter(room.values()), 0) if self.is_dynamic else batch_of(shapes)
        self.room = max([self.batch, *counts.values(), *room.values(), 1])
        rows = row_counts(call)
        known_rows = max(rows.values(), default=0)
        if not known_rows:
            known_rows = self.room * max(
                call.max_q_len or 0, *(t.shape[1] for t in self._trees()), 1
            )
        self.max_rows = known_rows
        self.num_slots = call.kv_pool_size or num_slots or SLOTS
        # of requests that are counted at each launch none is known to be too many
        self.broken_shapes = _broken_shapes(shapes, 0 if self.is_dynamic else self.batch)

    def _hides_padding(self) -> bool:
        """Whether the host alone tells padding: by trees that are not counted, or not at all.

        The device then judges the roots' rows, of a mask none, and leaves each call to it.
        """
        known = self._fields.keys()
        padded = self._is_uncounted() or "positions" not in known
        of_rows = padded and bool({"out_cache_loc", "input_ids"} & known)
        of_masks = self._is_uncounted() and any(form in known for form in FORMS)
        return self.level == "full" and (of_rows or of_masks)

    def _is_uncounted(self) -> bool:
        """Whether there are trees that do not count their nodes."""
        known = self._fields.keys()
        return "num_nodes" not in known and bool({"parents", "depths", "scores"} & known)

    def _trees(self) -> list[Tensor]:
        names = ("token_ids", "parents", "depths", "scores")
        return [self._fields[name] for name in names if name in self._fields] or [torch.empty(0, 1)]

    def _allocate(self, snapshot: bool) -> None:
        """Make scratch, record and snapshot."""

        def filled(
            size: int | tuple[int, ...], value: int, dtype: torch.dtype = torch.int64
        ) -> Tensor:
            return torch.full(
                size if isinstance(size, tuple) else (size,), value, dtype=dtype, device=self.device
            )

        self._nodes = self._fields.get("num_nodes")
        self._always_doubt = self._nodes is None and self._hides_padding()
        if self._always_doubt:
            self._nodes = filled(self.room, 1, torch.int32)
        self._plan = filled((kernels.PLAN_ROWS, self.room), NOWHERE)
        self._state = filled(kernels.STATE_WORDS, 0)
        for word in (kernels.FIRST, kernels.STALE_BIT, kernels.BAD_BIAS):
            self._state[word.value].fill_(NOWHERE)  # an assignment would copy it from the host
        self._state[kernels.PAD_SLOT.value].fill_(-1)
        self._numbers = filled((len(SITES), self.room + 1, kernels.PARTS.value, 2), 0)
        self._record = filled(kernels.RECORD_WORDS, 0)
        self._seen = _host_words()
        weakref.finalize(self, _rows.append, self._seen).atexit = False
        self._always_key = self._constant_key()
        if self.level == "full" and self.broken_shapes is None:
            self._allocate_full(filled)
        self._snapshot: Tensor | None = None
        self._layout: list[tuple[str, int, int]] = []
        if snapshot:
            end = 0
            for name, value in self._fields.items():
                size = value.numel() * value.element_size()
                self._layout.append((name, end, size))
                end += -(-size // 16) * 16
            self._snapshot = torch.zeros(max(end, 1), dtype=torch.uint8, device=self.device)
            sources = [self._fields[name].data_ptr() for name, _, _ in self._layout]
            table = [
                sources,
                [at for _, at, _ in self._layout],
                [size for *_, size in self._layout],
            ]
            self._snapshot_table = torch.tensor(table, dtype=torch.int64, device=self.device)

    def _allocate_full(self, filled: Callable[..., Tensor]) -> None:
        known = self._fields
        tree_columns = [t.shape[2] for t in [self.call.bias] if t is not None]
        most = max(
            [self.call.max_q_len or 0, *(t.shape[1] for t in self._trees()), *tree_columns, 1]
        )
        if any(name in known for name in FORMS):
            # a request may have all rows of the call
            columns = self.max_rows if {"custom_mask", "packed"} & known.keys() else 1
            self._bit_width = bit_words(QLen(min(max(most, columns), MAX_Q_LEN)))
            self._bits = filled((self.max_rows, self._bit_width), 0, torch.int32)
            self._hidden = filled(self.max_rows, 0, torch.int32)
            self._judged = filled(self.max_rows, 0, torch.int32)
        if self._has_slots():
            words = -(-self.num_slots // 32)
            self._held, self._written, self._doubly = (
                filled(words, 0, torch.int32) for _ in range(3)
            )
            self._mine = filled((self.room if self._has_kv() else 1, words), 0, torch.int32)
        if self._has_tables():
            self._changed = filled((len(known["slot_table"]), 2, CHANGES), 0)
        self._worst = filled(
            (2, self.room), NOWHERE
        )  # first log-prob, and first score, that is wrong

    def _has_kv(self) -> bool:
        return {"kv_indices", "kv_indptr"} <= self._fields.keys()

    def _has_slots(self) -> bool:
        return self._has_kv() or "out_cache_loc" in self._fields

    def _has_tables(self) -> bool:
        """Whether two tables can be compared; of two shapes the record says so at every launch."""
        before, after = self._fields.get("slot_table"), self._fields.get("slot_table_after")
        return before is not None and after is not None and before.shape == after.shape

    def _constant_key(self) -> int:
        """The key of the first violation that shapes and numbers alone tell; NOWHERE where there is none."""
        found: list[tuple[int, Value, Value]] = []
        if self.broken_shapes is not None:
            invariant, expected, value = self.broken_shapes
            found.append((number(invariant), expected, value))
        if self.call.commits_before:
            found.append((number("commit_once"), 0, self.call.commits_before))
        tables = self.call.slot_table, self.call.slot_table_after
        if tables[0] is not None and tables[1] is not None and tables[0].shape != tables[1].shape:
            found.append((number("slot_permutation", "shape"), 0, 0))
        if not found:
            return int(NOWHERE)
        site, expected, value = min(found, key=lambda entry: entry[0])
        for at, content in enumerate((expected, value)):
            self._numbers[site, 0, 0, at].fill_(content if isinstance(content, int) else 0)
        return site << 40

    # launching

    def launch(self) -> None:
        """Check what the tensors hold now; in a capture, at every replay. Nothing waits or is allocated."""
        for name, staged in self._staged.items():
            staged.copy_(self._given[name])
        if self.broken_shapes is None:
            self._launch_sizes()
            if self.level == "full":
                self._launch_full()
        bias = self._fields.get("bias") if self.level == "full" else None
        kernels.finish_kernel[(1,)](
            bias, self._state, self._numbers, self._record, self.room,
            max(1, bias[0].numel()) if bias is not None and len(bias) else 1,
            self._always_key, int(self._always_doubt),
            TRAP=self.trap and self.device.type == "cuda", num_warps=1,
        )  # fmt: skip
        if self._snapshot is not None and self._layout:
            largest = max(size for *_, size in self._layout)
            shares = max(1, min(32, triton.cdiv(largest, SNAPSHOT_BLOCK)))
            kernels.snapshot_kernel[(len(self._layout), shares)](
                *self._snapshot_table, self._snapshot, self._record, BLOCK=SNAPSHOT_BLOCK
            )
        self._seen.copy_(self._record, non_blocking=True)

    def _size(self, name: str, axis: int = 0) -> int:
        """A field's size; -1 where it is not known."""
        value = self._fields.get(name)
        return -1 if value is None else int(value.shape[axis])

    def _launch_sizes(self) -> None:
        known, call = self._fields, self.call
        total = total_rows(call)
        most_accepted = [
            n
            for n in (self._size("nodes", 1), -1 if call.horizon is None else call.horizon + 1)
            if n >= 0
        ]
        padded = next((self._size(n, 1) for n in ("token_ids", "parents") if n in known), -1)
        needs_q = self.level == "full" and ("mask_indptr" in known or bool(row_counts(call)))
        has_masks = any(name in known for name in FORMS)

        def is_32(name: str) -> bool:
            return name in known and known[name].dtype is torch.int32

        kernels.sizes_kernel[(1,)](
            *(known.get(name) for name in INDPTRS),
            *(known.get(n) for n in ("q_lens", "prefix_lens", "num_nodes", "num_accepted", "committed_lens")),
            self._plan, self._state, self._numbers,
            self.room, self.batch,
            *(_room(known.get(name), 1) for name in INDPTRS),
            *(_room(known.get(name)) for name in ("bias", "slot_table", "slot_table_after")),
            padded, self._size("token_ids", 1), self._size("parents", 1),
            -1 if call.budget is None else call.budget,
            -1 if call.max_q_len is None else call.max_q_len,
            -1 if total is None else total,
            self._size("custom_mask"), self._size("kv_indices"), self._size("packed"),
            self._size("words"), self._size("words", 1), self._size("bias", 2), self._size("bias", 3),
            self._size("positions"), self._size("out_cache_loc"), self._size("input_ids"),
            -1 if call.num_rows is None else call.num_rows, self._size("target_ids"),
            self.max_rows if has_masks and self.level == "full" else -1, int(needs_q),
            call.num_rows or 0, max(row_counts(call).values(), default=0),
            call.vocab_size or 0, call.slot_stride or 0, call.kv_pool_size or 0,
            min(most_accepted, default=-1),
            CAPTURED=bool(call.is_captured), DYNAMIC=self.is_dynamic, OFFSET_BITS=call.offset_bits or 64,
            QO_IS_32=is_32("qo_indptr"), KV_IS_32=is_32("kv_indptr"), MASK_IS_32=is_32("mask_indptr"),
            BATCH=self._padded_batch(), num_warps=4 if self.room > 64 else 1,
        )  # fmt: skip

    def _padded_batch(self) -> int:
        padded: int = triton.next_power_of_2(self.room + 1)
        return padded

    def _launch_full(self) -> None:
        trees = ("token_ids", "parents", "depths", "scores")
        if any(name in self._fields for name in trees):
            self._launch_tree()
        if "draft_log_probs" in self._fields:
            self._launch_draft()
        if self.call.is_captured and any(
            n in self._fields for n in ("positions", "out_cache_loc", "input_ids")
        ):
            self._launch_tails()
        if any(name in self._fields for name in ("positions", "input_ids", "out_cache_loc")):
            self._launch_rows()
        if self._has_slots():
            self._launch_slots()
        self._launch_masks()
        if {"nodes", "num_accepted"} <= self._fields.keys():
            self._launch_acceptance()
        if "src" in self._fields:
            self._launch_commit()
        if self._has_tables():
            self._launch_tables()

    def _launch_tree(self) -> None:
        known, call = self._fields, self.call
        rows = self._trees()[0].shape[1]
        padded = triton.next_power_of_2(rows)
        kernels.tree_kernel[(self.room,)](
            *(known.get(n) for n in ("token_ids", "parents", "depths", "scores")),
            known.get("num_nodes"), known.get("root_token_ids"),
            self._plan, self._state, self._numbers, self.room, rows,
            -1 if call.horizon is None else call.horizon,
            -1 if call.vocab_size is None else call.vocab_size,
            ROWS=padded, OTHERS=min(padded, max(1, 4096 // padded)), num_warps=4,
        )  # fmt: skip

    def _launch_draft(self) -> None:
        known, draft = self._fields, self._fields["draft_log_probs"]
        batch, horizon, vocab = draft.shape
        if not draft.numel():
            return
        kernels.log_probs_kernel[(batch, triton.cdiv(horizon * vocab, ENTRIES))](
            draft, self._state, self._worst, horizon * vocab, BLOCK=ENTRIES
        )
        trees = tuple(known.get(name) for name in ("token_ids", "parents", "depths", "scores"))
        has_tree = all(name in known for name in ("token_ids", "parents", "depths", "num_nodes"))
        rows = self._trees()[0].shape[1] if has_tree else 1
        if has_tree:
            kernels.drafted_tree_kernel[(batch, rows)](
                draft, *trees, known["num_nodes"], self._plan, self._state, self._numbers, self._worst,
                self.room, rows, horizon, vocab,
                EXACT="scores" in known and known["scores"].dtype is torch.float64,
                ROWS=triton.next_power_of_2(rows), BLOCK=4096,
            )  # fmt: skip
        kernels.judge_draft_kernel[(batch,)](
            draft, *trees, self._state, self._numbers, self._worst, self.room, rows, horizon, vocab,
            HAS_TREE=has_tree and "scores" in known,
        )  # fmt: skip

    def _launch_tails(self) -> None:
        known, pad = self._fields, self.call.pad_slot
        kernels.tails_kernel[(1,)](
            *(known.get(name) for name in ("positions", "out_cache_loc", "input_ids")),
            self._state, self._numbers, self.room,
            *(max(self._size(name), 0) for name in ("positions", "out_cache_loc", "input_ids")),
            -1 if pad is None else pad, HAS_PAD=pad is not None, BLOCK=1024,
        )  # fmt: skip

    def _launch_rows(self) -> None:
        known = self._fields
        table = known.get("slot_table")
        names = (
            "positions", "input_ids", "out_cache_loc", "slot_table",
            "token_ids", "parents", "depths",
        )  # fmt: skip
        kernels.rows_kernel[(self.room,)](
            *(known.get(name) for name in names), self._nodes,
            self._plan, self._state, self._numbers,
            self.room, self._trees()[0].shape[1], self._size("token_ids", 1),
            *(max(self._size(name), 0) for name in ("positions", "input_ids", "out_cache_loc")),
            *(table.stride(0), table.shape[1]) if table is not None else (0, 0),
            self._pool_size(), BLOCK=128,
        )  # fmt: skip

    def _pool_size(self) -> int:
        return -1 if self.call.kv_pool_size is None else self.call.kv_pool_size

    def _launch_slots(self) -> None:
        known = self._fields
        table, slots = known.get("slot_table"), known.get("kv_indices")
        of_table = (table.stride(0), table.shape[1]) if table is not None else (0, 0)
        kv_size, out_size = max(self._size("kv_indices"), 0), max(self._size("out_cache_loc"), 0)
        of_call = slots, known.get("out_cache_loc")
        shares = (
            max(1, min(32, triton.cdiv(triton.cdiv(kv_size, self.room), 1024)))
            if self._has_kv()
            else 1
        )
        compiled = {"HAS_KV": self._has_kv(), "BLOCK": 1024}
        kernels.mark_slots_kernel[(self.room, shares)](
            *of_call, table, self._plan, self._state, self._held, self._mine, self._written, self._doubly,
            self.room, kv_size, out_size, *of_table, self._pool_size(), self.num_slots, **compiled,
        )  # fmt: skip
        kernels.judge_slots_kernel[(self.room,)](
            *of_call, table, self._nodes, known.get("positions"),
            self._plan, self._state, self._numbers, self._held, self._doubly, self.room, out_size,
            max(self._size("positions"), 0), *of_table, self.num_slots,
            HAS_KV=self._has_kv(), BLOCK=128,
        )  # fmt: skip
        kernels.clear_slots_kernel[(self.room, shares)](
            *of_call, self._plan, self._state, self._held, self._mine, self._written, self._doubly,
            self.room, kv_size, out_size, self.num_slots, **compiled,
        )  # fmt: skip

    def _launch_masks(self) -> None:
        known, call = self._fields, self.call
        flat = known.get("custom_mask")
        if flat is not None and flat.numel():
            kernels.mask_tail_kernel[(triton.cdiv(flat.numel(), ENTRIES),)](
                flat.view(torch.uint8), self._state, flat.numel(),
                CAPTURED=bool(call.is_captured), IS_BOOL=flat.dtype is torch.bool, BLOCK=ENTRIES,
            )  # fmt: skip
        bias = known.get("bias")
        if bias is not None and bias.numel():
            kernels.bias_values_kernel[(triton.cdiv(bias.numel(), ENTRIES),)](
                bias, self._state, bias.numel(), torch.finfo(bias.dtype).min, BLOCK=ENTRIES
            )
        for part, form in enumerate(FORMS):
            if form in known and not self._is_uncounted():
                self._launch_mask(form, part)

    def _launch_mask(self, form: str, part: int) -> None:
        known, call = self._fields, self.call
        bias = known.get("bias")
        of_bias = (bias.shape[2], bias.shape[3], bias.shape[0]) if bias is not None else (0, 0, 0)
        mask, bits, width = known[form], self._bits, self._bit_width
        if form == "words":
            bits, width = mask, mask.shape[1]
        else:
            entries = max(self._size("kv_indices"), 0)
            longest = entries // max(self.batch, 1) if call.is_captured else entries
            kernels.see_rows_kernel[(self.max_rows, max(1, min(16, longest // (4 * COLUMNS))))](
                mask.view(torch.uint8) if form == "custom_mask" else mask, bits, self._hidden,
                self._plan, self._state, self.room, mask.numel(), *of_bias,
                0.0 if bias is None else torch.finfo(bias.dtype).min / 2, width,
                FORM=form, BATCH=self._padded_batch(), WIDTH=triton.next_power_of_2(width), BLOCK=COLUMNS,
            )  # fmt: skip
        has_tree = {"parents", "num_nodes"} <= known.keys()
        padded = triton.next_power_of_2(max(width, 1))
        kernels.mask_kernel[(self.room,)](
            bits, self._hidden, self._judged,
            *(known.get(name) for name in ("parents", "num_nodes", "positions")),
            self._plan, self._state, self._numbers,
            self.room, width, self._size("words"), mask.numel(), *of_bias,
            self._trees()[0].shape[1], max(self._size("positions"), 0), self.max_rows,
            FORM=form, PART=part, HAS_TREE=has_tree,
            MAY_DOUBT=form == "custom_mask" and bool(call.is_captured) and "q_lens" not in known,
            WIDTH=padded, BLOCK=min(64, max(16, 2048 // padded)),
        )  # fmt: skip

    def _launch_acceptance(self) -> None:
        known, call = self._fields, self.call
        rows, width = self._trees()[0].shape[1], self._size("nodes", 1)
        kernels.acceptance_kernel[(self.room,)](
            *(known.get(n) for n in ("nodes", "num_accepted", "bonus", "target_ids", "emitted")),
            *(known.get(name) for name in ("token_ids", "parents", "num_nodes")),
            self._plan, self._state, self._numbers,
            self.room, width, max(self._size("emitted", 1), 0), rows, max(self._size("target_ids"), 0),
            -1 if call.vocab_size is None else call.vocab_size,
            HAS_TOKENS="token_ids" in known,
            WIDTH=triton.next_power_of_2(width), ROWS=triton.next_power_of_2(rows), num_warps=1,
        )  # fmt: skip

    def _launch_commit(self) -> None:
        known = self._fields
        after = known.get("slot_table_after")
        width = max(self._size("src", 1), self._size("nodes", 1), 1)
        kernels.commit_kernel[(self.room,)](
            *(known.get(name) for name in ("nodes", "num_accepted", "src", "dst", "out_cache_loc")),
            after, self._plan, self._state, self._numbers,
            self.room, width, max(self._size("out_cache_loc"), 0),
            *(after.stride(0), after.shape[1]) if after is not None else (0, 0),
            WIDTH=triton.next_power_of_2(width), MOVES=64,
        )  # fmt: skip

    def _launch_tables(self) -> None:
        before, after = self._fields["slot_table"], self._fields["slot_table_after"]
        kernels.tables_kernel[(before.shape[0],)](
            before, after, self._changed, self._plan, self._state, self._numbers,
            self.room, before.stride(0), after.stride(0), before.shape[1],
            CHANGES=CHANGES, BLOCK=1024,
        )  # fmt: skip

    # reading

    @property
    def counts(self) -> tuple[int, int]:
        """Launches and broken ones, as far as the host has heard: no wait."""
        words = self._seen.tolist()
        return words[kernels.CHECKED.value], words[kernels.BROKEN.value]

    @property
    def doubts(self) -> int:
        """Launches whose call only the host's table could judge, as far as the host has heard."""
        return int(self._seen[kernels.DOUBTED.value])

    @property
    def found(self) -> Found | None:
        """The violation that the record holds, in the device's own numbers: no wait."""
        words = self._seen.tolist()
        if words[kernels.SNAPSHOT.value] != 2:
            return None
        return _decode(words, self.batch if not self.is_dynamic else self.room)

    def poll(self) -> InvariantViolation | None:
        """Return the first violation since the last poll, if the device has told of one. Nothing is waited
        for.

        The record is then free for the next one. What broke between is counted (``counts``), not kept.
        """
        with self._lock:
            words = self._seen.tolist()
            state, at_call = words[kernels.SNAPSHOT.value], words[kernels.AT_CALL.value]
            if not state or at_call == self._handled:
                return None
            fetched = self._fetch(at_call)
            if fetched is None:
                return None
            words, call = fetched
            self._handled = at_call
        where = f"call {self._handled} of the captured check"
        where = f"{self.where} ({where})" if self.where else where
        for violation in violations(call, where):
            self.broken_call = call
            return violation
        if words[kernels.SNAPSHOT.value] != 2:
            return None  # a doubt that the host's table does not share
        self.broken_call = call
        seen = _decode(words, self.room)
        row = _ROWS[seen.invariant]
        return InvariantViolation(
            seen.invariant,
            seen.request,
            "as the formula says" if seen.expected is None else seen.expected,
            "another value" if seen.found is None else seen.found,
            statement=row.statement,
            formula=row.formula,
            where=f"{where}, as the device saw it: the buffers hold another call by now",
        )

    def wait(self) -> InvariantViolation | None:
        """Wait for all launches so far, then poll: for tests and the end of a run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.poll()

    def _fetch(self, at_call: int) -> tuple[list[int], Call] | None:
        """The record of a launch, which is then free, and the call that it tells of.

        None where a later launch is writing its own: a broken call takes the place of a doubtful one. That
        launch is not over, nor its snapshot whole, before the pinned words tell of it.
        """

        def is_held(words: list[int]) -> bool:
            return bool(words[kernels.SNAPSHOT.value]) and words[kernels.AT_CALL.value] == at_call

        with apart(self.device):
            before = self._record.tolist()
            if not is_held(before):
                return None
            known: dict[str, Any] = dict(self.call.known())
            if self._snapshot is None:
                known |= {n: value.to("cpu", copy=True) for n, value in self._fields.items()}
            else:
                data = self._snapshot.to("cpu", copy=True)
                for name, at, size in self._layout:
                    value = self._fields[name]
                    known[name] = (
                        data[at : at + size].clone().view(value.dtype).reshape(value.shape)
                    )
            if not is_held(self._record.tolist()):
                return None
            is_later = self._record[kernels.AT_CALL.value] != at_call  # once more, on the device
            self._record[kernels.SNAPSHOT.value].mul_(is_later)
            return before, Call(**known)


_made = count()
_live: "weakref.WeakValueDictionary[int, CapturedCheck]" = weakref.WeakValueDictionary()
"""Every check there is, in the order in which they were made: causes are polled before what follows."""


_rows: list[Tensor] = []
"""Host memory of records, pinned on a machine with GPUs. It stays with this module for good: where such
memory is freed PyTorch records an event on each stream that copied into it, and one may be capturing then."""
ROWS = 256


def _host_words() -> Tensor:
    """Zeros for a record; ``_rows`` takes them back."""
    while True:
        with suppress(IndexError):
            return _rows.pop().zero_()
        more = torch.zeros(
            (ROWS, kernels.RECORD_WORDS), dtype=torch.int64, device="cpu",
            pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        _rows.extend(more.unbind())


def _room(field: Tensor | None, ends: int = 0) -> int:
    """Requests that a field has room for; an indptr has one entry more."""
    return 2**31 - 1 if field is None else len(field) - ends


def _decode(words: list[int], batch: int) -> Found:
    """Read a record."""
    site: Site = SITES[words[kernels.SITE.value]]
    request: int | None = words[kernels.REQUEST.value]
    if site.of_call or (site.part == "step" and request is not None and request >= batch):
        request = None
    numbers: list[Value | None] = []
    for has, word in ((site.expected, kernels.EXPECTED), (site.found, kernels.FOUND)):
        value: int | float | str = words[word.value]
        if site.is_float:
            value = float(torch.tensor(value, dtype=torch.int64, device="cpu").view(torch.float64))
        if site.invariant in {"log_probs", "path_score"} and not isfinite(float(value)):
            value = str(value)
        numbers.append(value if has and words[word.value] != NOWHERE else None)
    return Found(site.invariant, request, numbers[0], numbers[1], words[kernels.AT_CALL.value])


def _shapes_of(call: Call) -> Call:
    """The call with its shapes and dtypes alone: no tensor holds anything, nor takes memory."""
    shapes: dict[str, Any] = {
        name: torch.zeros((), dtype=value.dtype, device="cpu").expand(value.shape)
        for name, value in call.known().items()
        if isinstance(value, Tensor)
    }
    return replace(call, **shapes)


def _broken_shapes(shapes: Call, batch: int) -> tuple[str, Value, Value] | None:
    """The first invariant of shapes or dtypes that is broken, with its numbers."""
    sizes = Sizes(batch, None, None)
    for name in _SHAPES:
        row = _ROWS[name]
        if not row.missing(shapes, sizes):
            for violation in row.check(shapes, sizes):
                return name, violation.expected, violation.found
    return None


# debug mode

_kept: list[CapturedCheck] = []
"""Checks in graphs that nobody else keeps: a graph may be replayed as long as the process lives."""
_keepers = threading.local()


@contextmanager
def keeping(checks: list[CapturedCheck]) -> Iterator[None]:
    """Keep what debug mode puts into graphs in this thread in ``checks``, for as long as the graph lives."""
    before = getattr(_keepers, "checks", None)
    _keepers.checks = checks
    try:
        yield
    finally:
        _keepers.checks = before


def _capture_id() -> int:
    """A number of the capture that the current stream is in."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    driver = ctypes.CDLL("libcuda.so.1")
    told = (stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if hasattr(driver, "cuStreamGetCaptureInfo_v3"):
        driver.cuStreamGetCaptureInfo_v3(*told, None)
    else:
        driver.cuStreamGetCaptureInfo_v2(*told)
    return number.value


class InGraphs:
    """What debug mode does while a graph is captured: each public call's check becomes part of the graph."""

    def __init__(self) -> None:
        self._capture: int | None = None
        self._seen: list[set[tuple[str, object]]] = []
        """The fields of each check of this capture, as they were then."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def insert(self, known: dict[str, Any], function: str, where: str, chosen: Settings) -> None:
        """Launch a check of these fields, unless this capture has checked the very same ones already.

        A function that writes into memory that was checked before makes all be checked anew.
        """
        devices = [value.device for value in known.values() if isinstance(value, Tensor)]
        device = next((d for d in devices if d.type == "cuda"), devices[0] if devices else None)
        if device is None:
            return
        known = {n: v for n, v in known.items() if not isinstance(v, Tensor) or v.device == device}
        number = _capture_id()
        if number != self._capture or function in {"commit_kv", "VerifyBuffers.fill"}:
            self._capture, self._seen = number, []
        fields = {(name, _identity(value)) for name, value in known.items()}
        if any(fields <= seen for seen in self._seen):
            return
        self._seen.append(fields)
        with apart(device):
            check = CapturedCheck(
                Call(**known),
                level="cheap" if chosen.level == "cheap" else "full",
                where=f"{where}, under graph replay",
                trap=chosen.trap,
                watched=True,
            )
        check.function = function
        with relaxed():  # the kernels may have to be loaded
            check.launch()
        kept: list[CapturedCheck] | None = getattr(_keepers, "checks", None)
        (_kept if kept is None else kept).append(check)

    def poll(self) -> Iterator[tuple[InvariantViolation, Call, str]]:
        """What any watched check has told of."""
        if self.is_capturing():
            return
        # a list of references, copied at once: other threads make checks while this one looks at them
        for reference in sorted(_live.valuerefs(), key=lambda reference: reference.key):
            check = reference()
            if check is not None and check.watched:
                violation = check.poll()
                if violation is not None and check.broken_call is not None:
                    yield violation, check.broken_call, check.function


def _identity(value: object) -> object:
    """What makes two fields the same content: one memory, not written to by PyTorch in between."""
    if not isinstance(value, Tensor):
        return value
    return value.data_ptr(), value.shape, value.stride(), value.dtype, value._version  # noqa: SLF001 # there is no other


install_capture(InGraphs())
