"""Training runs a model as the dense reference of SPEED does, and learns from nothing else."""

import random

import pytest
import torch
from reference import models, speed

from vllm_kvx.tools.tune_speed.cut import Cut
from vllm_kvx.tools.tune_speed.student import load
from vllm_kvx.tools.tune_speed.visibility import Batch, answer_states

LAYERS = 4


@pytest.fixture(scope="module", params=models.ARCHS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return load(str(models.build_model(path, arch=request.param, layers=LAYERS)), None, "auto")


def logprobs(model, pairs, cut):
    states = answer_states(model, Batch.of(pairs), cut)[-1]
    return model.lm_head(states).log_softmax(dim=-1)


def drawn(lengths, seed=0):
    """(prompt, answer) pairs of these lengths."""
    rng = random.Random(seed)
    return [
        tuple([rng.randrange(3, 500) for _ in range(length)] for length in pair) for pair in lengths
    ]


@pytest.mark.parametrize("cut", [None, Cut(1), Cut(3, 0, 1), Cut(2, 4, 3), Cut(2, 1, 32)])
def test_rows_are_the_references(model, cut):
    # Prompts shorter than anchors and tail, answers of one token, and padding.
    pairs = drawn([(40, 6), (1, 3), (2, 1), (5, 9), (33, 1)])
    expected = [
        speed.score(
            model,
            prompt,
            answer,
            cutoff=cut and cut.cutoff,
            anchors=cut.anchors if cut else 0,
            tail=cut.tail if cut else 1,
        ).logprobs
        for prompt, answer in pairs
    ]
    with torch.no_grad():
        found = logprobs(model, pairs, cut)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=0)


def test_watched_states_are_the_layers_outputs(model):
    """Of the layers from the cut on, at the tokens that predict: in full depth by transformers."""
    pairs = drawn([(17, 5), (9, 2)])
    batch = Batch.of(pairs)
    with torch.no_grad():
        full = answer_states(model, batch, watched=2)
        cut = answer_states(model, batch, Cut(2), watched=2)
        final = answer_states(model, batch, Cut(2))
        rows = []
        for prompt, answer in pairs:
            tokens = torch.tensor([[*prompt, *answer[:-1]]])
            outputs = model.model(tokens, output_hidden_states=True).hidden_states
            # Its last one is after the norm; those before it are the layers' inputs.
            rows.append(outputs[LAYERS - 1][0, len(prompt) - 1 :])
    assert full.shape == cut.shape == (3, 7, model.config.hidden_size)
    torch.testing.assert_close(full[0], torch.cat(rows), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.model.norm(full[1]), full[2])
    torch.testing.assert_close(model.model.norm(cut[1]), cut[2])
    torch.testing.assert_close(cut[2:], final)
    assert (full - cut).abs().max() > 1e-3


def test_gradients_are_those_of_the_masked_model(model, monkeypatch):
    """The upper layers' missing rows change no gradient: what nobody sees gets none."""
    pairs, cut = drawn([(17, 5)]), Cut(2, 1, 2)
    model.zero_grad()
    logprobs(model, pairs, cut).square().mean().backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.zero_grad()
    monkeypatch.setattr(speed, "forward", speed.forward.__wrapped__)
    (prompt, answer) = pairs[0]
    dense = speed.score(model, prompt, answer, cutoff=2, anchors=1, tail=2).logprobs
    dense.square().mean().backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5, rtol=1e-4, msg=name)


def test_the_rows_that_upper_layers_run():
    assert Cut(3).rows(6, 8) == [0, 5, 6, 7]
    assert Cut(3, anchors=0).rows(6, 8) == [5, 6, 7]
    assert Cut(3, anchors=2, tail=3).rows(6, 8) == [0, 1, 3, 4, 5, 6, 7]
    # Each row once where anchors and tail meet.
    assert Cut(3, anchors=4, tail=4).rows(6, 7) == [0, 1, 2, 3, 4, 5, 6]
    assert Cut(3, anchors=9, tail=9).rows(2, 3) == [0, 1, 2]


def test_predicting_tokens_stand_before_what_they_predict():
    batch = Batch.of([([5, 6, 7], [8, 9]), ([5], [6])])
    assert batch.tokens.tolist() == [5, 6, 7, 8, 5]
    assert batch.lengths.tolist() == [4, 1]
    assert batch.predicting() == [2, 3, 4]
