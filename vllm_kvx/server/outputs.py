"""Says under which policy a request was answered, to who runs an engine in Python."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_kvx.compat.wrapping import wrap_once
from vllm_kvx.config.settings import POLICY_KEY, KVSettings, request_policy
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.server.refusal_reasons import Reason, count_for


def name_policies(tell: Callable[[str], None] | None = None) -> None:
    """Has outputs of engines with a policy say it: `kv_policy` of vLLM's ``RequestOutput``.

    tell: called with the policy's name in the task that gives a request to the engine.
    """
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import RequestState

    wrap_once(InputProcessor, "process_inputs", partial(_naming, tell))
    wrap_once(RequestState, "from_new_request", _remembering)
    wrap_once(RequestState, "_new_request_output", _saying)


def _naming(tell: Callable[[str], None] | None, original: Callable[..., Any]) -> Callable[..., Any]:
    """The request that goes to the engine names its policy, whether the caller did or not."""

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params = request.sampling_params
        settings = _settings_of(self)
        if params is None or settings is None:
            return request
        extra = params.extra_args or {}
        policy = request_policy(settings, params)
        if policy.lookahead and not request.resumable:
            _check_length(self.vllm_config, policy, len(request.prompt_token_ids or ()))
        said = str(policy)
        if extra.get(POLICY_KEY) != said:
            # Of vLLM's own copy; the dictionary may be the caller's.
            params.extra_args = {**extra, POLICY_KEY: said}
        if tell is not None:
            tell(said)
        return request

    return process_inputs


def _check_length(vllm_config: Any, policy: KVPolicy, prompt_len: int) -> None:
    model = vllm_config.model_config
    try:
        policy.check_length(prompt_len, model.max_model_len)
    except PolicyError as error:
        count_for(str(model.served_model_name))(Reason.NO_ROOM)
        # Of the errors that come up here, vLLM answers 400 to its own alone.
        raise VLLMValidationError(str(error), parameter=POLICY_KEY) from None


def _settings_of(processor: Any) -> KVSettings | None:
    """Of the engine whose requests `processor` prepares; None if it has no policy."""
    try:
        return processor._kvx_settings
    except AttributeError:
        processor._kvx_settings = KVSettings.from_vllm_config(processor.vllm_config)
        return processor._kvx_settings


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_new_request(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(cls, *args, **kwargs)
        request = kwargs["request"] if "request" in kwargs else args[1]
        params = request.sampling_params
        extra = params.extra_args if params is not None else None
        # A prompt that has no end yet runs in full.
        name = extra.get(POLICY_KEY) if extra else None
        state.kv_policy = "full" if name is not None and request.resumable else name
        return state

    return from_new_request


def _saying(original: Callable[..., Any]) -> Callable[..., Any]:
    def _new_request_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if (policy := getattr(self, "kv_policy", None)) is not None:
            output.kv_policy = policy
        return output

    return _new_request_output
