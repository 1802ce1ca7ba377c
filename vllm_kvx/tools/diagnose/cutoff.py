"""What one prompt shows of SPEED's cutoffs: the paper's diagnostic, and every cut itself.

One full-depth pass over the prompt, the model's own greedy answer, and one pass of the generated
tokens over the prompt's keys and values, of which attention is looked at. Under SPEED-K the layers
below K compute what they compute at full depth. So every cutoff starts from states of that one
pass: those of anchors, tail and generated tokens, which alone run in the layers above.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvx.equations.cutoff import Shares, attention_shares, divergence, turns
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.tools.checkpoint.answers import Question, generate
from vllm_kvx.tools.checkpoint.dense_decoder import Cache, DenseDecoder, Rows
from vllm_kvx.tools.checkpoint.report import Progress
from vllm_kvx.tools.diagnose.probes import Probe


@dataclass(frozen=True)
class Seen:
    """What one prompt showed; layers are those of the model from the lowest on.

    answer: the full-depth model's greedy tokens, n.
    shares: where the generated tokens attend to, (L,) each.
    curvature: (L,), mean angle in radians of all tokens' states after each layer.
    kl: (C, n) float64, by cutoff and answer token, KL(full || cut) in nats.
    same: (C, n) bool, whether the greedy token is the same.
    """

    answer: tuple[int, ...]
    shares: Shares
    curvature: Tensor
    kl: Tensor
    same: Tensor


def look(
    decoder: DenseDecoder,
    probe: Probe,
    policy: Speed,
    cutoffs: Sequence[int],
    answer_tokens: int,
    progress: Progress,
    cut_progress: Callable[[int], None],
) -> Seen:
    """Measure one prompt.

    policy: its anchors and tail; `cutoffs` are the K to try, 1 to L - 1.
    answer_tokens: the longest answer. It ends at a stop token, which is part of it.
    progress: called before each layer of the prompt's pass, `cut_progress` before each cutoff.
    """
    prompt_len = len(probe.token_ids)
    gap = policy.gap(prompt_len, policy.cutoff)
    kept = torch.tensor([i for i in range(prompt_len) if gap.is_kept(i)], device=decoder.device)
    user = torch.tensor(probe.user, device=decoder.device)

    cache, rows = Cache(), decoder.embed(probe.token_ids)
    steps = decoder.layers(rows, cache=cache)
    below, ends, angles = list[Rows](), list[Tensor](), list[Tensor]()
    for index in range(decoder.num_layers):
        progress(index)
        rows, _ = next(steps)
        below.append(rows.select(kept))
        ends.append(rows.hidden[-2:].clone())  # a view would keep all of them
        angles.append(turns(rows.hidden))
    last = rows.hidden[-1:]
    question = Question(probe.token_ids, limit=answer_tokens)
    answer, _ = generate(decoder, last, question, cache.copy())

    # Decode steps run every token but the last one, which nothing follows.
    run, shares = answer[:-1] or answer, list[Shares]()
    curvature, above = list[Tensor](), list[Rows]()
    for index, (rows, attention) in enumerate(decoder.extension(run, prompt_len, cache)):
        shares.append(attention_shares(attention, user, prompt_len))
        joined = turns(torch.cat([ends[index], rows.hidden]))
        curvature.append(torch.cat([angles[index], joined]).nanmean())
        above.append(below[index].then(rows))

    full = decoder.logits(torch.cat([last, rows.hidden])[: len(answer)])
    kl, same = list[Tensor](), list[Tensor]()
    for number, cutoff in enumerate(cutoffs):
        cut_progress(number)
        rows = above[cutoff - 1]
        for output, _ in decoder.layers(rows, cutoff):
            rows = output
        # The prompt's last token, the tail's, and the generated ones.
        cut = decoder.logits(rows.hidden[-len(run) - 1 :][: len(answer)])
        changed = divergence(full, cut)
        kl.append(changed.kl)
        same.append(changed.same)
    return Seen(
        tuple(answer),
        Shares(*(torch.stack(values) for values in zip(*shares, strict=True))),
        torch.stack(curvature),
        torch.stack(kl),
        torch.stack(same),
    )


def check_finite(seen: Seen, head: str) -> None:
    """Raise ToolError where something could not be measured; `head` says of which prompt."""
    if not all(torch.isfinite(values).all() for values in (*seen.shares, seen.curvature, seen.kl)):
        raise ToolError(
            f"{head}: its attention, states or logits are not finite, or all its tokens are the "
            "same: use --dtype bfloat16 or float32, or other prompts"
        )
