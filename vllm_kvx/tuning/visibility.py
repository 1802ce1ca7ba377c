"""SPEED's visibility in training: a transformers model whose upper layers run few prompt tokens.

The paper's Eq. 5 hides prompt tokens from the layers above the cutoff. A mask would compute them
all the same; here those layers run only the tokens that exist there when the model is served:
anchors, tail and answer. They see each other causally, at the positions that they have in the
prompt, which is what the server does (docs/policies/speed.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kvx.tuning.cut import Cut


@dataclass(frozen=True)
class Batch:
    """Prompts with their answers, padded on the right to one length.

    tokens: (B, T) int64, prompts and answers but for each answer's last token, which predicts
        nothing.
    prompts, answers: (B,) int64, tokens of each prompt and of each answer, at least 1.
    """

    tokens: Tensor
    prompts: Tensor
    answers: Tensor

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Batch":
        """Of (prompt, answer) pairs of token ids."""
        rows = [torch.tensor([*prompt, *answer[:-1]]) for prompt, answer in pairs]
        return cls(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            torch.tensor([len(prompt) for prompt, _ in pairs]),
            torch.tensor([len(answer) for _, answer in pairs]),
        )

    def predicting(self) -> tuple[Tensor, Tensor]:
        """Sequence and position, (n,) int64 each, of the tokens that predict an answer's token.

        They are ordered by sequence and position, as answers are when they are put together.
        """
        sequences = torch.arange(len(self.prompts)).repeat_interleave(self.answers.cpu())
        starts = self.answers.cpu().cumsum(0) - self.answers.cpu()
        within = torch.arange(len(sequences)) - starts.repeat_interleave(self.answers.cpu())
        return sequences, self.prompts.cpu()[sequences] - 1 + within


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
    sequences, columns = (places.to(hidden.device) for places in batch.predicting())
    depth = len(decoder.layers) if cut is None else cut.cutoff
    seen: list[Tensor] = []
    for number, layer in enumerate(decoder.layers[:depth]):
        hidden = _run(layer, hidden, (cos, sin), positions)
        if watched is not None and number >= watched:
            seen.append(hidden[sequences, columns])
    if cut is not None:
        rows, columns = _upper_rows(batch, cut)
        rows, columns = rows.to(hidden.device), columns.to(hidden.device)
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        rotary = cos[0][rows], sin[0][rows]
        for number, layer in enumerate(decoder.layers[depth:], depth):
            hidden = _run(layer, hidden, rotary, rows)
            if watched is not None and number >= watched:
                seen.append(hidden[sequences, columns])
    return torch.stack([*seen, decoder.norm(hidden[sequences, columns])])


def _run(layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    # Without a mask SDPA is causal, so that padding on the right is seen by no other token.
    output = layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
    return output[0] if isinstance(output, tuple) else output


def _upper_rows(batch: Batch, cut: Cut) -> tuple[Tensor, Tensor]:
    """The rows of the upper layers, (B, R) int64, padded by position 0 at the end, and the columns
    among them, (n,), of the tokens that predict."""
    rows: list[Tensor] = []
    columns: list[int] = []
    for prompt, answer in zip(batch.prompts.tolist(), batch.answers.tolist(), strict=True):
        chosen = cut.rows(prompt, prompt + answer - 1)
        rows.append(torch.tensor(chosen))
        columns += range(len(chosen) - answer, len(chosen))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(columns)
