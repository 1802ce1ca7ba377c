"""All that vLLM loads: the ``vllm.general_plugins`` entry point.

It adds ``--kv-policy`` to vLLM's engine arguments and looks at the engine configuration that
comes out. Without a policy vLLM's own functions run as they are, and of vllm-kvx little else is
imported: what refuses a request that names a policy all the same, once there is one, and where an
HTTP server's bodies are looked at. With a policy, the version gate comes first: vllm-kvx reaches
into vLLM and is tested with the releases that ``seams`` names. ``KVX_ALLOW_UNTESTED_VLLM=1``
overrides the gate, at the user's risk.
"""

import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_kvx.compat.serve_command import serve_command
from vllm_kvx.compat.wrapping import MARK, wrap_once
from vllm_kvx.errors import refusing

_Function = Callable[..., Any]

_POLICY_KEY = "kv_policy"
# What ``config.drafts`` calls METHOD.
_DRAFTS_ITSELF = "kvx"
# Keys that may be ours or resemble one.
_LIKE_OURS = re.compile("k[^a-z]*v|vk|pol", re.IGNORECASE)

# Whether an engine of this process has a policy; an API server has one engine.
_has_policy = False

_GROUP_HELP = "KV policies of vllm-kvx: spend less on long prompts."


def register() -> None:
    """Entry point, run in every vLLM process; safe to run again.

    Raises:
        AttributeError: this is a supported vLLM, yet not what vllm-kvx was written for.
        RuntimeError: ``KVX_CPU`` is on, and vLLM does not run on CPU.
    """
    _check_cpu_mode()
    with _idle_on_untested():
        from vllm.engine.arg_utils import EngineArgs

        wrap_once(EngineArgs, "add_cli_args", _with_flag)
        wrap_once(EngineArgs, "from_cli_args", _with_flag_value)
        wrap_once(EngineArgs, "create_engine_config", _with_policy)


@contextmanager
def _idle_on_untested() -> Iterator[None]:
    """Stock use of an untested vLLM must not suffer from an idle plugin that finds no seam."""
    try:
        yield
    except (ImportError, AttributeError):
        from vllm_kvx.compat.vllm_signatures import vllm_is_supported, vllm_version

        if vllm_is_supported(vllm_version()):
            raise


def is_loaded() -> bool:
    """Whether vLLM has loaded this plugin in this process, so that policies have effect."""
    from vllm.engine.arg_utils import EngineArgs

    names = ("add_cli_args", "from_cli_args", "create_engine_config")
    return all(hasattr(getattr(EngineArgs, name), MARK) for name in names)


def _check_cpu_mode() -> None:
    from vllm.platforms import current_platform

    from vllm_kvx.compat.cpu_mode import check_platform

    # vLLM keeps to itself what the platform plugin itself raises.
    check_platform(current_platform.device_type)


def _policy_name(text: str) -> str:
    """argparse type of ``--kv-policy``."""
    from vllm_kvx.config.arguments import server_policy

    return server_policy(text)


def _layout_name(text: str) -> str:
    """argparse type of one policy behind ``--kv-layout``."""
    from vllm_kvx.config.arguments import served_policy
    from vllm_kvx.policy.parameters import PolicyError
    from vllm_kvx.policy.spec import parse_policy, servable

    try:
        return served_policy(text)
    except ArgumentTypeError:
        hint = "write the policies one behind the other, with blanks between them"
        if text.startswith("["):
            raise ArgumentTypeError(f"{text!r}: {hint}, and no brackets") from None
        try:
            names = [servable(parse_policy(name)) for name in text.split(",")]
        except PolicyError:
            names = []
        if len(names) < 2:
            raise
        raise ArgumentTypeError(f"{text!r}: {hint}: {' '.join(names)}") from None


def _request_policies() -> tuple[str, ...]:
    from vllm_kvx.config.settings import REQUEST_POLICIES

    return REQUEST_POLICIES


def _flag_help() -> str:
    from vllm_kvx.policy.methods.table import METHODS

    methods = ", ".join(method.usage() for method in METHODS.values())
    return (
        f"KV policy of the server: full (stock vLLM), {methods}; parameters follow a colon "
        "and policies compose with '+', for example fastkv:tsp_layer=15,kv_rate=0.1 or "
        "speed-24+fier-2048. auto (or auto:keep=0.97) is the policy that `vllm-kvx recommend` "
        "measured to gain most of those that keep this model's answers, else fier-4096. The "
        'same as --additional-config \'{"kv_policy": "..."}\'. A request may choose another policy '
        'that fits the server\'s layout: vllm_xargs={"kv_policy": "full"}.'
    )


def _with_flag(original: _Function) -> _Function:
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        _wrap_serve_command()
        if type(parser).__module__.startswith("vllm."):  # Not Python's own, which others use.
            from vllm_kvx.compat.flag_hint import with_flag_hint

            wrap_once(type(parser), "error", with_flag_hint)
        group = parser.add_argument_group(title="KVPolicy", description=_GROUP_HELP)
        group.add_argument(
            "--kv-policy", type=_policy_name, default=None, metavar="POLICY", help=_flag_help()
        )
        group.add_argument(
            "--kv-layout",
            type=_layout_name,
            nargs="+",
            default=None,
            metavar="POLICY",
            help="Further policies that the server makes room for, so that requests may name "
            "them, with blanks between them: --kv-layout speed-16 fier-2048. The same as "
            '--additional-config \'{"kv_layout": ["speed-16", "fier-2048"]}\'.',
        )
        group.add_argument(
            "--kv-request-policies",
            choices=_request_policies(),
            default=None,
            help="Which policies requests may name: off, none but the server's; layout, any that "
            "fits the server's layout (the default); list, those in kv_policy and kv_layout. The "
            'same as --additional-config \'{"kv_request_policies": "..."}\'.',
        )
        return parser

    return add_cli_args


def _with_flag_value(original: _Function) -> _Function:
    def from_cli_args(cls: type, args: Namespace) -> Any:
        _merge_flags_into(args)
        return original(cls, args)

    return from_cli_args


def _merge_flags_into(args: Namespace) -> None:
    """What our flags say goes into ``additional_config``, of the namespace itself.

    Further API server processes get it pickled, and call from_cli_args before vLLM has loaded its
    plugins there.
    """
    flag = getattr(args, "kv_policy", None)
    requests = getattr(args, "kv_request_policies", None)
    layout = getattr(args, "kv_layout", None)
    if any(given is not None for given in (flag, requests, layout)):
        from vllm_kvx.config.flags import merge_flags

        with refusing():
            config = getattr(args, "additional_config", None)
            args.additional_config = merge_flags(flag, requests, config, layout)


def _with_merged_flags(original: _Function) -> _Function:
    """`vllm serve`, which may start servers of several ports before it reads any argument."""

    def cmd(args: Namespace) -> None:
        _merge_flags_into(args)
        original(args)

    return serve_command(cmd)


def _with_policy(original: _Function) -> _Function:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _has_policy
        # What further API servers are given. How the model drafts is taken into another one.
        shared = self.additional_config
        if _drafts_itself(self):
            from vllm_kvx.config.drafts import take_drafts
            from vllm_kvx.config.wording import worded

            with refusing(), worded(_is_of_python(*args, **kwargs)):
                take_drafts(self)
        if not may_be_ours(self.additional_config):
            vllm_config = original(self, *args, **kwargs)
            with _idle_on_untested():
                _look_at_requests()
            return vllm_config
        from vllm_kvx.compat.vllm_signatures import check_server, check_version
        from vllm_kvx.config.settings import policy_is_set
        from vllm_kvx.config.wording import worded
        from vllm_kvx.server.text_alone import check_text_alone, with_text_alone

        in_python = _is_of_python(*args, **kwargs)
        with refusing(), worded(in_python):
            is_set = policy_is_set(self.additional_config)
            if is_set:
                check_version()
                check_server()
                check_text_alone(self.additional_config)
        if not is_set:
            vllm_config = original(self, *args, **kwargs)
            with _idle_on_untested():
                _look_at_requests()
            return vllm_config
        from vllm_kvx.server.draft_scheduling import schedule_in_time
        from vllm_kvx.server.missing_connector import connector_needed
        from vllm_kvx.server.outputs import name_policies
        from vllm_kvx.server.validate import prepare_engine_config

        schedule_in_time(self)
        with connector_needed(self, in_python):
            vllm_config = with_text_alone(lambda: original(self, *args, **kwargs), self)
        _look_at_requests()
        if _usage(*args, **kwargs) == "OPENAI_BATCH_RUNNER":
            # Behind no HTTP server, and each line of the file is answered in a task of its own.
            from vllm_kvx.server.answered import note_name, say_in_usage

            say_in_usage()
            name_policies(note_name)
        else:
            name_policies()
        _has_policy = True
        with refusing(), worded(in_python):
            prepare_engine_config(vllm_config, in_python)
        if getattr(self, "_api_process_count", 1) > 1:
            # Further API servers are given these arguments: what was found need not be found again,
            # nor measured again where it could not be kept.
            for config in (shared, self.additional_config):
                config.update(vllm_config.additional_config)
        return vllm_config

    return create_engine_config


def _drafts_itself(args: Any) -> bool:
    """Whether ``--speculative-config`` names our method, of which vLLM knows nothing."""
    drafter = getattr(args, "speculative_config", None)
    return isinstance(drafter, dict) and drafter.get("method") == _DRAFTS_ITSELF


def _usage(usage_context: Any = None, *args: Any, **kwargs: Any) -> str | None:
    """What vLLM calls that which makes the engine."""
    return getattr(usage_context, "name", None)


def _is_of_python(*args: Any, **kwargs: Any) -> bool:
    """Whether somebody makes the engine in Python, and gives it no flags."""
    return _usage(*args, **kwargs) in ("LLM_CLASS", "ENGINE_CONTEXT")


def _look_at_requests() -> None:
    """Has this process look at what requests ask for, with a policy and without one."""
    import vllm.plugins
    from vllm.v1.engine.input_processor import InputProcessor

    wrap_once(vllm.plugins, "load_endpoint_plugins", _with_endpoint)
    wrap_once(InputProcessor, "resolve_watermarking", with_request_checks)


def _with_endpoint(original: _Function) -> _Function:
    def load_endpoint_plugins(supported_tasks: Any = None) -> list[Any]:
        found = original(supported_tasks)
        if _has_policy:
            from vllm_kvx.server.route import KVPolicyEndpoint

            return [*found, *KVPolicyEndpoint.for_tasks(supported_tasks)]
        with _idle_on_untested():
            from vllm_kvx.server.without_policy import StockEndpoint

            return [*found, StockEndpoint(may_be_ours)]
        return list(found)

    return load_endpoint_plugins


def with_request_checks(original: _Function) -> _Function:
    """The first method of vLLM's that is called for requests of every kind, beam search too."""

    def resolve_watermarking(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config.additional_config
        extra_args = getattr(params, "extra_args", None)
        if isinstance(config, dict) and config.get(_POLICY_KEY) is not None:
            from vllm_kvx.server.beam_search import refuse_beam_search

            refuse_beam_search(self.vllm_config, params)
        elif extra_args and may_be_ours(extra_args):
            from vllm_kvx.server.without_policy import refuse_policy

            refuse_policy(extra_args)
        return original(self, params, *args, **kwargs)

    return resolve_watermarking


def _wrap_serve_command() -> None:
    """For `vllm serve`, whose module is loaded by now where it runs; everybody else may catch."""
    serve = sys.modules.get("vllm.entrypoints.cli.serve")
    if serve is not None:
        wrap_once(serve.ServeSubcommand, "cmd", _with_merged_flags)


def may_be_ours(additional_config: Any) -> bool:
    """Whether any key may be meant for vllm-kvx: if so, ``settings`` has a closer look."""
    return isinstance(additional_config, dict) and any(
        isinstance(key, str) and _LIKE_OURS.search(key) for key in additional_config
    )
