"""Triton's interpreter on CPU, made several times faster."""

from typing import Any

import torch


def quicken() -> None:
    """One thread, and ``triton.language`` is set up once for the process.

    Tiny matrices gain nothing from threads, which wait for each other where the cores are shared.
    Triton's interpreter would set up anew for every function that a kernel calls, undo it after
    every launch, and make a table of types for every value. Nothing is compiled in this process,
    which would need the language as it was.
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
