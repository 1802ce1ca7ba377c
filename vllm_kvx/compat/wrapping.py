"""How something of ours takes the place of a function of vLLM's: once, and with its looks."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

MARK = "_vllm_kvx_wrapped"

_Function = Callable[..., Any]


def wrap_once(owner: Any, name: str, make: Callable[[_Function], _Function]) -> bool:
    """Puts ``make(original)`` in the place of ``owner.name``; a second time it does nothing.

    Signature, name and docstring stay the original's. Returns whether it wrapped.

    Raises:
        AttributeError: ``owner`` has no such attribute.
    """
    current = inspect.getattr_static(owner, name)
    kind = type(current) if isinstance(current, (staticmethod, classmethod)) else None
    original = current.__func__ if kind else current
    # functools.wraps copies attributes, so the mark shows through wrappers of other plugins.
    if getattr(original, MARK, False):
        return False
    wrapped = functools.wraps(original)(make(original))
    setattr(wrapped, MARK, True)
    setattr(owner, name, kind(wrapped) if kind else wrapped)
    return True
