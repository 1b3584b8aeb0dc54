"""Load what a generation needs, and turn prompts into tokens and tokens into text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.text import Text

from ddtree.cli.options import AUTO
from ddtree.cli.output import command as command_line
from ddtree.cli.output import fail, need, progress, stderr
from ddtree.places import is_missing, is_path

if TYPE_CHECKING:
    from torch import Tensor

    from ddtree.decoding.batch import BatchTarget
    from ddtree.decoding.decoding import Comparison
    from ddtree.decoding.drafter import Drafter
    from ddtree.decoding.target import HFTarget
    from ddtree.decoding.tuning_results import Rate

NGRAM_BLOCK_SIZE = 8


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, with the target's tokenizer."""

    plain: "HFTarget"
    """Decodes one token a pass, to compare with; and the first of a dense batch."""
    drafter: "Drafter"
    tokenizer: Any
    stop_ids: tuple[int, ...]
    draft: str = "ngram"
    """The drafter's name."""
    attention: str = "dense"
    """``"dense"``, ``"reference"`` or ``"paged"``."""

    def target(self, max_batch: int, max_context: int) -> "BatchTarget":
        """A target for so many requests, the longest of them with so many entries."""
        if self.attention == "paged":
            from ddtree.decoding.paged import PagedTarget

            size = min(self.plain.max_context, max_context)
            return PagedTarget(self.plain.model, max_batch=max_batch, max_context=size)
        from ddtree.decoding.batch import SeparateTargets
        from ddtree.decoding.target import HFTarget

        others = range(max_batch - 1)
        more = [HFTarget(self.plain.model, attention=self.plain.attention) for _ in others]
        return SeparateTargets([self.plain, *more])

    def require_room(self, prompts: "Sequence[Tensor]", max_new_tokens: int) -> None:
        """Leave if one of the prompts and its new tokens exceed the context."""
        from ddtree.decoding.loop import require_lengths
        from ddtree.spec.errors import InputError

        most = self.plain.max_context
        for i, prompt in enumerate(prompts):
            try:
                require_lengths(most, prompt, max_new_tokens)
            except InputError as error:
                which = f"prompt {i}: " if len(prompts) > 1 else ""
                room = most - max(each.numel() for each in prompts)
                longest = " beside the longest prompt" if len(prompts) > 1 else ""
                fits = f"--max-new-tokens {room} fits{longest}; or " if room >= 1 else ""
                fail(f"{which}{error}", f"{fits}shorten the prompt")

    def text(self, token_ids: Sequence[int]) -> str:
        """The tokens as text, special ones left out."""
        from ddtree.decoding.completion import decoder

        return decoder(self.tokenizer)(token_ids)

    def whole_text(self, token_ids: Sequence[int]) -> str:
        """The tokens as text, special ones shown."""
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones shown."""
        return str(self.tokenizer.decode([token_id]))

    def verdict(self, compared: "Comparison | None") -> Text:
        """Whether a text equals the target's own, in one sentence with the tokens as text."""
        if compared is None:
            return Text("not compared")
        if compared.equal:
            return Text("equal, token for token", "green")
        expected, found = (
            "the end" if token is None else repr(self.token_text(token))
            for token in (compared.expected_id, compared.found_id)
        )
        margins = " and ".join(
            "none" if margin is None else f"{margin:.2g}"
            for margin in (compared.expected_margin, compared.found_margin)
        )
        said = f"at token {compared.index} {found} where plain decoding has {expected}"
        if compared.is_tie:
            tie = f"equal up to a tie below float error: {said}; the two best logits differ by {margins}"
            return Text(tie, "yellow")
        return Text(f"DIFFERENT {said} (margins of the two best logits: {margins})", "red")


def encode(tokenizer: Any, prompts: Sequence[str], chat: bool | None) -> "list[Tensor]":
    """Token ids [n] of each prompt; ``chat`` None: in the chat template where there is one.

    Leaves where one has none.
    """
    from ddtree.decoding.completion import encode_all
    from ddtree.spec.errors import InputError

    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        fail("this target's tokenizer has no chat template", "use --raw")
    in_template = has_template if chat is None else chat
    turns = [[{"role": "user", "content": text}] for text in prompts]
    try:
        return encode_all(tokenizer, turns if in_template else prompts)
    except InputError as error:
        fail(str(error), "use --raw" if in_template else "give some text")


def require_places(target: str, draft: str) -> None:
    """Leave if a folder or file of that name is not there, before anything heavy is imported."""
    if is_missing(target):
        fail(f"target {target!r}: no such file or folder", _other_target(target))
    if is_missing(draft):
        _no_drafter(draft)


def load_pair(
    target_name: str,
    draft_name: str,
    block_size: int | None,
    attention: str = "dense",
    device: str = "cpu",
    dtype: str = "float32",
    on_tokenizer: Callable[[Any], object] | None = None,
) -> Pair:
    """Load the target, its tokenizer and the drafter; leaves with one message on bad names.

    ``draft_name`` is ``"auto"``, ``"embedded"``, ``"ngram"`` or a checkpoint's; ``attention`` ``"dense"``,
    ``"reference"``, ``"paged"`` or ``"auto"``; ``dtype`` a name of torch's;
    ``on_tokenizer`` is given the tokenizer before the weights are loaded, and may leave.
    """
    need("models", "transformers", "gguf", "tokenizers")
    draft_name, attention = _meant(target_name, draft_name, block_size, attention, device)
    if draft_name != "ngram":
        _require_drafter(draft_name, block_size)
    _require_device(device)
    if attention == "paged":
        need("kernels", "triton")
    with progress("loading the target") as say:
        import torch

        from ddtree.decoding.embedded import load_target
        from ddtree.decoding.generate import stop_ids_of
        from ddtree.decoding.target import HFTarget
        from ddtree.spec.errors import InputError

        weights: torch.dtype = getattr(torch, dtype)
        try:
            model, tokenizer = load_target(
                target_name,
                dtype=weights,
                device=device,
                on_progress=say,
                on_tokenizer=on_tokenizer,
            )
        except InputError as error:
            fail(str(error), _other_target(target_name))
        plain = HFTarget(model, attention="reference" if attention == "reference" else "dense")
        try:
            drafter = _load_drafter(draft_name, plain, block_size)
        except InputError as error:
            fail(str(error), _other_drafter(draft_name))
    return Pair(plain, drafter, tokenizer, stop_ids_of(model), draft_name, attention)


def _meant(
    target: str, draft: str, block_size: int | None, attention: str, device: str
) -> tuple[str, str]:
    """Drafter and attention, where they were left to us."""
    if draft == AUTO:
        # only prompt lookup takes any block size
        draft = "embedded" if target == "embedded" and block_size is None else "ngram"
    if attention == AUTO:
        attention = "paged" if device.startswith("cuda") else "dense"
    return draft, attention


def require_tuned(
    target: str,
    draft: str,
    block_size: int | None,
    attention: str,
    device: str,
    dtype: str,
    *,
    batch_size: int,
    command: str,
) -> None:
    """Leave, before anything is loaded, if it is known already that ``tuned`` will find nothing."""
    need("models", "transformers", "gguf", "tokenizers")
    from ddtree.decoding.tuning_results import absent, find, key_of_names

    draft, attention = _meant(target, draft, block_size, attention, device)
    _require_device(device)
    named = block_size or NGRAM_BLOCK_SIZE
    key = key_of_names(target, draft, device, dtype, attention, batch_size, named)
    if key is not None and find(key) is None:
        fail(absent(key), f"{MEASURE}: {command}")


MEASURE = "measure once, which takes about a minute"


def tuned(pair: Pair, block_size: int | None, batch_size: int, command: str) -> "Rate":
    """The stored choice of budget and topk, told.

    Leaves with ``command`` as the next step where nothing has been measured.
    """
    from ddtree.decoding.tuning_results import absent, find, key_of

    key = key_of(
        pair.plain.model, pair.draft, pair.attention, batch_size, block_size or NGRAM_BLOCK_SIZE
    )
    tuning = find(key)
    if tuning is None:
        fail(absent(key), f"{MEASURE}: {command}")
    other = tuning.key.batch_size
    note = f" (measured at batch size {other})" if other != batch_size else ""
    stderr().print(Text(f"budget auto: {tuning}{note}"), soft_wrap=True)
    if tuning.noise:
        stderr().print(Text(tuning.noise, "yellow"), soft_wrap=True)
    return tuning.best


def block_size_of(target: str, draft: str, block_size: int | None) -> int:
    """The drafter's block size, before anything is loaded; leaves as ``load_pair`` does."""
    need("models", "transformers", "gguf", "tokenizers")
    draft, _ = _meant(target, draft, block_size, "dense", "cpu")
    if draft == "ngram":
        return block_size or NGRAM_BLOCK_SIZE
    return _require_drafter(draft, block_size)


def _require_drafter(name: str, block_size: int | None) -> int:
    """Leave if there is no such checkpoint or it is another one, before the target takes its time to load.

    Returns:
        Its block size.
    """
    from ddtree.decoding.dflash import checkpoint_folder
    from ddtree.decoding.dflash_config import DFlashConfig
    from ddtree.spec.errors import InputError

    try:
        folder = checkpoint_folder(name)
    except InputError:
        _no_drafter(name)
    try:
        trained = DFlashConfig.from_json(folder / "config.json").block_size
    except InputError as error:
        fail(str(error), _other_drafter(name))
    if block_size not in {None, trained}:
        fail(
            f"--block-size is {block_size}, the checkpoint was trained with {trained}",
            "leave --block-size out, or take prompt lookup: --draft ngram",
        )
    return trained


def _no_drafter(name: str) -> NoReturn:
    """Leave: the name is no drafter's."""
    fail(
        f"--draft {name!r} is neither 'embedded' nor 'ngram' nor a folder nor a model in the local "
        "Hugging Face cache",
        _other_name("--draft", name, ["embedded", "ngram", AUTO])
        or _others(
            name,
            "--draft embedded or ngram, or the folder of a DFlash checkpoint (config.json and "
            "*.safetensors)",
        ),
    )


def _other_drafter(name: str) -> str:
    """What to do where a drafter cannot be loaded, or not for this target."""
    if name == "embedded":
        anew = "install ddtree anew"
    elif is_path(name) or Path(name).exists():
        anew = "copy or download its folder anew"
    else:
        anew = f"fetch it anew: {command_line('hf', 'download', '--force-download', name)}"
    return (
        f"if the checkpoint is damaged, {anew}; if it is of another target, take one of this target's, or "
        "prompt lookup: --draft ngram"
    )


def _other_target(name: str) -> str:
    """What to do where a target cannot be loaded."""
    if name == "embedded":
        return "mend that, or give another model: --target FOLDER"
    return _other_name("--target", name, ["embedded"]) or _others(
        name, "--target embedded, or the folder of a Transformers model, or a .gguf file"
    )


def _other_name(option: str, name: str, names: Sequence[str]) -> str:
    """The name that was meant, if it is nearly that."""
    near = get_close_matches(name, names, n=1)
    return f"did you mean {option} {near[0]}?" if near else ""


def _others(name: str, what: str) -> str:
    """What else can be given; a name that a hub may know can be fetched."""
    if is_path(name) or Path(name).exists():
        return f"give {what}"
    return f"give {what}; or fetch this one: {command_line('hf', 'download', name)}"


def _require_device(device: str) -> None:
    """Leave if there is no such device."""
    import torch

    if device.partition(":")[0] not in {"cpu", "cuda"}:
        fail(f"--device {device!r} is not one that ddtree knows", "use cpu, cuda, or cuda:1")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        fail(f"--device {device!r}: {str(error).splitlines()[0]}", "use --device cpu")


def _load_drafter(name: str, target: "HFTarget", block_size: int | None) -> "Drafter":
    if name == "ngram":
        from ddtree.decoding.ngram import NGramDrafter

        return NGramDrafter(target.vocab_size, block_size or NGRAM_BLOCK_SIZE)
    from ddtree.decoding.dflash import DFlashDrafter

    return DFlashDrafter.load(name, target)
