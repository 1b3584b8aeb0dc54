"""SGLang's attention backends, hooked through its plugin registry (``sglang.srt.plugins``, since 0.5.12).

Hooked are the Triton backend, here, and FlashInfer's (``sglang_flashinfer.py``). Where verify metadata is
made it is read and held to the table: after the eager pass's, after that of each capture and each replay (in
the buffers that the graph reads), and once a pass at the attention kernel itself, as the backend bound it.
SGLang logs and swallows what goes wrong in plugins, so that the hooks look for themselves when all are
applied, and say what they found.
"""

import functools
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ddtree.invariants.actions import dumped
from ddtree.invariants.call import Call
from ddtree.invariants.hooks import sglang_calls as calls
from ddtree.invariants.hooks.sglang_flashinfer import FlashInfer
from ddtree.invariants.hooks.watch import (
    Watch,
    hook_settings,
    is_capturing,
    logger,
    signature,
    wait_for,
)
from ddtree.invariants.recorded import record
from ddtree.invariants.settings import Settings
from ddtree.invariants.violation import InvariantViolation
from ddtree.spec.errors import InputError

REGISTRY = "sglang.srt.plugins.hook_registry"
_ATTENTION = "sglang.srt.layers.attention"

TARGETS: dict[str, tuple[str, str, str]] = {
    "TritonAttnBackend.init_forward_metadata": ("triton_backend", "eager", "AFTER"),
    # since 0.5.13
    "TritonAttnBackend.init_forward_metadata_out_graph": ("triton_backend", "graph", "AROUND"),
    # binds extend_attention_fwd, whose module asks for the device at import
    "TritonAttnBackend.__init__": ("triton_backend", "made", "AFTER"),
    "FlashInferAttnBackend.init_forward_metadata": (
        "flashinfer_backend", "flashinfer.eager", "AROUND"
    ),
    "FlashInferAttnBackend.init_forward_metadata_out_graph": (
        "flashinfer_backend", "flashinfer.graph", "AROUND"
    ),
    "FlashInferIndicesUpdaterPrefill.call_begin_forward": (
        "flashinfer_backend", "flashinfer.plan", "AROUND"
    ),
}  # fmt: skip
"""Of each hooked method its module, the method of ``Hooks`` that hooks it, and how."""


class Hooks:
    """The hooks of one process."""

    def __init__(self, chosen: Settings) -> None:
        """Check as the settings say."""
        self.watch = Watch(f"SGLang {installed_version() or '(unknown version)'}", chosen)
        self.where: dict[str, str] = {}
        self._baked: WeakKeyDictionary[Any, dict[tuple[int, int | None], int]] = WeakKeyDictionary()
        self._seen: Seen | None = None
        self._kept = False
        self.flashinfer = FlashInfer(self.watch)

    def install(self) -> None:
        """Register the hooks, and look for them when SGLang has applied all plugins' hooks."""
        registry: Any = import_module(REGISTRY)
        targets = {}
        for name, (module, method, kind) in TARGETS.items():
            path, hook = f"{_ATTENTION}.{module}.{name}", attrgetter(method)(self)
            why = missing(path)
            if why:
                self.where[name] = why
            else:
                targets[name] = (path, hook)
                registry.HookRegistry.register(path, hook, registry.HookType[kind])
        apply_hooks = vars(registry.HookRegistry)["apply_hooks"]

        def applied(_: object) -> None:
            registry.HookRegistry.apply_hooks = apply_hooks
            registry.HookRegistry.apply_hooks()
            for name, (path, hook) in targets.items():
                is_there = is_hooked(pkgutil.resolve_name(path), hook)
                why = "" if is_there else f"SGLang did not apply the hook to {path}"
                self.where[name] = why
            self.watch.installed(self.where)

        registry.HookRegistry.apply_hooks = classmethod(applied)

    def eager(self, result: Any, backend: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
        """After ``init_forward_metadata``: the call that the pass will run with."""
        where = "eager verify metadata"
        with self.watch.guarded(where):
            if is_capturing() or not calls.is_verify(forward_batch.forward_mode):
                return
            if not self.watch.is_due("sglang_eager"):
                return
            wait_for(forward_batch.seq_lens)
            call = calls.eager_call(backend, forward_batch)
            if call is not None:
                self._compare_told(forward_batch, call)
                mask_indptr = backend.forward_metadata.mask_indptr
                self._seen = Seen(ref(mask_indptr), call)
                self._seen.violation = self.watch.hold(call, "sglang_eager", where)

    def graph(
        self,
        original: Callable[..., Any],
        backend: Any,
        forward_batch: Any,
        in_capture: bool = False,
        **more: Any,
    ) -> Any:
        """Around ``init_forward_metadata_out_graph``: the buffers of a capture or of the next replay."""
        where = "verify metadata of a " + ("capture" if in_capture else "replay")
        try:
            result = original(backend, forward_batch, in_capture, **more)
        except RuntimeError:  # what PyTorch says of a mask that is longer than its buffer
            with self.watch.guarded(where):
                call = calls.room_call(backend, forward_batch)
                if call is not None and not is_capturing():
                    self.watch.hold(call, "sglang_buffers", where)
            raise
        with self.watch.guarded(where):
            if calls.is_verify(forward_batch.forward_mode):
                self._graph(backend, forward_batch, where, in_capture=in_capture)
        return result

    def _graph(self, backend: Any, batch: Any, where: str, *, in_capture: bool) -> None:
        if is_capturing():
            self.watch.once(f"not checked: {where}: it is itself prepared in a CUDA graph")
            return
        baked, size = (
            self._baked.setdefault(backend, {}),
            (int(batch.batch_size), calls.rows_of(batch)),
        )
        if in_capture:
            wait_for(batch.seq_lens)
            made = backend.forward_metadata
            if made.max_extend_len is not None:
                baked[size] = int(made.max_extend_len)
            self._seen = Seen(ref(made.mask_indptr), None)  # its warm-up passes have no real mask
            self._seen.at_kernel = True
            call = calls.widths_call(batch, made)
        elif self.watch.is_due("sglang_replay"):
            wait_for(batch.seq_lens)
            call = calls.replay_call(backend, batch, baked.get(size))
        else:
            return
        if call is not None:
            self._compare_told(batch, call)
            self.watch.hold(call, "sglang_capture" if in_capture else "sglang_replay", where)

    def made(self, result: Any, backend: Any, *_: Any, **__: Any) -> None:
        """After ``__init__``: put the hook around the attention kernel that this backend has bound."""
        original = getattr(backend, "extend_attention_fwd", None)
        if original is None:
            self.watch.once(
                f"{self.watch.engine}: not installed on extend_attention_fwd: this backend has none"
            )
            return

        @functools.wraps(original)
        def attention(*args: Any, **kwargs: Any) -> Any:
            return self.attention(original, *args, **kwargs)

        backend.extend_attention_fwd = torch.compiler.disable(attention)
        self.watch.once(
            f"{self.watch.engine}: installed on extend_attention_fwd of this worker's TritonAttnBackend"
        )

    def attention(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``extend_attention_fwd``: what the kernel is given, once for each pass."""
        custom_mask = kwargs.get("custom_mask", args[9] if len(args) > 9 else None)
        if custom_mask is not None:
            with self.watch.guarded("verify attention"):
                self._attention(dict(signature(original).bind(*args, **kwargs).arguments))
        return original(*args, **kwargs)

    def _attention(self, given: dict[str, Any]) -> None:
        if given.get("sliding_window_size", -1) > -1:
            return  # its slots are cut to the window, its mask is not: a full layer tells more
        where = "verify attention"
        if is_capturing():
            call = calls.captured_kernel_call(given)
            if call is not None:
                self.watch.hold(call, "sglang_captured_attention", f"{where}, captured")
            return
        seen, mask_indptr = self._seen, given["mask_indptr"]
        if seen is not None and seen.mask_indptr() is mask_indptr:
            if seen.at_kernel:
                return  # each layer of the pass comes by
            if seen.violation is not None:
                seen.at_kernel = True
                self._keep(seen, given)
                return
            call = seen.with_pool(given)
        elif self.watch.is_due("sglang_attention"):
            wait_for(mask_indptr)
            call = calls.kernel_call(given)
            seen = self._seen = Seen(ref(mask_indptr), call)
        else:
            seen = self._seen = Seen(ref(mask_indptr), None)
            call = None
        seen.at_kernel = True
        if call is not None:
            seen.violation = self.watch.hold(call, "sglang_attention", where)

    def _keep(self, seen: "Seen", given: dict[str, Any]) -> None:
        """Write what the kernel is given in the first broken pass, for ``ddtree replay``."""
        if self._kept or "dump" not in self.watch.settings.actions or seen.call is None:
            return
        assert seen.violation is not None
        self._kept = True
        arguments = calls.attention_arguments(given, seen.call)
        path = dumped(
            seen.violation,
            self.watch.settings,
            "verify_attention",
            lambda file: record(file, "verify_attention", arguments, seen.call),
        )
        self.watch.once(
            f"{self.watch.engine}: the tensors of a broken pass, for ddtree replay: {path}", "kept"
        )

    def _compare_told(self, batch: Any, call: Call) -> None:
        """Say where ``spec_info`` and the query rows differ: the rows are believed, and run."""
        told = calls.told_width(batch.spec_info)
        width = None if call.q_lens is None or not call.q_lens.numel() else int(call.q_lens[0])
        if told is not None and width is not None and told != width:
            self.watch.once(
                f"spec_info of a verify pass says {told} tokens a request, and the pass has {width} rows of "
                f"each: checked with {width}"
            )


class Seen:
    """The metadata that was seen last, so that of a pass's layers the first alone is looked at."""

    def __init__(self, mask_indptr: "ref[Tensor]", call: Call | None) -> None:
        """Know it by its ``mask_indptr``, which all layers of one pass share."""
        self.mask_indptr, self.call = mask_indptr, call
        self.violation: InvariantViolation | None = None
        self.at_kernel = False

    def with_pool(self, given: dict[str, Any]) -> Call | None:
        """What the kernel adds to what is known: the pool's size and the rows of the query."""
        call = self.call
        if call is None:
            return None
        known = call.known() | calls.pool_size(given["k_buffer"])
        if not call.is_captured:
            known["num_rows"] = int(given["q_extend"].shape[0])
        return Call(**known)


def plugin() -> None:
    """Install the hooks in this process: what the entry point runs. A setting that is wrong is logged."""
    try:
        Hooks(hook_settings()).install()
    except InputError as error:
        logger.error("ddtree hooks: NOT installed on SGLang: %s", error)  # no fault of ours


def status() -> dict[str, str]:
    """Each target's name; why the installed version does not have it, or an empty string."""
    told = {"plugin registry": missing(REGISTRY)}
    return told | {
        name: missing(f"{_ATTENTION}.{module}.{name}") for name, (module, *_) in TARGETS.items()
    }


def installed_version() -> str:
    """The version that is installed; empty: none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def missing(path: str) -> str:
    """Why this version has nothing under a dotted path; empty: it has."""
    try:
        pkgutil.resolve_name(path)
    except Exception as error:  # noqa: BLE001  # an engine's module may fail in any way when imported
        return f"not found: {path}: {type(error).__name__}: {error}"
    return ""


def is_hooked(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether a function leads to the hook, through whatever other plugins put around it."""
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        with suppress(ValueError):  # an empty cell
            if any(cell.cell_contents == hook for cell in cells):
                return True
        function = getattr(function, "__wrapped__", None)
    return False
