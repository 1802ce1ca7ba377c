"""Models that also read images or sound: policies serve their text alone.

With `--language-model-only` vLLM loads no encoder and takes no image; the rest is a text model,
which policies run as any other. A server with a policy sets it by itself.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_kvx.config.quoting import quoted
from vllm_kvx.server.refusal_reasons import Reason, RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# What names of media have in them: image_url, input_audio, video_embeds and so on.
_MEDIA = ("image", "audio", "video")
# Lists of a body that hold messages.
_MESSAGES = ("messages", "input")


def serve_text_alone(vllm_config: "VllmConfig") -> None:
    """Makes a model of several modalities a text model, and says so in the log."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None or multimodal.language_model_only:
        return
    multimodal.language_model_only = True
    from vllm.logger import init_logger

    init_logger("vllm.kvx").warning(
        "KV policies serve this model's text alone: its encoder is not loaded, and requests with "
        "images, audio or video are refused, as with --language-model-only."
    )


def is_text_alone(vllm_config: "VllmConfig") -> bool:
    """Whether a model of several modalities is served as a text model."""
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is not None and multimodal.language_model_only


def check_media(body: dict[str, Any]) -> None:
    """Looks for images, audio and video in a parsed JSON body.

    vLLM would advise to allow them by --limit-mm-per-prompt, which is of no use here.

    Raises:
        RefusedError: there is one.
    """
    for key, name in _media_in(body):
        raise RefusedError(
            Reason.MEDIA,
            key,
            f"{quoted(name)} in {key!r}: this server has a KV policy, and serves text alone. Send "
            "the request without it, or to a server without --kv-policy",
        )


def _media_in(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys of the body that hold messages with media, and what these are called."""
    for key in _MESSAGES:
        messages = body.get(key)
        for message in messages if isinstance(messages, list) else ():
            parts = message.get("content") if isinstance(message, dict) else None
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and (name := _medium(part)):
                    yield key, name


def _medium(part: dict[str, Any]) -> str | None:
    """What a part of a message's content calls its medium; None for text."""
    kind = part.get("type")
    # vLLM also takes parts without a type, by their other key.
    names = (kind,) if isinstance(kind, str) else part
    return next((name for name in names if any(medium in name for medium in _MEDIA)), None)
