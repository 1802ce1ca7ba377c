"""The models of a run: the one in question and, beside a tuned one, the original."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_kvx.config.policy_layers import slides_by_config
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.evaluate.groups import read_policies
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.tasks.base import Sample
from vllm_kvx.tools.tasks.prompts import encode

# What tokenizers of one vocabulary split differently, if anything: numbers, code, other scripts.
_PROBE = Sample("In 1865, x_1 = 3.14159;\n\treturn {'naïve': [10**6]}  # 你好 Ωmega, don't!", ())


@dataclass(frozen=True)
class Model:
    """A model that is asked.

    source: directory or hub name. text_config: transformers' own of what reads text, of any
    architecture: the engine says which it serves. rows: the policies that it is asked under, by the
    report's rows.
    """

    source: str
    revision: str | None
    text_config: Any
    rows: Mapping[Row, KVPolicy]

    @cached_property
    def identity(self) -> ModelIdentity:
        """What its records are found by."""
        return ModelIdentity(self.source, self.text_config.to_dict(), self.revision)

    @cached_property
    def key(self) -> str:
        """The key of its weights, as far as they were here when the run began."""
        return self.identity.key

    @property
    def name(self) -> str:
        """What results call the model: its hub name, or its directory's last part."""
        return Path(self.source).name if Path(self.source).is_dir() else self.source


def models_of(args: argparse.Namespace) -> list[Model]:
    """The model that the command names, last; before it the original, if it has one.

    Raises:
        ToolError: one has no configuration that is served, or their depths differ.
        PolicyError: a policy cannot run on them.
    """
    config = load_config(args.model, args.revision, supported=None)
    layers = config.num_hidden_layers
    policies = read_policies(args.policies, layers, slides_by_config(config))
    model = Model(args.model, args.revision, config, policies)
    if args.original is None:
        return [model]
    config = load_config(args.original, args.original_revision, supported=None)
    if (found := config.num_hidden_layers) != layers:
        raise ToolError(
            f"{args.original} has {found} layers and {args.model} {layers}: "
            "--original is the model whose weights were tuned"
        )
    rows = {row.of_original(): policy for row, policy in policies.items()}
    return [Model(args.original, args.original_revision, config, rows), model]


def check_tokenizers(model: Any, original: Any) -> None:
    """Raise ToolError unless both tokenizers make the same tokens of a prompt, template included.

    model, original: tokenizers of transformers, fast ones.
    """
    differ = set(model.get_vocab().items()) ^ set(original.get_vocab().items())
    if differ:
        count = len({token for token, _ in differ})
        what = f"their vocabularies differ in {count} token{'s' * (count > 1)}"
    elif encode(_PROBE, model).token_ids != encode(_PROBE, original).token_ids:
        what = "their chat templates, special tokens or rules of splitting differ"
    else:
        return
    raise ToolError(
        f"{model.name_or_path} and {original.name_or_path} tokenize differently ({what}): to be "
        "asked the same questions both need the tokenizer files of the original"
    )
