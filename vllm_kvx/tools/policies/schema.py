"""JSON schemas of what users write: policies, ``additional_config``, lines of batch files.

Made from the code that reads these, so that an editor, a chart or a pipeline refuses what a server
would refuse, without one. Draft 7, which Helm takes; patterns are what Python, JavaScript and RE2
share. ``policy.schema`` says what of a policy's name a schema leaves to `parse_policy`.
"""

from collections.abc import Collection, Sequence
from typing import Any

from vllm_kvx.config.disabled import DISABLE_KEY, PARTS
from vllm_kvx.config.drafts import DRAFTS_KEY
from vllm_kvx.config.measured import MEASURED_KEY, MEASUREMENTS
from vllm_kvx.config.settings import (
    AUTO_KEY,
    DEBUG_KEY,
    EVICTION_KEY,
    EVICTIONS,
    KEYS,
    LAYOUT_KEY,
    RECALL_KEY,
    REQUEST_POLICIES,
    REQUESTS_KEY,
    SHARE_KEY,
    SHARES,
    STASH_KEY,
    TEXT_ALONE_KEY,
)
from vllm_kvx.config.spelling import POLICY_KEY, VLLM_KEYS
from vllm_kvx.policy.auto import PATTERN as AUTO_PATTERN
from vllm_kvx.policy.axes import WINDOW_REDUCTIONS
from vllm_kvx.policy.schema import POLICY, SERVED, definitions
from vllm_kvx.tools.batch.lines import URLS, XARGS

DRAFT = "http://json-schema.org/draft-07/schema#"
ADDITIONAL_CONFIG, BATCH_LINE = "additionalConfig", "batchLine"

_POLICY: dict[str, Any] = {"$ref": f"#/definitions/{SERVED}"}
_AUTO = {"type": "string", "pattern": AUTO_PATTERN}
_QUOTES = "in quotes: YAML reads on and off as true and false"


def document() -> dict[str, Any]:
    """A schema of policies; under ``definitions`` those of `ADDITIONAL_CONFIG` and `BATCH_LINE`."""
    others = {ADDITIONAL_CONFIG: additional_config(), BATCH_LINE: _batch_line()}
    every = {"$ref": f"#/definitions/{POLICY}"}
    return {"$schema": DRAFT, "definitions": definitions() | others, "allOf": [every]}


def additional_config(takes_auto: bool = True) -> dict[str, Any]:
    """Our keys of ``additional_config`` and their values; others' keys pass, unlike near misses.

    It uses the definitions of ``policy.schema``.

    takes_auto: whether the server's policy may be `auto`.
    """
    measured: dict[str, Any] = {}
    for measurement in MEASUREMENTS:
        measured[measurement.parameter] = {"type": "integer", "minimum": 0}
        if measurement.reduction:
            measured[measurement.reduction] = {"enum": list(WINDOW_REDUCTIONS)}
        if measurement.rate:
            measured[measurement.rate] = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    values: dict[str, dict[str, Any]] = {
        POLICY_KEY: _or_null({"anyOf": [_AUTO, _POLICY]} if takes_auto else _POLICY),
        LAYOUT_KEY: {"type": "array", "items": _POLICY},
        REQUESTS_KEY: {"enum": list(REQUEST_POLICIES), "description": _QUOTES},
        STASH_KEY: {"type": "integer", "minimum": 1},
        DEBUG_KEY: {"type": "boolean"},
        RECALL_KEY: {"type": "integer", "minimum": 0},
        SHARE_KEY: {"enum": list(SHARES), "description": _QUOTES},
        EVICTION_KEY: {"enum": list(EVICTIONS)},
        DISABLE_KEY: {"type": "array", "items": {"enum": list(PARTS)}},
        MEASURED_KEY: {
            "type": ["object", "null"],
            "properties": measured,
            "additionalProperties": False,
            "description": "internal: the server sets it; write the layer into the policy",
        },
        DRAFTS_KEY: {
            "type": ["object", "null"],
            "properties": {
                "policy": _POLICY,
                "cache_to_weights": {"type": "number", "minimum": 0},
            },
            "required": ["policy", "cache_to_weights"],
            "additionalProperties": False,
            "description": "internal: method kvx of --speculative-config sets it",
        },
        AUTO_KEY: {
            "type": "null",
            "description": "internal: the server sets it where its policy is auto",
        },
        TEXT_ALONE_KEY: {
            "type": "null",
            "description": "internal: the server sets it where it serves a model's text alone",
        },
    }
    properties = {key: values[key] for key in KEYS}
    return {"type": "object", "properties": properties, "propertyNames": _keys(KEYS)}


def _batch_line() -> dict[str, Any]:
    """A line of a batch file, as ``batch.lines`` reads it."""
    xargs = {
        "properties": {POLICY_KEY: _or_null(_POLICY)},
        "propertyNames": _keys((POLICY_KEY,), VLLM_KEYS),
    }
    answered_whole = {"enum": [False, None]}
    properties = {"stream": answered_whole, "background": answered_whole, XARGS: xargs}
    fields = {
        "custom_id": {"type": "string", "minLength": 1},
        "method": {"const": "POST"},
        "url": {"enum": list(URLS)},
        "body": {"type": "object", "properties": properties},
    }
    return {"type": "object", "required": list(fields), "properties": fields}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"not": {"type": "null"}}, "then": schema}


def _keys(names: Sequence[str], others: Collection[str] = ()) -> dict[str, Any]:
    """Keys that are `names`, or do not look like one of ours: begin with ``kv_``, in any case.

    Nor are they one of `names` but for case, hyphens and the like. Misspellings that only a
    comparison of letters finds pass here, and are refused by what reads the keys.

    others: keys that begin like ours and are vLLM's.
    """
    gap = r"[\W_]*"
    spelled = (gap.join(_either_case(name.replace("_", ""))) for name in names)
    alike = f"^({_either_case('k')[0]}{_either_case('v')[0]}[_-]|{gap}({'|'.join(spelled)}){gap}$)"
    return {"anyOf": [{"enum": [*names, *sorted(others)]}, {"not": {"pattern": alike}}]}


def _either_case(letters: str) -> list[str]:
    return [f"[{letter}{letter.upper()}]" for letter in letters]
