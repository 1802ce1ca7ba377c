"""Puts what the code says of policies and keys into the chart's ``values.schema.json``.

    python -m deploy.schema

The chart takes no `auto`: its volumes and limits are made for a policy. The rest of that file is
written by hand. ``tests/deployment`` fails where the two differ.
"""

import json
from typing import Any

from benchmarks.common.server import ROOT
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.schema import POLICY, POLICY_AT_DTYPE, definitions
from vllm_kvx.tools.policies.schema import ADDITIONAL_CONFIG, additional_config

PATH = ROOT / "deploy" / "helm" / "values.schema.json"


def generated(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, of the chart's values, with what is made from the code as it is now."""
    by_hand = {
        name: each
        for name, each in schema.get("definitions", {}).items()
        if name != ADDITIONAL_CONFIG and not name.startswith(POLICY)
    }
    made = {ADDITIONAL_CONFIG: additional_config(takes_auto=False), **definitions()}
    measured = [name for name, method in METHODS.items() if method.to_measure is not None]
    properties = schema["properties"]
    policy = {"$ref": f"#/definitions/{POLICY}"}
    prepare = properties["prepare"]["properties"]
    return schema | {
        "properties": properties
        | {
            "policy": policy,
            "layout": {"type": "array", "items": policy},
            "additionalConfig": {"$ref": f"#/definitions/{ADDITIONAL_CONFIG}"},
            "prepare": properties["prepare"]
            | {
                "properties": prepare
                | {
                    "calibrate": prepare["calibrate"] | {"items": {"enum": measured}},
                    "evaluate": {
                        "type": ["array", "null"],
                        "items": {"$ref": f"#/definitions/{POLICY_AT_DTYPE}"},
                    },
                }
            },
        },
        "definitions": by_hand | made,
    }


def text() -> str:
    """What the file should hold."""
    return json.dumps(generated(json.loads(PATH.read_text())), indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
