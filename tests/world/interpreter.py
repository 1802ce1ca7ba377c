"""Triton's interpreter on CPU, made several times faster."""

from typing import Any

import torch


def quicken() -> None:
    """One thread, and one set-up of ``triton.language`` per kernel launch.

    Tiny matrices gain nothing from threads, which wait for each other where the cores are shared.
    Triton's interpreter would set up anew for every function that a kernel calls.
    """
    torch.set_num_threads(1)
    import vllm.triton_utils  # noqa: F401  In this order: it installs the CPU backend.
    from triton.runtime import interpreter

    stock, done = interpreter._patch_lang, set[int]()

    def patch_lang(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in done:
            return interpreter._LangPatchScope()
        is_launch = not done
        done.add(module)
        scope = stock(fn)
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                done.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang
