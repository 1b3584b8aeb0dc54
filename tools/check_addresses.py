"""Lint: no kernel computes an address outside the proved formulas.

Every pointer that a kernel loads from or stores to, and every index that goes into it, is followed back
through the kernel's assignments, its helpers and their callers. On the way sums are allowed: a base and
an index, an index and a start. Products, quotients, remainders, shifts and bit masks are not: they belong
into a function of ``ddtree.spec.index``, which the proofs (``ddtree prove``) are about. What passes is a
call of such a function, an expression of compile-time sizes alone, and what ``ALLOWED`` names with the
formula that it spells out.

Usage: ``python tools/check_addresses.py [FILE ...]`` (default: every ``impl/*_kernels.py``).
Prints ``path:line: what is wrong`` and exits with 1 if there is any such line.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ALLOWED: dict[str, str] = {
    # attention: rows of a tile, heads of a group
    "index // GROUP": "row_of(index, GROUP)",
    "index % GROUP": "col_of(index, GROUP)",
    "kv_head * GROUP": "row_offset(kv_head, GROUP, 0)",
    "head * query_stride_head": "row_offset(head, query_stride_head, 0)",
    "kv_head * stride": "row_offset(kv_head, stride, 0)",
    "kv_head * tree_stride_head": "row_offset(kv_head, tree_stride_head, 0)",
    "kv_head * pool_stride_head": "row_offset(kv_head, pool_stride_head, 0)",
    "kv_head * tl.where(in_tree, tree_stride_head, pool_stride_head)": "row_offset(kv_head, tl.where(in_tree, tree_stride_head, pool_stride_head), 0)",
    "row * (KV_HEADS * GROUP)": "row_offset(row, KV_HEADS * GROUP, 0)",
    "(q_start + node).to(tl.int64) * (KV_HEADS * GROUP)": "row_offset(q_start + node, KV_HEADS * GROUP, 0)",
    "out_row[:, None] * HEAD_DIM": "row_offset(out_row, HEAD_DIM, 0)",
    "(place + offs_m)[:, None] * HEAD_DIM": "row_offset(place + offs_m, HEAD_DIM, 0)",
    "num_rows * HEADS": "row_offset(num_rows, HEADS, 0)",
    "start * HEADS": "row_offset(start, HEADS, 0)",
    "tl.cast(i, tl.int64) * HEAD_DIM": "row_offset(i, HEAD_DIM, 0)",
    # attention: blocks of entries, tiles of rows
    "tl.cdiv(prefix_len, BLOCK_N)": "num_blocks(prefix_len, BLOCK_N)",
    "tl.cdiv(q_len, BLOCK_N)": "num_blocks(q_len, BLOCK_N)",
    "tl.cdiv((last_word + 1) * 32, BLOCK_N)": "num_blocks(block_start(last_word + 1, 32), BLOCK_N)",
    "(last_word + 1) * 32": "block_start(last_word + 1, 32)",
    "tl.cdiv(tl.maximum(least_start, 0), BLOCK_N)": "num_blocks(tl.maximum(least_start, 0), BLOCK_N)",
    "prefix_len // BLOCK_N": "row_of(prefix_len, BLOCK_N)",
    "tl.maximum(window_start(prefix_len, window), 0) // BLOCK_N": "row_of(tl.maximum(window_start(prefix_len, window), 0), BLOCK_N)",
    "prefix_len * 0": "block_start(0, prefix_len)",
    "full_start * BLOCK_N": "block_start(full_start, BLOCK_N)",
    "tl.minimum(j + 1, full_stop - 1) * BLOCK_N": "block_start(tl.minimum(j + 1, full_stop - 1), BLOCK_N)",
    "tl.where(in_tree, j - prefix_blocks, j) * BLOCK_N": "block_start(tl.where(in_tree, j - prefix_blocks, j), BLOCK_N)",
    "tl.where(in_tree, tree_block, 0) * BLOCK_N": "block_start(tl.where(in_tree, tree_block, 0), BLOCK_N)",
    "tl.cdiv(tl.max(q_ends - q_starts) * GROUP, BLOCK_M)": "num_blocks(tl.max(q_ends - q_starts) * GROUP, BLOCK_M)",
    "tl.max(q_ends - q_starts) * GROUP": "row_offset(tl.max(q_ends - q_starts), GROUP, 0)",
    "tile * BLOCK_M": "block_start(tile, BLOCK_M)",
    "tl.program_id(1) * MERGE_M": "block_start(tl.program_id(1), MERGE_M)",
    # attention: the line of blocks and its spans
    "tl.sum(blocks) * KV_HEADS": "row_offset(tl.sum(blocks), KV_HEADS, 0)",
    "most // tl.maximum(span, 1)": "row_of(most, tl.maximum(span, 1))",
    "tl.cdiv(most, pieces)": "num_blocks(most, pieces)",
    "tl.cdiv(span, piece)": "num_blocks(span, piece)",
    "piece * tl.cdiv(span, piece)": "round_up(span, piece)",
    "tl.cdiv(blocks, tl.maximum(span, 1))": "num_blocks(blocks, tl.maximum(span, 1))",
    "tl.cdiv(blocks, tl.maximum(span, 1)) * span": "block_start(num_blocks(blocks, tl.maximum(span, 1)), span)",
    "tl.cdiv(blocks, piece)": "num_blocks(blocks, piece)",
    "tl.cdiv(blocks, piece) * piece": "round_up(blocks, piece)",
    "tl.sum(share) * KV_HEADS": "row_offset(tl.sum(share), KV_HEADS, 0)",
    "share * KV_HEADS": "row_offset(share, KV_HEADS, 0)",
    "(unit - before) // item_share": "row_of(unit - before, item_share)",
    "kv_head * item_share": "block_start(kv_head, item_share)",
    "b * KV_HEADS": "row_offset(b, KV_HEADS, 0)",
    # attention: programs, records and partial results
    "num_programs // num_tiles": "row_of(num_programs, num_tiles)",
    "num_groups * num_tiles": "row_offset(num_groups, num_tiles, 0)",
    "program // num_tiles": "row_of(program, num_tiles)",
    "program % num_tiles": "col_of(program, num_tiles)",
    "(program % num_tiles + item) % num_tiles": "col_of(col_of(program, num_tiles) + item, num_tiles)",
    "item * num_tiles": "row_offset(item, num_tiles, 0)",
    "request * KV_HEADS": "row_offset(request, KV_HEADS, 0)",
    "request * KV_HEADS * num_tiles": "row_offset(row_offset(request, KV_HEADS, 0), num_tiles, 0)",
    "tl.max(is_empty.to(tl.int32)) * KV_HEADS": "row_offset(tl.max(is_empty), KV_HEADS, 0)",
    "tl.max(is_empty.to(tl.int32)) * KV_HEADS * num_tiles": "row_offset(row_offset(tl.max(is_empty), KV_HEADS, 0), num_tiles, 0)",
    "program * 2": "row_offset(program, 2, 0)",
    "(program * 2 + tl.where(is_first, 1, 0)) * BLOCK_M": "row_offset(row_offset(program, 2, tl.where(is_first, 1, 0)), BLOCK_M, 0)",
    "place * 2": "row_offset(place, 2, 0)",
    "split * stride": "row_offset(split, stride, 0)",
    "tl.where(split > 0, place - 1, place) * BLOCK_M": "row_offset(tl.where(split > 0, place - 1, place), BLOCK_M, 0)",
    "records_stride * 2": "row_offset(2, records_stride, 0)",
    "records_stride * 3": "row_offset(3, records_stride, 0)",
    "records_stride * 4": "row_offset(4, records_stride, 0)",
    "records_stride * 5": "row_offset(5, records_stride, 0)",
    # ranks: rows of logits, groups of tokens, two counts in one number, an id below its key
    "b * stride_b": "row_offset(b, stride_b, 0)",
    "depth * stride_d": "row_offset(depth, stride_d, 0)",
    "tl.program_id(1) * GROUPS": "block_start(tl.program_id(1), GROUPS)",
    "group[:, None] * GROUP": "row_offset(group, GROUP, 0)",
    "entry // GROUP": "row_of(entry, GROUP)",
    "entry % GROUP": "col_of(entry, GROUP)",
    "tl.load(groups + scratch + member, mask=member < num_chosen, other=0) * GROUP": "row_offset(tl.load(groups + scratch + member, mask=member < num_chosen, other=0), GROUP, 0)",
    "equal << 12": "row_offset(equal, 4096, 0)",
    "before & 4095": "col_of(before, 4096)",
    "before >> 12": "row_of(before, 4096)",
    "key & 4294967295": "col_of(key, 4294967296)",
    # paths: pairs of neighbours, a slot below a count, one request's candidates
    "2 * pair": "block_start(pair, 2)",
    "count_and_slot & 65535": "col_of(count_and_slot, 65536)",
    "horizon * kept": "row_offset(horizon, kept, 0)",
}
"""Expressions (as ``ast.unparse`` writes them) that kernels spell out, and the formula that each is.

``tests/meta/test_check_addresses.py`` proves every line for all numbers.
"""

DATA: dict[str, str] = {
    "1 << KEPT_BITS - 1 - bit": "a step of a bisection: the trial is compared with what there is",
    "1 << PATH_BITS - 1 - bit": "as above; all steps together stay below 2^PATH_BITS = PATHS",
    "16 >> step": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "found & square": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "loaded & own_columns": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "loaded.to(tl.int64) & 4294967295": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "tl.atomic_min(state + FIRST, tl.full([], NOWHERE, tl.int64))": "a key that `report` made: a site, a request and a part, cut apart again",
    "tl.full(count.shape, 1, tl.int64) << count": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word & 858993459": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word + (word >> 4) & 252645135": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word + (word >> 8) + (word >> 16) + (word >> 24) & 63": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word >> 1": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word >> 1 & 1431655765": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word >> 16": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word >> 2": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word >> 2 & 858993459": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word >> 24": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word >> 4": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
    "word >> 8": "bits of a mask's words: one's place is below 32 times the words, a node below q_len",
}
"""Expressions that are no address but a number searched for, and what bounds it."""

THROUGH = {"minimum", "maximum", "range", "static_range", "to_tensor"}
"""Functions of ``tl`` (and Gluon's ``gl``) whose result is as good an index as their arguments."""
FIRST = {"sum", "max", "min", "cumsum", "associative_scan", "cast", "sort"}
"""As above, of their first argument; those behind it are axes and dtypes."""
FRESH = {
    "arange", "program_id", "num_programs", "load", "zeros", "full", "histogram",
    "ceil", "exp2", "log2",
}  # fmt: skip
"""Functions of ``tl`` that count from 0 or read data: nothing is followed behind them."""
KEEPS = {"to"}
"""Methods of a tensor that keep its numbers."""


Key = tuple[str, str]
"""Module and name of a function."""
FORMULAS = "index"


class Kernel:
    """A function of a kernel file, and what its names stand for."""

    def __init__(self, path: Path, node: ast.FunctionDef, imported: dict[str, Key]) -> None:
        """Collect the function's assignments; ``imported`` says where the file's names come from."""
        self.path = path
        self.node = node
        self.imported = imported
        self.parameters = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        self.constants = {
            a.arg
            for a in (*node.args.args, *node.args.kwonlyargs)
            if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)
        }
        self.assigned: dict[str, list[ast.expr]] = {}
        for statement in ast.walk(node):
            match statement:
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, value)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, value)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    before = ast.Name(name, ast.Load())
                    self._assign(target, ast.copy_location(ast.BinOp(before, op, value), statement))
                case ast.For(target=target, iter=iterated):
                    self._assign(target, iterated)
                case ast.NamedExpr(target=target, value=value):
                    self._assign(target, value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _:
                self.assigned.setdefault(name, []).append(value)
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                for one, its in zip(targets, values, strict=True):
                    self._assign(one, its)
            case ast.Tuple(elts=targets), _:
                for one in targets:
                    self._assign(one, value)

    @property
    def key(self) -> Key:
        """Module and name."""
        return self.path.stem, self.node.name

    def called(self, function: ast.expr) -> Key:
        """Module and name of what a call calls, if it is a function of these modules."""
        name = last_name(function)
        return self.imported.get(name, (self.path.stem, name))

    def calls(self) -> Iterator[ast.Call]:
        """Every call in the function; a partition ``(worker, arguments)`` of Gluon's is one."""
        for node in ast.walk(self.node):
            match node:
                case ast.Call():
                    yield node
                case ast.Tuple(elts=[ast.Name() as worker, ast.Tuple(elts=arguments)]):
                    yield ast.copy_location(ast.Call(worker, arguments, []), node)

    def returned(self) -> Iterator[ast.expr]:
        """What the function returns."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Return) and node.value is not None:
                yield node.value

    def is_constant(self, expression: ast.expr) -> bool:
        """Whether it is made of compile-time sizes alone."""
        names = [n.id for n in ast.walk(expression) if isinstance(n, ast.Name)]
        plain = not any(isinstance(n, ast.Call) for n in ast.walk(expression))
        return plain and all(
            name in self.constants or (name.isupper() and name not in self.parameters)
            for name in names
        )


def last_name(function: ast.expr) -> str:
    """``load`` of ``tl.load``."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_of_language(function: ast.expr) -> bool:
    """Whether it is ``tl.load`` and its like, rather than a buffer's own ``load``."""
    match function:
        case ast.Attribute(value=ast.Name(id="tl" | "gl")):
            return True
    return False


def indices_of(function: ast.expr) -> Iterator[ast.expr]:
    """What a chain such as ``buffers.index(stage).store`` chooses its buffer by."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and last_name(node.func) == "index":
            yield from node.args


def is_truth(expression: ast.expr) -> bool:
    """Whether it is a comparison, or comparisons joined: true or false, whatever it is made of."""
    match expression:
        case ast.Compare() | ast.BoolOp():
            return True
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
            return is_truth(left) or is_truth(right)
        case ast.Subscript(value=value):
            return is_truth(value)
    return False


def kernels_of(source: str, path: Path) -> Iterator[Kernel]:
    """The functions of a kernel file."""
    tree = ast.parse(source, str(path))
    imported = {
        alias.asname or alias.name: (node.module.rsplit(".", 1)[1], alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddtree.impl.")
        for alias in node.names
        if node.module
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield Kernel(path, node, imported)


class Addresses:
    """Follows every address of some kernels back to where it comes from."""

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        """Index the kernels by name and by who calls them."""
        self.kernels = {kernel.key: kernel for kernel in kernels}
        self.callers: dict[Key, list[tuple[Kernel, ast.Call]]] = {}
        self.problems: set[tuple[Path, int, str]] = set()
        self.used: set[str] = set()
        """Allowed expressions that were met."""
        self._seen: set[tuple[Key, str]] = set()
        for kernel in self.kernels.values():
            for call in kernel.calls():
                if (key := kernel.called(call.func)) in self.kernels:
                    self.callers.setdefault(key, []).append((kernel, call))

    def check(self) -> None:
        """Look at every load, store and atomic."""
        for kernel in self.kernels.values():
            for call in kernel.calls():
                name = last_name(call.func)
                if name in {"load", "store"} and not is_of_language(call.func):
                    for index in indices_of(call.func):  # of a shared buffer
                        self.follow(kernel, index)
                elif name in {"load", "store"} or name.startswith("atomic_"):
                    self.follow(kernel, call.args[0])
                elif name == "async_copy_global_to_shared":
                    self.follow(kernel, call.args[1])

    def follow(self, kernel: Kernel, expression: ast.expr) -> None:
        """Follow one expression that goes into an address."""
        match expression:
            case ast.Constant():
                pass
            case _ if is_truth(expression):
                pass
            case ast.Name(id=name):
                self._follow_name(kernel, name)
            case ast.Attribute() if kernel.is_constant(expression) or expression.attr == "shape":
                pass
            case ast.Subscript(value=value):
                self.follow(kernel, value)
            case ast.Tuple(elts=parts):
                for part in parts:
                    self.follow(kernel, part)
            case ast.IfExp(body=body, orelse=orelse):
                self.follow(kernel, body)
                self.follow(kernel, orelse)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                self.follow(kernel, left)
                self.follow(kernel, right)
            case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
                self.follow(kernel, operand)
            case ast.Call():
                self._follow_call(kernel, expression)
            case _:
                self._judge(kernel, expression)

    def _follow_name(self, kernel: Kernel, name: str) -> None:
        if (kernel.key, name) in self._seen:
            return
        self._seen.add((kernel.key, name))
        for value in kernel.assigned.get(name, []):
            self.follow(kernel, value)
        if name in kernel.parameters:
            place = kernel.parameters.index(name)
            for caller, call in self.callers.get(kernel.key, []):
                given = [k.value for k in call.keywords if k.arg == name]
                if place < len(call.args):
                    given.append(call.args[place])
                for argument in given:
                    self.follow(caller, argument)

    def _follow_call(self, kernel: Kernel, call: ast.Call) -> None:
        name, key = last_name(call.func), kernel.called(call.func)
        arguments = [*call.args, *(k.value for k in call.keywords)]
        if key[0] == FORMULAS:
            for argument in arguments:
                self.follow(kernel, argument)
        elif key in self.kernels:
            for value in self.kernels[key].returned():
                self.follow(self.kernels[key], value)
        elif name in THROUGH:
            for argument in arguments:
                self.follow(kernel, argument)
        elif name == "where":
            for argument in arguments[1:]:  # the condition chooses, it is no index
                self.follow(kernel, argument)
        elif name in FIRST:
            self.follow(kernel, arguments[0])
        elif name in KEEPS and isinstance(call.func, ast.Attribute):
            self.follow(kernel, call.func.value)
        elif name not in FRESH:
            self._judge(kernel, call)

    def _judge(self, kernel: Kernel, expression: ast.expr) -> None:
        """Let a constant or an allowed expression pass; its parts are indices all the same."""
        if kernel.is_constant(expression):
            return
        text = ast.unparse(expression)
        if text in ALLOWED or text in DATA:
            self.used.add(text)
        else:
            self.problems.add((kernel.path, expression.lineno, text))
        for part in ast.iter_child_nodes(expression):
            if isinstance(part, ast.expr) and not isinstance(part, ast.Attribute):
                self.follow(kernel, part)


def problems(sources: Iterable[tuple[Path, str]]) -> tuple[list[str], set[str]]:
    """Lines that say what is wrong in the sources, and the allowed expressions that they need."""
    addresses = Addresses(kernel for path, source in sources for kernel in kernels_of(source, path))
    addresses.check()
    lines = [
        f"{path}:{line}: `{text}` goes into an address: call a formula of ddtree.impl.index, or name the "
        "one that it spells out in tools/check_addresses.py"
        for path, line, text in sorted(addresses.problems)
    ]
    return lines, addresses.used


def main(arguments: list[str]) -> int:
    """Lint the files named, or all; return the exit code."""
    files = [Path(a).resolve() for a in arguments] or sorted((ROOT / "impl").glob("*_kernels.py"))
    lines, used = problems((f.relative_to(ROOT), f.read_text(encoding="utf-8")) for f in files)
    if not arguments:
        spare = (ALLOWED.keys() | DATA.keys()) - used
        lines += [f"`{text}` is allowed, and no kernel needs it" for text in sorted(spare)]
    for line in lines:
        print(line)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
