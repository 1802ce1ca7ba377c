"""What arguments of several commands may be."""

import argparse
import json
import math
from typing import Any


def positive(text: str) -> int:
    """The argparse type of counts."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def seconds(text: str) -> float:
    """The argparse type of waits, in seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds above 0, got {text}")
    return value


def served_policy(text: str) -> str:
    """The argparse type of policies: the text, if it names one that is served."""
    from vllm_kvx.policy.parameters import PolicyError
    from vllm_kvx.policy.spec import check_served, parse_policy

    try:
        parse_policy(text).check_composition()
        check_served(text)
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def server_policy(text: str) -> str:
    """The argparse type of ``--kv-policy``: a policy, or `auto`, which a server's own may be."""
    from vllm_kvx.policy.auto import is_auto, parse_auto
    from vllm_kvx.policy.parameters import PolicyError

    if not is_auto(text):
        return served_policy(text)
    try:
        parse_auto(text)
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def json_object(text: str) -> dict[str, Any]:
    """The argparse type of JSON objects."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
