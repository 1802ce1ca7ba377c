"""SPEED's visibility in training: a transformers model whose upper layers run few prompt tokens.

The paper's Eq. 5 hides prompt tokens from the layers above the cutoff. A mask would compute them
all the same; here those layers run only the tokens that exist there when the model is served:
anchors, tail and answer. They see each other causally, at the positions that they have in the
prompt, which is what the server does (docs/policies/speed.md). Sequences stand behind each other
without padding (`packed_attention`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from vllm_kvx.tools.tune_speed.cut import Cut
from vllm_kvx.tools.tune_speed.packed_attention import Segments


@dataclass(frozen=True)
class Batch:
    """Prompts with their answers, one sequence behind the other.

    A sequence of several turns has an answer in each. The prompt of a later one is all that stands
    before it, earlier answers too: in them the upper layers do not see it, when it is served.

    tokens: (T,) int64, prompts and answers but for the last token of each sequence, which
        predicts nothing.
    lengths: (B,) int64, of the sequences, T in all.
    prompts, answers: (A,) int64, tokens of each answer's prompt and of it, at least 1.
    sequences: (A,) int64, which of the B each is of, in order.
    """

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor
    answers: Tensor
    sequences: Tensor

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        earlier: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> "Batch":
        """Makes a batch of (prompt, answer) pairs of token ids.

        earlier: the answers in each pair's prompt, as (first token, number of tokens).
        """
        rows = [torch.tensor([*prompt, *answer[:-1]]) for prompt, answer in pairs]
        spans = [
            (number, *span)
            for number, (prompt, answer) in enumerate(pairs)
            for span in (*(earlier[number] if earlier else ()), (len(prompt), len(answer)))
        ]
        sequences, prompts, answers = torch.tensor(spans).unbind(1)
        lengths = torch.tensor([len(row) for row in rows])
        return cls(torch.cat(rows), lengths, prompts, answers, sequences)

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))

    def predicting(self) -> list[int]:
        """The indices in `tokens` of those that predict answers' tokens, by answer and position."""
        begins = self.begins()
        each = zip(
            self.sequences.tolist(), self.prompts.tolist(), self.answers.tolist(), strict=True
        )
        return [begins[s] + p - 1 + within for s, p, a in each for within in range(a)]

    def begins(self) -> list[int]:
        """The index in `tokens` at which each sequence begins."""
        return [0, *self.lengths.cumsum(0).tolist()[:-1]]


def answer_states(
    model: Any, batch: Batch, cut: Cut | None = None, watched: int | None = None
) -> Tensor:
    """The states of the tokens that predict the answers' tokens.

    model: a Llama, Mistral, Qwen2 or Qwen3 for causal language modelling of transformers, with
        `packed_attention`. Sequences are to be no longer than its sliding window.
    cut: what upper layers run; None for full depth.
    watched: the first layer whose output is returned too, no lower than the cut; None for none.

    Returns (states, n, hidden): after each layer that is watched, and last the final ones, after
    the last norm; n in the order of `Batch.predicting`.
    """
    decoder = model.model
    device, lengths = batch.tokens.device, batch.lengths.tolist()
    hidden = decoder.embed_tokens(batch.tokens)[None]
    # Once for the batch: some rotary embeddings depend on how long it is.
    cos, sin = decoder.rotary_emb(hidden, torch.arange(max(lengths), device=device)[None])

    def through(
        layers: range, hidden: Tensor, positions: list[int], lengths: list[int], places: list[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """The states of all rows after these layers; those at `places` after each watched one."""
        where = torch.tensor(positions, device=device)[None]
        rotary, segments = (cos[0][where], sin[0][where]), Segments.of(lengths, device)
        seen: list[Tensor] = []
        chosen = torch.tensor(places, dtype=torch.long, device=device)
        for number in layers:
            hidden = _run(decoder.layers[number], hidden, rotary, where, segments)
            if watched is not None and number >= watched:
                seen.append(hidden[0, chosen])
        return hidden, [*seen, decoder.norm(hidden[0, chosen])]

    positions = [position for length in lengths for position in range(length)]
    if cut is None:
        every = range(len(decoder.layers))
        return torch.stack(through(every, hidden, positions, lengths, batch.predicting())[1])
    hidden, _ = through(range(cut.cutoff), hidden, positions, lengths, [])
    begins = batch.begins()
    rows: list[int] = []
    upper: list[int] = []
    counts: list[int] = []
    places: list[int] = []
    for sequence, prompt, answer in zip(
        batch.sequences.tolist(), batch.prompts.tolist(), batch.answers.tolist(), strict=True
    ):
        run = cut.rows(prompt, prompt + answer - 1)
        upper += run
        rows += [begins[sequence] + position for position in run]
        counts.append(len(run))
        # An answer's tokens are predicted by the last of its rows.
        places += range(len(rows) - answer, len(rows))
    hidden = hidden[:, torch.tensor(rows, device=device)]
    layers = range(cut.cutoff, len(decoder.layers))
    return torch.stack(through(layers, hidden, upper, counts, places)[1])


def _run(
    layer: Any,
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    segments: Segments,
) -> Tensor:
    output = layer(
        hidden,
        attention_mask=None,
        position_embeddings=rotary,
        position_ids=positions,
        segments=segments,
    )
    return output[0] if isinstance(output, tuple) else output
