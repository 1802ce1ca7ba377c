"""Refuses images, audio and video where a server serves a model's text alone (``text_alone``)."""

from collections.abc import Iterator
from typing import Any

from vllm_kvx.config.quoting import quoted
from vllm_kvx.server.refusal_reasons import Reason, RefusedError

# What names of media have in them: image_url, input_audio, video_embeds and so on.
_MEDIA = ("image", "audio", "video")
# Of /inference/v1/generate: parts of a message, and what an encoder makes of media.
_PARTS, _FEATURES = "content_parts", "features"
# Keys of a body that hold messages, or parts of one.
_HAVE_PARTS = ("messages", "input", _PARTS)
# What has parts in a message: its own content, and what a tool put out.
_CONTENTS = ("content", "output")
# Lists of lists of messages, their parts, and those of a tool's result have half as many levels.
_DEEPEST = 16


def check_media(body: dict[str, Any], why: str) -> None:
    """Looks for images, audio and video in a parsed JSON body.

    vLLM would advise to allow them by --limit-mm-per-prompt, which is of no use here.

    Args:
        why: the server serves text alone, and what to change.

    Raises:
        RefusedError: there is one.
    """
    for key in _HAVE_PARTS:
        for name in _media_in(body.get(key), key == _PARTS):
            raise _refused(key, f"{quoted(name)} in {key!r}", why)
    if body.get(_FEATURES) is not None:
        raise _refused(_FEATURES, repr(_FEATURES), why)


def _refused(key: str, what: str, why: str) -> RefusedError:
    return RefusedError(
        Reason.MEDIA,
        key,
        f"{what}: send the request without it; this server serves text alone: {why}",
    )


def _media_in(value: Any, is_part: bool, depth: int = 0) -> Iterator[str]:
    """What media are called among messages, or parts of one; a tool's result has parts too."""
    if depth > _DEEPEST:
        return
    if isinstance(value, list):
        for each in value:
            yield from _media_in(each, is_part, depth + 1)
    elif isinstance(value, dict):
        if is_part and (name := _medium(value)):
            yield name
        for key in _CONTENTS:
            yield from _media_in(value.get(key), True, depth + 1)


def _medium(part: dict[str, Any]) -> str | None:
    """What a part calls its medium; None for text."""
    kind = part.get("type")
    # vLLM also takes parts by another key than their type.
    names = [kind] if isinstance(kind, str) else []
    names += [name for name in part if part[name] is not None]
    return next((name for name in names if any(medium in name for medium in _MEDIA)), None)
