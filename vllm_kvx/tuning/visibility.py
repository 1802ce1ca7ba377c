"""SPEED's visibility in training: a transformers model whose upper layers run few prompt tokens.

The paper's Eq. 5 hides prompt tokens from the layers above the cutoff. A mask would compute them
all the same; here those layers run only the tokens that exist there when the model is served:
anchors, tail and answer. They see each other causally, at the positions that they have in the
prompt, which is what the server does (docs/policies/speed.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vllm_kvx.tuning.cut import Cut

# Sequence and position, (n,) int64 each.
Places = tuple[Tensor, Tensor]
# Answers with at least this share of the upper rows of the longest are run with it.
ALIKE = 0.7


@dataclass(frozen=True)
class Batch:
    """Prompts with their answers, padded on the right to one length.

    A sequence of several turns has an answer in each. The prompt of a later one is all that stands
    before it, earlier answers too: in them the upper layers do not see it, when it is served.

    tokens: (B, T) int64, prompts and answers but for the last token of each sequence, which
        predicts nothing.
    prompts, answers: (A,) int64, tokens of each answer's prompt and of it, at least 1.
    sequences: (A,) int64, which of the B each is of, in order.
    """

    tokens: Tensor
    prompts: Tensor
    answers: Tensor
    sequences: Tensor

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        earlier: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> "Batch":
        """Of (prompt, answer) pairs of token ids.

        earlier: of each pair the answers in its prompt: first token and number of tokens.
        """
        rows = [torch.tensor([*prompt, *answer[:-1]]) for prompt, answer in pairs]
        spans = [
            (number, *span)
            for number, (prompt, answer) in enumerate(pairs)
            for span in (*(earlier[number] if earlier else ()), (len(prompt), len(answer)))
        ]
        sequences, prompts, answers = torch.tensor(spans).unbind(1)
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return cls(tokens, prompts, answers, sequences)

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))

    def predicting(self) -> tuple[Tensor, Tensor]:
        """Sequence and position, (n,) int64 each, of the tokens that predict an answer's token.

        They are ordered by answer and position, as answers are when they are put together.
        """
        answers = self.answers.cpu()
        each = torch.arange(len(answers)).repeat_interleave(answers)
        within = torch.arange(len(each)) - (answers.cumsum(0) - answers)[each]
        return self.sequences.cpu()[each], self.prompts.cpu()[each] - 1 + within


def answer_states(
    model: Any, batch: Batch, cut: Cut | None = None, watched: int | None = None
) -> Tensor:
    """The states of the tokens that predict the answers' tokens.

    model: a Llama, Mistral, Qwen2 or Qwen3 for causal language modelling of transformers, with
        SDPA attention. Sequences are to be no longer than its sliding window.
    cut: what upper layers run; None for full depth.
    watched: the first layer whose output is returned too, no lower than the cut; None for none.

    Returns (states, n, hidden): after each layer that is watched, and last the final ones, after
    the last norm; n in the order of `Batch.predicting`.
    """
    decoder = model.model
    hidden = decoder.embed_tokens(batch.tokens)
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    # Once for the sequence: some rotary embeddings depend on its length.
    cos, sin = decoder.rotary_emb(hidden, positions)
    depth = len(decoder.layers) if cut is None else cut.cutoff

    def through(layers: range, hidden: Tensor, positions: Tensor, places: Places | None) -> Tensor:
        """The states after these layers; at `places`, if given, those that are watched, and last
        the final ones."""
        rotary = cos[0][positions], sin[0][positions]
        seen: list[Tensor] = []
        for number in layers:
            hidden = _run(decoder.layers[number], hidden, rotary, positions)
            if places is not None and watched is not None and number >= watched:
                seen.append(hidden[places])
        return hidden if places is None else torch.stack([*seen, decoder.norm(hidden[places])])

    if cut is None:
        sequences, columns = (places.to(hidden.device) for places in batch.predicting())
        return through(range(depth), hidden, positions, (sequences, columns))
    hidden = through(range(depth), hidden, positions, None)
    prompts, answers = batch.prompts.tolist(), batch.answers.tolist()
    upper = [cut.rows(p, p + a - 1) for p, a in zip(prompts, answers, strict=True)]
    found: list[Tensor] = []
    groups = _alike(upper)
    for group in groups:
        rows = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(upper[answer]) for answer in group], batch_first=True
        ).to(hidden.device)
        # An answer's tokens are predicted by the last of its rows.
        places = torch.tensor(
            [
                (number, column)
                for number, answer in enumerate(group)
                for column in range(len(upper[answer]) - answers[answer], len(upper[answer]))
            ],
            device=hidden.device,
        )
        chosen = hidden[batch.sequences[group][:, None], rows]
        layers = range(depth, len(decoder.layers))
        found.append(through(layers, chosen, rows, (places[:, 0], places[:, 1])))
    return _by_answer(torch.cat(found, dim=1), groups, answers)


def _run(layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    # Without a mask SDPA is causal, so that padding on the right is seen by no other token.
    output = layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
    return output[0] if isinstance(output, tuple) else output


def _alike(upper: Sequence[Sequence[int]]) -> list[list[int]]:
    """Answers by their upper rows, in groups of about one number of them: padding is little."""
    groups: list[list[int]] = []
    for answer in sorted(range(len(upper)), key=lambda answer: -len(upper[answer])):
        if groups and len(upper[answer]) >= ALIKE * len(upper[groups[-1][0]]):
            groups[-1].append(answer)
        else:
            groups.append([answer])
    return groups


def _by_answer(states: Tensor, groups: Sequence[Sequence[int]], answers: Sequence[int]) -> Tensor:
    """States (_, n, hidden), which are ordered by group, ordered by answer.

    answers: tokens of each.
    """
    order = [answer for group in groups for answer in group]
    places = torch.arange(states.shape[1]).split([answers[answer] for answer in order])
    of_answer = dict(zip(order, places, strict=True))
    chosen = torch.cat([of_answer[answer] for answer in range(len(answers))])
    return states[:, chosen.to(states.device)]
