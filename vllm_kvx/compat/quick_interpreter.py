"""Triton's interpreter made quick: the CPU mode runs kernels on it, and the results are the same.

Triton's interpreter sets the language up anew for every function that a kernel calls and undoes it
after every launch, makes a table of types for every value, and works out a shape's constants again
and again. Here the language is set up once for the process, and types and shapes are made once.
What single operations do is in ``quick_semantics``, and what vLLM launches in every step is done
for all rows at once, see ``quick_kernels``. Nothing is compiled in the CPU mode, which
would need the language as it was.

This goes by the inside of one release of Triton, `TRITON`. With another one its own interpreter
runs as it is.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_kvx.compat.quick_kernels import Whole, whole_of
from vllm_kvx.compat.quick_semantics import Replace, replace_operations

# vLLM's CPU build names no release of Triton: an installation takes the newest.
TRITON = "3.9"

# Names what was replaced, on Triton's module, which may be imported anew.
_REPLACED = "kvx_replaced"


def install() -> None:
    """Makes the interpreter of this process quick, before it runs a kernel; safe to call again.

    Does nothing without Triton, and with another release than `TRITON`.
    """
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError:
        return
    version = str(triton.__version__)
    if version.split(".")[:2] != TRITON.split("."):
        logging.getLogger("vllm.kvx").debug(
            "Triton %s interprets kernels as it comes: the quick ways are for %s", version, TRITON
        )
    elif not hasattr(interpreter, _REPLACED):
        setattr(interpreter, _REPLACED, _replace(interpreter))


@contextmanager
def stock_interpreter() -> Iterator[None]:
    """Within, kernels run on the interpreter as Triton brings it; for tests of kernels."""
    from triton.runtime import interpreter

    replaced = getattr(interpreter, _REPLACED, None)
    if replaced is None:
        yield
        return
    replaced.undo()
    delattr(interpreter, _REPLACED)
    try:
        yield
    finally:
        install()


class _Replaced:
    """What was replaced in Triton, and what its own set-up of the language has changed since."""

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self.languages: list[Any] = []

    def undo(self) -> None:
        # The last change first: several may be of one attribute.
        for scope in (*reversed(self.languages), self.scope):
            scope.restore()


def _replace(interpreter: Any) -> _Replaced:
    # Triton's own way to change attributes, which knows what they were.
    replaced = _Replaced(interpreter._LangPatchScope())
    replace = replaced.scope.set_attr
    _set_up_once(interpreter, replace, replaced.languages)
    _know_types(interpreter, replace)
    _know_shapes(interpreter.tl.core, replace)
    replace_operations(interpreter, replace)
    _launch_at_once(interpreter.InterpretedFunction, replace)
    return replaced


def _set_up_once(interpreter: Any, replace: Replace, languages: list[Any]) -> None:
    """The language is set up once for each set of its modules that a function sees.

    languages: takes what was changed.
    """
    stock, done = interpreter._patch_lang, set[frozenset[str]]()
    # By identity, and kept, so that no other module's may have the same.
    known = dict[int, dict[str, Any]]()
    modules = (interpreter.tl, interpreter.tl.core)

    def patch_lang(fn: Any) -> Any:
        values = fn.__globals__
        if id(values) not in known:
            held = set(map(id, values.values()))
            found = frozenset(each.__name__ for each in modules if id(each) in held)
            if found not in done:
                languages.append(stock(fn))
                done.add(found)
            known[id(values)] = values
        # What a launch undoes when it ends: nothing.
        return interpreter._LangPatchScope()

    replace(interpreter, "_patch_lang", patch_lang)


def _launch_at_once(function: Any, replace: Replace) -> None:
    """Launches of some kernels do all of their programs at once."""
    stock, known = function.run, dict[Any, Whole | None]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if self.fn not in known:
            known[self.fn] = whole_of(self.fn)
        whole = known[self.fn]
        if whole is not None and not warmup and not callable(grid) and all(grid):
            # Others are options of a launch, such as the number of warps.
            named = {name: value for name, value in kwargs.items() if name in self.arg_names}
            if whole(grid, **dict(zip(self.arg_names, args, strict=False)), **named):
                return None
        return stock(self, *args, grid=grid, warmup=warmup, **kwargs)

    replace(function, "run", run)


def _know_types(interpreter: Any, replace: Replace) -> None:
    """numpy's type of every type of Triton's is looked up once."""
    stock, dtypes = interpreter._get_np_dtype, dict[str, Any]()
    pointer = interpreter.tl.pointer_type

    def np_dtype(dtype: Any) -> Any:
        if isinstance(dtype, pointer):
            return stock(dtype)
        # A block's is that of its values.
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = stock(dtype)
        return dtypes[name]

    replace(interpreter, "_get_np_dtype", np_dtype)


def _know_shapes(core: Any, replace: Replace) -> None:
    """Values and block types of one shape have its constants in common; nothing changes them."""
    shapes, blocks = dict[Any, Any](), dict[Any, Any]()
    stock_tensor, stock_block = core.tensor.__init__, core.block_type.__init__

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            stock_tensor(self, handle, type)
            shapes[shape] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        unwrapped = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        key = element_ty.name, unwrapped
        if key not in blocks:
            stock_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    replace(core.tensor, "__init__", tensor)
    replace(core.block_type, "__init__", block_type)
