"""What a run asks where its options do not say."""

import argparse
from collections.abc import Mapping
from typing import Any

DEFAULTS = {"tasks": ["generated"], "lengths": [4096, 16384]}
# By `--quick`: of the demo checkpoint (tests/checkpoints/lookup-8l), which answers one format, and
# of any other model.
_QUICK_DEMO = {"tasks": ["notes_3"], "lengths": [1024], "samples": 6}
# Longer than the least that a policy keeps by default (kv_floor), so that it drops something.
_QUICK = {"tasks": ["one_number"], "lengths": [1024], "samples": 6}
# The key of the demo checkpoint's configuration, however its weights were trained.
_DEMO_KEY = "fe7e900c879b6cd71bf234fd56ce4610"


def quick_defaults(config_key: str) -> Mapping[str, Any]:
    """What `--quick` stands for, of a model with this key of its configuration."""
    return _QUICK_DEMO if config_key == _DEMO_KEY else _QUICK


def set_defaults(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Sets the options that are not given."""
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
