"""Whether vLLM and vllm-kvx take the flags: the checks that a server makes before its engine."""

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

from vllm_kvx.config.cache_dtype import dtype_of_engine
from vllm_kvx.config.drafts import DRAFTS_KEY
from vllm_kvx.config.settings import AUTO_KEY, POLICY_KEY
from vllm_kvx.policy.cache_dtype import dtype_in
from vllm_kvx.tools.doctor.asked import layers_for, with_auto
from vllm_kvx.tools.doctor.asked_sizes import sizes_of
from vllm_kvx.tools.doctor.findings import Context, Finding, Request, note, ok, problem, reason
from vllm_kvx.tools.doctor.machine import CPU_ADVICE

# What refusals ask for that `vllm-kvx serve` sets on a CPU.
_SETS_ON_CPU = "KVX_CPU=1", "--enforce-eager", "--dtype float32", "--block-size"


def flags(context: Context) -> Iterator[Finding]:
    """Makes the server's configuration from the flags, up to where an engine would start."""
    from vllm_kvx import plugin

    request = context.request
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            engine_args = _engine_args(request, str(context.directory))
    except SystemExit:
        lines = said.getvalue().strip().splitlines()
        yield problem(f"vllm serve does not take these flags: {_message(lines)}")
        return
    except Exception as error:
        yield problem(f"vllm serve does not take these flags: {reason(error)}")
        return
    config = dict(engine_args.additional_config or {})
    context.kv_cache_dtype, context.sizes = dtype_in(vars(engine_args)), sizes_of(engine_args)
    try:
        # In place of `auto`; the server itself chooses below, by all of its flags.
        context.additional_config = with_auto(context, config)
        # Doctor does not measure; the server would, which takes the weights.
        engine_args.additional_config = {**config, **layers_for(context, context.additional_config)}
        context.vllm_config = _engine_config(engine_args)
        context.kv_cache_dtype = dtype_of_engine(context.vllm_config)
        # What the server has put there: the policy that `auto` is, and how --speculative-config
        # has the model draft.
        made = context.vllm_config.additional_config
        found = {key: made[key] for key in (AUTO_KEY, DRAFTS_KEY) if made.get(key) is not None}
        if AUTO_KEY in found:
            found[POLICY_KEY] = made[POLICY_KEY]
        if found:
            context.additional_config = config = {**config, **found}
    except Exception as error:  # vLLM's own checks raise what they like.
        refusals = str(error).strip() or type(error).__name__
        is_ours = _is_ours(refusals)
        mends = context.is_cpu and any(each in refusals for each in _SETS_ON_CPU)
        mend = CPU_ADVICE if is_ours and mends else ""
        yield problem(refusals if is_ours else f"vLLM refuses: {refusals}", mend)
        return
    if config.get(POLICY_KEY) is not None and not plugin.is_loaded():
        yield problem(
            f"vLLM takes these flags and ignores {POLICY_KEY}: it has not loaded the plugin",
            "see `plugins`",
        )
    elif config.get(POLICY_KEY) is None:
        yield ok("vLLM takes these flags")
        yield from _without_policy(context.vllm_config)
    else:
        yield ok(f"vLLM takes these flags, and --kv-policy {config[POLICY_KEY]} runs with them")
        yield from _media(context.vllm_config)


def _media(vllm_config: Any) -> Iterator[Finding]:
    """Whether images are served, of a model that reads them."""
    from vllm_kvx.server.text_alone import why_text_alone

    if (why := why_text_alone(vllm_config)) is not None:
        yield note(f"images, audio and video would be refused: {why}")
    elif vllm_config.model_config.supports_multimodal_inputs:
        yield ok("images, audio and video are served as by stock vLLM")


def _engine_args(request: Request, directory: str) -> Any:
    """The engine's arguments, as `vllm serve` reads them from its command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    # Of the command's own module: where it has them from differs between releases.
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    # Of a hub's model the snapshot in the cache is taken: nothing is asked for over the network.
    args = parser.parse_args([directory, *_serve_args(request)])
    args.model = args.model_tag
    validate_parsed_serve_args(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    return engine_args


def _serve_args(request: Request) -> list[str]:
    """The server's flags: those that doctor reads too, and the others."""
    found = ["--tensor-parallel-size", str(request.ranks), *request.serve_args]
    if request.additional_config:
        found += ["--additional-config", json.dumps(request.additional_config)]
    if request.policy is not None:
        found += ["--kv-policy", request.policy]
    if request.layout is not None:
        found += ["--kv-layout", *request.layout]
    if request.request_policies is not None:
        found += ["--kv-request-policies", request.request_policies]
    return found


def _engine_config(engine_args: Any) -> Any:
    from vllm.usage.usage_lib import UsageContext

    return engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def _without_policy(vllm_config: Any) -> Iterator[Finding]:
    """What would keep policies from running beside these flags."""
    from vllm_kvx.server.start_checks import ALWAYS
    from vllm_kvx.server.start_refusal import applying, told
    from vllm_kvx.server.validate import machinery_rows

    problems = told([*applying(ALWAYS, vllm_config), *machinery_rows(vllm_config)])
    if not problems:
        yield ok("policies run with them too")
        return
    yield note(
        "a KV policy could not run with these flags:" + "".join(f"\n- {each}" for each in problems)
    )


def _message(lines: list[str]) -> str:
    """What argparse said, without the usage before it."""
    return lines[-1].partition("error: ")[2] or lines[-1] if lines else "it ended"


def _is_ours(message: str) -> bool:
    """Whether the message tells by itself that a KV policy is refused."""
    return "KV policy" in message or POLICY_KEY in message
