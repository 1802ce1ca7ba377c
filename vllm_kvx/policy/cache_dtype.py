"""KV cache dtypes that policies run over, and how a name says that one changes answers."""

# The policy without a part: stock attention over all entries.
FULL = "full"
# Whose entries are stored as they are, whatever scales a checkpoint has.
UNSCALED = ("bfloat16", "float16")
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
# `auto` takes the checkpoint's type.
KV_CACHE_DTYPES = ("auto", *UNSCALED, *FP8)
_LOSSLESS = (None, "auto", *UNSCALED)


def at_dtype(dtype: str | None) -> str:
    """What a policy's name has behind it over such a KV cache: `@fp8`; see `dtype_name`."""
    name = dtype_name(dtype)
    return f"@{name}" if name else ""


def dtype_name(dtype: str | None) -> str:
    """What names and records call such a KV cache: `fp8`.

    Nothing for 16-bit ones, which are taken as lossless, and for `auto`: see `dtype_of_engine`.
    """
    if dtype is None or dtype in _LOSSLESS:
        return ""
    return "fp8" if dtype == "fp8_e4m3" else dtype


def split_dtype(name: str) -> tuple[str, str | None]:
    """Policy and KV cache dtype of a name; None where it leaves that to the engine."""
    policy, _, dtype = name.partition("@")
    return policy, dtype or None
