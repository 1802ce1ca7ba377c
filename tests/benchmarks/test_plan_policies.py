"""Policies that plans name: a slip in one would cost a step its machine."""

import argparse
from collections.abc import Sequence

import pytest

from benchmarks.common.names import split_name
from benchmarks.common.node import PLANS, Step, read_plan
from benchmarks.engine import compare, own_drafts, ranks
from benchmarks.engine.shapes import SHAPES
from benchmarks.serving import load as serving
from benchmarks.serving import within
from vllm_kvx import cli
from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.policy import KVPolicy, with_retrieval
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.evaluate.groups import read_policies

VALUES = {"out": "OUT", "models": "MODELS", "commit": "c"}
# Of the checkpoints that plans name: how a folder's name ends, and layers.
LAYERS = {"1.5b": 28, "1.5b-131k": 28, "0.5b": 24, "135m": 30}
NAMES = sorted(file.stem for file in PLANS.glob("*.toml"))
STARTS_SERVERS = {
    "benchmarks.engine.compare": compare.parse_args,
    "benchmarks.engine.ranks": ranks.parse_args,
    "benchmarks.engine.own_drafts": own_drafts.parse_args,
    "benchmarks.serving": serving.parse_args,
    "benchmarks.serving.within": within.parse_args,
}


def steps_of(name: str) -> list[tuple[Step, str, list[str]]]:
    """Every step of a plan with its module and arguments."""
    found = []
    for step in read_plan(name):
        module, *arguments = step.words(1200, VALUES)[2:]
        found.append((step, module, arguments))
    return found


def layers_of(model: str) -> int:
    ends = (layers for end, layers in LAYERS.items() if model.endswith(f"-{end}"))
    return SHAPES[model].layers if model in SHAPES else next(ends)


def check_server(names: Sequence[str], layers: int) -> None:
    """Raises PolicyError if no server of so many layers has room for all of these policies."""
    policies = [with_retrieval(parse_policy(name)) for name in names]
    for policy in policies:
        policy.check_composition()
        policy.check_model(layers)
    layout_of(policies, layers)


def servers_in(module: str, args: argparse.Namespace) -> list[list[str]]:
    """The policies that each server of a step has room for, its own first."""
    names = args.engines if module.endswith("compare") else args.servers
    others = list(getattr(args, "layout", []))
    servers = []
    for name in names:
        server, _, drafts = name.partition("/")
        policy, _ = split_name(server)
        if policy is not None:
            # What drafts has an index of its own: it is served by itself.
            servers.append([policy, *others])
        if drafts and not drafts.startswith("ngram"):
            servers.append([drafts.rpartition("x")[0]])
    return servers


@pytest.mark.parametrize("name", NAMES)
def test_policies_are_served_by_the_model(name: str) -> None:
    for _, module, arguments in steps_of(name):
        if module == "vllm_kvx.cli":
            evaluated = cli.parser().parse_args(arguments)
            policies = read_policies(evaluated.policies, layers_of(evaluated.model))
            assert all(isinstance(policy, KVPolicy) for policy in policies.values())
        elif module in STARTS_SERVERS:
            args = STARTS_SERVERS[module](arguments)
            for server in servers_in(module, args):
                check_server(server, layers_of(str(args.model)))


@pytest.mark.parametrize("name", NAMES)
def test_requests_name_policies_that_servers_have_room_for(name: str) -> None:
    for step, module, arguments in steps_of(name):
        if module not in ("benchmarks.engine.compare", "benchmarks.engine.ranks"):
            continue
        args = STARTS_SERVERS[module](arguments)
        cases = [str(case) for case in args.cases]
        asked = {case.partition("@")[2] for case in cases} - {""}
        alone = {policy for policy in asked if "+" not in policy} - {*args.layout, "full"}
        assert not alone, step.name


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_was_cut_off_goes_on(name: str) -> None:
    """The second time, `benchmarks.engine.compare` would write over what the first one measured."""
    for step, module, arguments in steps_of(name):
        if module == "benchmarks.engine.compare":
            assert compare.parse_args(arguments).resume, step.name
