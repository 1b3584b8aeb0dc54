"""What is held to the reference: any object that offers some of the public functions.

    class Mine:
        def verify_attention(self, query, key, value, key_pool, value_pool, layout, mask):
            return my_kernel(query, key_pool, layout.qo_indptr, mask.allowed, ...)

An object, a class without arguments, a module, or one function (taken for ``verify_attention``, unless it
bears another public name). Functions take what ``ddtree.spec``'s take and return the same;
``verify_attention`` may return its output alone. What an implementation needs in another form it converts
(``spec.convert_mask``); what it cannot do it refuses by raising ``Refused`` with the reason. It writes into
none of its inputs, save the KV that a commit is given to move.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ddtree.invariants.conformance.attributes import ATTRIBUTES, TOLERANCES, checked, read
from ddtree.invariants.conformance.failure import told_of
from ddtree.invariants.conformance.patience import CALL_LIMIT, Patience
from ddtree.spec.errors import InputError, require
from ddtree.spec.mask import Form

FUNCTIONS = (
    "build_tree",
    "plan_verify",
    "tree_mask",
    "convert_mask",
    "verify_attention",
    "accept_greedy",
    "accept_sampled",
    "commit_kv",
)
"""The public functions that a backend may offer."""


class Refused(Exception):
    """A backend does not take a call; the message says why."""


@dataclass(frozen=True)
class Backend:
    """One implementation, and what is known of it."""

    name: str
    functions: Mapping[str, Callable[..., Any]]
    mask_forms: tuple[Form, ...] = ("flat",)
    """Forms that its functions take or make; from the object's ``mask_forms``."""
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES)
    """Of queries and keys; from the object's ``dtypes``."""
    tolerances: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCES)
    device: str = "cpu"
    capture: Callable[..., Callable[[], Any]] | None = None
    """Takes what ``verify_attention`` takes and returns a function without arguments that does the work
    anew on the same tensors, as a replayed graph does; from the object's ``capture``. None: on a CUDA device
    a real graph is captured, elsewhere ``verify_attention`` is called again."""
    any_mask: bool = False
    """Whether it takes masks that are no tree's; from the object's ``any_mask``."""
    call_limit: float = CALL_LIMIT
    """Longest, in seconds, that one call may take before it is taken for endless; from the object's
    ``call_limit``."""
    make: Callable[[], Any] | None = None
    """Makes the object anew; known of a class alone."""
    patience: Patience = field(init=False, repr=False, compare=False)

    def anew(self) -> "Backend | None":
        """The same of a new object, which no call was made of; None where there is no class to make it of."""
        if self.make is None:
            return None
        fresh = self.of(self.make, self.name)
        object.__setattr__(fresh, "patience", self.patience)  # what was lost here is lost there
        return fresh

    def __post_init__(self) -> None:
        given = {attribute: getattr(self, attribute) for attribute in ATTRIBUTES}
        for attribute, value in checked(self.name, given).items():
            object.__setattr__(self, attribute, value)
        object.__setattr__(self, "patience", Patience(self.call_limit))

    @classmethod
    def of(cls, thing: Any, name: str = "") -> "Backend":
        """Read what an object offers.

        Raises:
            InputError: it offers none of the public functions, an attribute is not what it must be, or it is
                a class of which no object can be made; the exception of the class is then its cause.
        """
        if isinstance(thing, cls):
            return thing
        make = thing if inspect.isclass(thing) else None
        if make is not None:
            try:
                thing = make()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a class may raise anything, SystemExit too
                raise InputError(
                    f"{name or make.__name__} cannot be made: {told_of(error)}"
                ) from error
        called = getattr(thing, "__name__", type(thing).__name__)
        offered = {n: read(thing, n, name or called) for n in FUNCTIONS}
        found = {n: function for n, function in offered.items() if callable(function)}
        if not found and callable(thing):
            found = {called if called in FUNCTIONS else "verify_attention": thing}
        require(
            bool(found), f"{name or called} offers none of the functions {', '.join(FUNCTIONS)}"
        )
        given = {
            key: value
            for key in ATTRIBUTES
            if (value := read(thing, key, name or called)) is not None
            and not inspect.ismodule(value)
            and not (inspect.ismodule(thing) and value is torch.device)  # of its own imports
        }
        return cls(name or called, found, make=make, **given)

    def accepts(self, function: str, keyword: str) -> bool:
        """Whether a function takes a keyword, by its signature."""
        try:
            parameters = inspect.signature(self.functions[function]).parameters
        except (TypeError, ValueError):  # built in: it has none to read
            return True
        return keyword in parameters or any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
        )
