"""Triton's interpreter on CPU, made several times faster."""

import os
from pathlib import Path
from typing import Any

import torch

from support import quick_semantics

# Where it is vLLM's `worker_extension_cls`, workers in processes of their own are quick, too; they
# need `support` in their path: see `quick_environment`.
QUICK_WORKER = "support.quick_worker.Quick"
QUICK_FLAGS = ("--worker-extension-cls", QUICK_WORKER)


def quick_environment(environment: dict[str, str]) -> dict[str, str]:
    """`environment` of a server that is given `QUICK_FLAGS`."""
    path = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def quicken() -> None:
    """One thread, ``triton.language`` is set up once for the process, and types are made once.

    Tiny matrices gain nothing from threads, which wait for each other where the cores are shared.
    Triton's interpreter would set up anew for every function that a kernel calls, undo it after
    every launch, and make a table of types for every value, and a shape's constants. Nothing is
    compiled in this process, which would need the language as it was.
    """
    torch.set_num_threads(1)
    import vllm.triton_utils  # noqa: F401  In this order: it installs the CPU backend.
    from triton.runtime import interpreter

    if getattr(interpreter, "is_quick", False):
        return
    interpreter.is_quick = True
    stock, modules, done = interpreter._patch_lang, set[int](), set[frozenset[str]]()
    language = (interpreter.tl, interpreter.tl.core)

    def patch_lang(fn: Any) -> Any:
        values = fn.__globals__
        if id(values) not in modules:
            modules.add(id(values))
            held = set(map(id, values.values()))
            found = frozenset(each.__name__ for each in language if id(each) in held)
            if found not in done:
                done.add(found)
                stock(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang
    stock_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(dtype: Any) -> Any:
        if isinstance(dtype, interpreter.tl.pointer_type):
            return stock_dtype(dtype)
        # A block's is that of its values.
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = stock_dtype(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = np_dtype
    _remember_shapes(interpreter.tl.core)
    quick_semantics.install(interpreter)


def _remember_shapes(core: Any) -> None:
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

    core.tensor.__init__, core.block_type.__init__ = tensor, block_type
