"""KV cache dtypes that policies run over, and how a name says that one changes answers."""

KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")

# Of these, whose entries are stored as they are, whatever scales a checkpoint has; `auto` takes the
# checkpoint's type.
UNSCALED = ("bfloat16", "float16")


def at_dtype(dtype: str | None) -> str:
    """What a policy's name has behind it over a cache of this dtype: `@fp8`.

    Nothing where entries are as wide as the model computes them: those answers are its own. `auto`
    is taken for such a one; engines say what it came to.
    """
    if dtype in (None, "auto", *UNSCALED):
        return ""
    return "@fp8" if dtype == "fp8_e4m3" else f"@{dtype}"


def split_dtype(name: str) -> tuple[str, str | None]:
    """Policy and KV cache dtype of a name; None where it leaves that to the engine.

    Raises:
        ValueError: there is no such dtype, or policies do not run over it.
    """
    policy, at, dtype = name.partition("@")
    if at and dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"{name!r}: {dtype!r} is no KV cache dtype that policies run over: write one of "
            f"{', '.join(KV_CACHE_DTYPES)} behind the @"
        )
    return policy, dtype or None
