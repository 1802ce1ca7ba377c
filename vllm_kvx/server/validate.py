"""Makes a finished vLLM configuration one that runs the policy, or says why it cannot."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvx import __version__
from vllm_kvx.config.cache_dtype import dtype_of_engine
from vllm_kvx.config.drafts import DRAFTS_KEY
from vllm_kvx.config.settings import (
    AUTO_KEY,
    LAYOUT_KEY,
    POLICY_KEY,
    KVSettings,
    policy_is_set,
)
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.auto_policy import (
    MEASURED,
    as_judged,
    asks_for_auto,
    check_choice,
    line_of,
    with_choice,
)
from vllm_kvx.server.connector_checks import (
    WITHOUT_WHOLE_PROMPTS,
    beside_connectors,
)
from vllm_kvx.server.draft_checks import WITH_DRAFTS, WITH_OWN_DRAFTS
from vllm_kvx.server.evaluation_notice import EvaluationNotice
from vllm_kvx.server.int8_cache import FULL_OVER_INT8, OVER_INT8, beside_int8, is_int8
from vllm_kvx.server.lookahead_checks import WITH_LOOKAHEAD
from vllm_kvx.server.measured_layers import find_measured, parts_of
from vllm_kvx.server.model_checks import WITH_PROPAGATION, beside_sliding_layers
from vllm_kvx.server.pipeline_checks import where_rows_leave
from vllm_kvx.server.retrieval_checks import block_size_problems, ops_problems, stock_block_size
from vllm_kvx.server.script_check import OF_SCRIPT
from vllm_kvx.server.skipped_layers import beside_skipped_layers, beside_stock
from vllm_kvx.server.skipped_layers import line_of as line_of_cache
from vllm_kvx.server.start_checks import (
    ALWAYS,
    WITH_PARTIAL_PREFIXES,
    WITH_POLICY,
    WITH_RETENTION,
    WITH_RETRIEVAL,
    WITH_SELECTION,
    WITH_VALUE_NORMS,
)
from vllm_kvx.server.start_refusal import Refusal, applying, asked_connector, told
from vllm_kvx.server.tuned_weights_notice import TunedWeightsNotice

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's own worker, as its platforms set it -> ours.
WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm_kvx.worker.worker.PolicyWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_kvx.worker.cpu_worker.CPUPolicyWorker",
}
SCHEDULER = "vllm_kvx.cache.scheduler.PolicyScheduler"
ASYNC_SCHEDULER = "vllm_kvx.cache.scheduler.AsyncPolicyScheduler"


def prepare_engine_config(vllm_config: "VllmConfig", in_python: bool = False) -> "VllmConfig":
    """Sets scheduler, worker and request check for the policy in ``additional_config``.

    in_python: whether the engine's requests come from Python, not over HTTP.
    Returns `vllm_config`, changed in place.

    Raises:
        PolicyError: the policy does not parse, is not served or does not suit the model.
        ValueError: the configuration asks for what does not work under a policy yet; the message
            names every such setting and what to change.
    """
    config: Any = vllm_config.additional_config
    if not policy_is_set(config):
        return vllm_config
    identity = identity_of(vllm_config)
    if asks_for_auto(config):
        # Not in place: in Python it is the caller's, who may start other models with it.
        config = with_choice(config, identity, functools.partial(_why_not, vllm_config))
        vllm_config.additional_config = config
    check_choice(config)
    rows = applying(ALWAYS, vllm_config)
    rows += applying(OF_SCRIPT, vllm_config) if in_python else []
    alone = is_full_alone(config)
    rows += applying(FULL_OVER_INT8, vllm_config) if alone else machinery_rows(vllm_config)
    known = list(rows)
    if any(part.unmeasured is not None for part in parts_of(config)):
        # What is measured is where tokens leave, by scores of keys.
        parts = (*WITH_PARTIAL_PREFIXES, *WITHOUT_WHOLE_PROMPTS, *WITH_DRAFTS)
        known += applying(
            (*WITH_RETENTION, *WITH_PROPAGATION, *WITH_SELECTION, *parts), vllm_config
        )
    try:
        # Measuring may take minutes, which a server that cannot run need not spend.
        sources = find_measured(vllm_config, identity, may_measure=not known)
        settings = KVSettings.from_vllm_config(vllm_config)
    except PolicyError:
        # A policy that suits the model, or a layer of it, is of no use where the model is refused.
        if not known:
            raise
        raise cannot_run(config[POLICY_KEY], told(known)) from None
    assert settings is not None
    if settings.stock:
        others = beside_stock(vllm_config)
    else:
        more, others = _layout_problems(vllm_config, settings)
        rows += more
    if problems := told(rows) + others:
        raise cannot_run(settings.policy, problems)
    if not settings.stock:
        scheduler_config = vllm_config.scheduler_config
        scheduler_config.scheduler_cls = (
            ASYNC_SCHEDULER if scheduler_config.async_scheduling else SCHEDULER
        )
        parallel_config = vllm_config.parallel_config
        parallel_config.worker_cls = WORKERS[parallel_config.worker_cls]
    _add_request_check(vllm_config, settings, in_python)
    parallel_config = vllm_config.parallel_config
    # Of several API server processes only their parent, of rank -1, speaks.
    if parallel_config._api_process_count == 1 or parallel_config._api_process_rank < 0:
        if config.get(AUTO_KEY) is not None:
            _log_choice(config[AUTO_KEY])
        _log(settings, sources)
        _log_cache(vllm_config)
        _log_answers(identity, settings)
        _log_short_chunks(vllm_config, settings)
    return vllm_config


def identity_of(vllm_config: "VllmConfig") -> ModelIdentity:
    """The model of a configuration, which what was measured of it is found by."""
    model = vllm_config.model_config
    config = model.hf_text_config.to_dict()
    # A language model in another may not say what it is.
    config["architectures"] = config.get("architectures") or model.hf_config.architectures
    return ModelIdentity(model.model, config, model.revision, dtype_of_engine(vllm_config))


def is_full_alone(config: Any) -> bool:
    """Whether all policies in ``additional_config`` are ``full``, or one does not parse.

    Not where the model drafts for itself by another. Of `auto` it is not known yet, and they are
    not.
    """
    if config.get(DRAFTS_KEY) is not None or asks_for_auto(config):
        return False
    return all(policy.is_full for policy in named_policies(config))


def named_policies(config: Any) -> list[KVPolicy]:
    """Those in ``additional_config``, the server's own first; none where one does not parse."""
    try:
        return [parse_policy(config[POLICY_KEY]), *map(parse_policy, config.get(LAYOUT_KEY, ()))]
    except (PolicyError, TypeError):  # Its own error comes when settings are made of it.
        return []


def _why_not(vllm_config: "VllmConfig", name: str) -> str | None:
    """Why a server with this configuration cannot run the policy `name`; None if it can.

    It measures no layer: a policy with one that is not known cannot run. `vllm_config` stays as it
    is.
    """
    cache = vllm_config.cache_config
    config: Any = vllm_config.additional_config
    before = cache.block_size, cache.user_specified_block_size
    vllm_config.additional_config = as_judged(config, name)
    try:
        rows = [*applying(ALWAYS, vllm_config), *machinery_rows(vllm_config)]
        settings = KVSettings.from_vllm_config(vllm_config)
        assert settings is not None
        more, others = _layout_problems(vllm_config, settings)
        problems = told([*rows, *more]) + others
    except ValueError as error:
        problems = [str(error)]
    finally:
        vllm_config.additional_config = config
        cache.block_size, cache.user_specified_block_size = before
    return "; ".join(problems) or None


def cannot_run(policy: object, problems: list[str]) -> ValueError:
    """The error that names everything to change before a server can run `policy`."""
    return ValueError(
        f"KV policy {policy} cannot run in this configuration:"
        + "".join(f"\n  - {problem}" for problem in problems)
    )


def _layout_problems(
    vllm_config: "VllmConfig", settings: KVSettings
) -> tuple[list[Refusal], list[str]]:
    """What keeps the layout's policies, by what each kind needs: rows of tables, and other reasons.

    May set the size of KV blocks, see `block_size_problems`.
    """
    layout = settings.layout
    problems: list[str] = []
    rows: list[Refusal] = []
    if layout.retain or layout.window or layout.sidecar:
        rows += applying(WITH_RETENTION, vllm_config)
    problems += beside_skipped_layers(vllm_config, settings)
    if is_int8(vllm_config):
        rows += applying(OVER_INT8, vllm_config)
        problems += beside_int8(settings)
    if layout.propagates:
        rows += applying(WITH_PROPAGATION, vllm_config)
        problems += beside_sliding_layers(settings)
        problems += where_rows_leave(vllm_config, settings)
    if not layout.shares_whole_prefixes:
        rows += applying(WITH_PARTIAL_PREFIXES, vllm_config)
    if not layout.keeps_prompts:
        rows += applying(WITHOUT_WHOLE_PROMPTS, vllm_config)
    if asked_connector(vllm_config):
        problems += dict.fromkeys(filter(None, map(beside_connectors, settings.policies)))
    if layout.value_norms:
        rows += applying(WITH_VALUE_NORMS, vllm_config)
    if layout.drafts:
        rows += applying(WITH_DRAFTS, vllm_config)
    if layout.own_drafts:
        rows += applying(WITH_OWN_DRAFTS, vllm_config)
    if layout.lookahead:
        rows += applying(WITH_LOOKAHEAD, vllm_config)
    for check in layout.checks:
        problems += dict.fromkeys(filter(None, map(check, settings.policies)))
    if layout.selects:
        rows += applying(WITH_SELECTION, vllm_config)
    if layout.sidecar is not None:
        rows += applying(WITH_RETRIEVAL, vllm_config)
        problems += ops_problems()
        problems += block_size_problems(
            vllm_config, layout.sidecar.group, stock_block_size(vllm_config)
        )
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    if layout.window > budget:
        behind = any(policy.num_generated or policy.lookahead for policy in settings.policies)
        parts = "window=, and after= or lookahead= with it," if behind else "window="
        problems.append(
            f"a window of {layout.window} tokens does not fit into a step: set "
            f"--max-num-batched-tokens to at least {layout.window}, or {parts} to at most {budget}"
        )
    return rows, problems


def machinery_rows(vllm_config: "VllmConfig") -> list[Refusal]:
    """What keeps any policy but `full` from running in this configuration, whatever it is."""
    rows = applying(WITH_POLICY, vllm_config)
    worker_cls = vllm_config.parallel_config.worker_cls
    if worker_cls not in WORKERS:
        # vLLM's own is that of another platform, which no flag has asked for.
        instead = "drop --worker-cls"
        if worker_cls.startswith("vllm."):
            instead = "serve on one of these, or drop the KV policy"
        reason = (
            "KV policies bring their own worker, for CUDA and CPU, and cannot extend "
            f"{worker_cls}: {instead}"
        )
        rows.append(Refusal(lambda _: True, reason))
    return rows


def _add_request_check(vllm_config: "VllmConfig", settings: KVSettings, in_python: bool) -> None:
    from vllm_kvx.server.request_check import class_path

    model = vllm_config.model_config
    hands_over = asked_connector(vllm_config) is not None
    check = class_path(settings, str(model.served_model_name), in_python, hands_over)
    model.logits_processors = [*(model.logits_processors or []), check]


def _log_cache(vllm_config: "VllmConfig") -> None:
    from vllm.logger import init_logger

    if (line := line_of_cache(vllm_config)) is not None:
        init_logger("vllm.kvx").info("%s", line)


def _log_choice(choice: Mapping[str, Any]) -> None:
    """Which policy `auto` stands for on this server: a warning where nobody measured it."""
    from vllm.logger import init_logger

    logger = init_logger("vllm.kvx")
    (logger.info if choice["source"] == MEASURED else logger.warning)("%s", line_of(choice))


def _log_answers(identity: ModelIdentity, settings: KVSettings) -> None:
    """What is known of the answers: how the weights were tuned, and what evaluations found."""
    from vllm.logger import init_logger

    logger = init_logger("vllm.kvx")
    tuned_weights_notice = TunedWeightsNotice(identity, settings.num_layers)
    evaluation_notice = EvaluationNotice(identity)
    lines = tuned_weights_notice.lines(settings.policies)
    lines += evaluation_notice.lines(settings.policies)
    for line, is_well in lines:
        (logger.info if is_well else logger.warning)("KV policy %s", line)
    drafters = () if settings.drafts is None else (settings.drafts.policy,)
    for policy in (*settings.policies, *drafters):
        for part in policy.parts:
            if notice := part.notice(settings.num_layers):
                logger.warning("KV policy %s: %s", policy, notice)


def _log_short_chunks(vllm_config: "VllmConfig", settings: KVSettings) -> None:
    from vllm.logger import init_logger

    longest = vllm_config.scheduler_config.long_prefill_token_threshold
    window = settings.layout.window
    if 0 < longest < window:
        init_logger("vllm.kvx").warning(
            "--long-prefill-token-threshold %d cuts prompts into chunks shorter than a window of "
            "%d tokens, which few prompts may spread at once; the others wait: set it to at least "
            "%d.",
            longest,
            window,
            window,
        )


def _log(settings: KVSettings, sources: list[str]) -> None:
    from vllm.logger import init_logger

    # A child of vLLM's logger, so that it is formatted and filtered as the rest of the log.
    logger = init_logger("vllm.kvx")
    policy = settings.policy
    if settings.stock:
        logger.info(
            "vllm-kvx %s: KV policy full: stock vLLM; requests may name no other policy.",
            __version__,
        )
        return
    logger.info(
        "vllm-kvx %s: KV policy %s on %d layers: %s. Requests may name %s.",
        __version__,
        policy,
        settings.num_layers,
        settings.layout,
        settings.names_allowed(),
    )
    for source in sources:
        logger.info(source)
