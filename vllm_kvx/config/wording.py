"""Messages that name flags and bodies, in the words of those who use vLLM's ``LLM`` in Python."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

_END = r"(?=[,;:.)]*(?:\s|$))"
_POLICIES = re.compile(rf"--kv-policy ([a-z]\S*?){_END}(?: --kv-layout ([a-z]\S*?){_END})?")
_LAYOUT = re.compile(rf"--kv-layout ([a-z]\S*?){_END}")
_CONFIG = re.compile(r"--additional-config '([^']*)'")
_OURS = re.compile(r"--(kv-(?:policy|layout|request-policies))(?![a-z-])")
_FLAG = r"--([a-z][a-z-]*[a-z])"
_ADDED = re.compile(rf"\badd {_FLAG}")
_SET = re.compile(rf"\bset {_FLAG} (?!to\b|and\b|or\b|\()(?:'([^']*)'|(\S+?){_END})")
_OTHER = re.compile(rf"(?<![\w-]){_FLAG}")


@contextmanager
def worded(for_python: bool) -> Iterator[None]:
    """Within, messages of ValueErrors and RuntimeErrors are as `in_python` says, if `for_python`.

    They stay the exceptions that they are.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if for_python and error.args and isinstance(error.args[0], str):
            error.args = (in_python(error.args[0]), *error.args[1:])
        raise


def in_python(message: str) -> str:
    """`message`, where flags are arguments of ``LLM`` and ``vllm_xargs`` are ``extra_args``.

    What stands between backticks is a command line, and stays one.
    """
    parts = message.split("`")
    return "`".join(part if i % 2 else _in_python(part) for i, part in enumerate(parts))


def _in_python(text: str) -> str:
    text = _CONFIG.sub(r"additional_config=\1", text)
    text = _POLICIES.sub(lambda match: _config(match[1], match[2]), text)
    text = _LAYOUT.sub(lambda match: _config(None, match[1]), text)
    text = _OURS.sub(lambda match: f"{match[1].replace('-', '_')} in additional_config", text)
    text = text.replace("--additional-config", "additional_config")
    text = _ADDED.sub(lambda match: f"set {_argument(match[1])}=True", text)
    text = _SET.sub(lambda match: f"set {_argument(match[1])}={match[2] or match[3]}", text)
    text = _OTHER.sub(lambda match: _argument(match[1]), text)
    return text.replace("vllm_xargs", "extra_args")


def _argument(flag: str) -> str:
    return flag.replace("-", "_")


def _config(policy: str | None, layout: str | None) -> str:
    keys = {"kv_policy": policy, "kv_layout": None if layout is None else [layout]}
    given = {key: value for key, value in keys.items() if value is not None}
    return f"additional_config={json.dumps(given)}"
