"""Tokens that are drafted behind prompts, as the worker plans them, on the simulated cache."""

import random

import numpy as np

from simulation.cache import Mismatch
from simulation.live import Ints
from simulation.model import Model, Rows
from vllm_kvx.worker.decode.step import Mode
from vllm_kvx.worker.prefill.lookahead import Draft

# Entries of drafted tokens are nobody else's.
_BITS = 62


def run_draft(draft: Draft, model: Model, requests: Ints, rng: random.Random) -> int:
    """Runs the passes; how many tokens they draft. requests: (R,) states of the step's batch.

    Raises:
        Mismatch: a token sees others' entries, or takes a slot that is not its request's alone.
    """
    count, before = 0, np.zeros(0, dtype=np.int64)
    for rows, now in draft.passes():
        states, positions = requests[now.batch.requests], now.batch.positions.numpy()
        by_layer = now.attn.of_decodes(now.batch, now.lens, now.bounds)
        if rows is not None and len(before):
            before = before[rows.numpy()]
        if len(before) and (before != states).any():
            raise Mismatch(f"drafts of {states} go on from those of {before}")
        before, count = states, count + len(states)
        with model.hooks.during(now.work):
            for hook in model.hooks.layers:
                layer, expected = hook.number, model.expected
                metadata = by_layer[hook.layer.layer_name]
                if (expected.lens[layer, states] != positions).any():
                    raise Mismatch(f"layer {layer}: drafts {positions} of {states}")
                slots = now.batch.slot_mappings[hook.group].numpy()
                if (slots < model.cache.block_size).any():
                    raise Mismatch(f"layer {layer}: no room for drafts of {states}: {slots}")
                entries = np.array([rng.getrandbits(_BITS) for _ in states], dtype=np.int64)
                model.cache.write(layer, slots, entries)
                expected.append(layer, states, entries)
                if not model._attend(
                    layer, metadata, expected.lens[layer, states], Mode.DENSE
                ).all():
                    raise Mismatch(f"layer {layer}: drafts of {states} see a part")
                if model.hooks.work is not None:
                    model.beside.run(model.hooks.work, hook, Rows(states, positions), states)
        model.beside.check_done()
    return count
