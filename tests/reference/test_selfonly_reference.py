"""The SelfOnly reference against SPEED's, and against attention over one entry by hand."""

import pytest
import torch
from transformers import PreTrainedModel

from . import selfonly, speed
from .conftest import ATOL, CLEAR, LAYERS, STEPS, change, masked, prompt_of
from .selfonly import Alone

GENERATED = prompt_of(STEPS, seed=99)


@pytest.mark.parametrize("anchors", [0, 1, 3])
def test_the_first_answer_is_speeds(model: PreTrainedModel, anchors: int) -> None:
    """No token was generated before it that it could see; later ones differ."""
    prompt = prompt_of(40)
    result = selfonly.score(model, prompt, GENERATED, Alone(2, anchors))
    theirs = speed.score(model, prompt, GENERATED, cutoff=2, anchors=anchors)
    far = change(result, theirs)
    assert far[0] < ATOL and far[1:].min() > CLEAR


@pytest.mark.parametrize(("length", "anchors"), [(20, 0), (20, 2), (2, 1), (1, 1), (3, 8)])
def test_by_masks(model: PreTrainedModel, length: int, anchors: int) -> None:
    """The forward pass that all references are held against, under this rule."""
    prompt = prompt_of(length, seed=4)
    result = selfonly.score(model, prompt, GENERATED, Alone(1, anchors))
    seen = set(range(length)[:anchors])

    def sees(layer: int, head: int, i: int, j: int) -> bool:
        return layer < 1 or j in seen

    rows = masked(model, prompt + GENERATED[:-1], sees).logprobs[length - 1 :]
    assert (result.logprobs - rows).abs().max() < ATOL


def test_alone_a_token_is_a_feed_forward_network(llama: PreTrainedModel) -> None:
    """Without anchors attention above the cutoff is the value of the token itself."""
    prompt, cutoff = prompt_of(12, seed=2), LAYERS - 1
    result = selfonly.score(llama, prompt, GENERATED[:1], Alone(cutoff, anchors=0))
    with torch.no_grad():
        hidden = llama.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        last, layer = hidden[cutoff][0, -1:], llama.model.layers[cutoff]
        value = layer.self_attn.v_proj(layer.input_layernorm(last))
        heads = value.view(-1, llama.config.head_dim)
        shared = llama.config.num_attention_heads // len(heads)
        last = last + layer.self_attn.o_proj(heads.repeat_interleave(shared, 0).reshape(1, -1))
        last = last + layer.mlp(layer.post_attention_layernorm(last))
        row = llama.lm_head(llama.model.norm(last)).log_softmax(dim=-1)
    assert (result.logprobs - row).abs().max() < ATOL


def test_refuses_what_does_not_suit(llama: PreTrainedModel) -> None:
    for alone in (Alone(0), Alone(LAYERS), Alone(1, anchors=-1)):
        with pytest.raises(ValueError, match="does not suit"):
            selfonly.score(llama, [3, 4], [5], alone)
