"""The worker: the project's model state, called as vLLM's model runner calls it."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from support.configs import kv_cache_groups
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from benchmarks.common.pools import pool_of
from simulation.adapters import RowAdapters
from simulation.beside import Beside, Centrality
from simulation.cache import Cache, Mismatch, SidecarIndex
from simulation.expectations import Expectations
from simulation.live import Expected, Ints, Live, storages_of
from simulation.lookahead import run_draft
from simulation.model import Batch, Model
from simulation.offloading import Transfers
from simulation.other_layers import OtherLayers, Others
from simulation.own_drafts import write_drafts
from simulation.server import Case
from simulation.sliding import SlidingLayers
from simulation.state import (
    Decoder,
    State,
    StateOfHybrid,
    Tables,
    attention_groups,
    input_batch,
)
from simulation.states_kept import StatesKept
from simulation.traffic import VOCAB, Text
from vllm_kvx.cache.messages import PolicyResult, PolicyStep, attach_result, step_of
from vllm_kvx.cache.pool_capacity import policy_groups
from vllm_kvx.config.settings import request_policy
from vllm_kvx.models.passes import StepPlan


class Worker:
    """One rank.

    live: running requests, by id. finished: texts of the last ones that ended or were preempted.
    counts: how often what happened. began_at: by request, the tokens that it took from the cache.
    drafted: after a step, how many tokens are drafted for each request in it.
    transfers: its side of a KV connector, if there is one. left: by request, what a prompt leaves,
    by layer. came: the same of requests whose prompts another server has computed.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        case: Case,
        rng: random.Random,
        others: Others | None = None,
    ) -> None:
        """others: the layers that follow no policy."""
        self.rng, self.live, self.finished = rng, dict[str, Live](), list[Text]()
        self.num_drafts, self.drafted = vllm_config.num_speculative_tokens, DraftTokenIds([], [])
        self.counts = Counter[str]()
        self.transfers: Transfers | None = None
        self.left, self.came = dict[str, dict[int, Ints]](), dict[str, dict[int, Ints]]()
        self.began_at: dict[str, int] = {}
        total = vllm_config.model_config.get_total_num_hidden_layers()
        others = others or Others(0)
        made = others.made(total - others.layers)
        sliding: dict[int, Any] = {layer.index: layer for layer in made if others.among}
        # Those that policies do not know of.
        beside = [] if sliding else made
        num_layers = total - len(beside)
        layers = self.layers_of(num_layers)
        self.decoder = Decoder(layers, sliding)
        context = vllm_config.compilation_config.static_forward_context
        context.update({layer.layer_name: layer for layer in made})
        self.adapters = RowAdapters(vllm_config, self.decoder, rng)
        has_states = others.layers > 0 and others.is_state
        self.state = state = (StateOfHybrid if has_states else State)(vllm_config, self.decoder)
        # The layers that run first come first, so that their KV group does.
        decoder = self.decoder.every_layer()
        every: list[Any] = [*beside[::2], *decoder, *beside[1::2]]
        specs = {layer.layer_name: layer.get_kv_cache_spec(vllm_config) for layer in every}
        groups = self.groups_of(vllm_config, specs)
        self.kv_cache_config = pool_of(
            groups, case.num_blocks, prefix_cache_retention_interval=case.retention_interval
        )
        self._attention_groups = attention_groups(groups)
        block_sizes = [group.kv_cache_spec.block_size for group in groups]
        block_size = policy_groups(self.kv_cache_config)[0].kv_cache_spec.block_size
        max_reqs = state.max_num_reqs
        self.tables = Tables(block_sizes, max_reqs, state.max_model_len)
        for layer in self.decoder.layers:
            layer.bind(case.num_blocks, block_size)
        state.initialize_kv_cache(self.kv_cache_config, cast(Any, self.tables))
        self._by_state = by_state = dict[int, Live]()
        stage_of = state.settings.layout.stage_of
        self._starts = [state.starts[stage_of(layer)] for layer in range(num_layers)]
        self.expected = Expected(num_layers, max_reqs, state.max_model_len)
        self._expectations = Expectations(self.expected, by_state, self._starts, layers, block_size)
        sidecar = state.settings.layout.sidecar
        where = {
            name: (g, at) for g, x in enumerate(groups) for at, name in enumerate(x.layer_names)
        }
        self.cache = Cache(
            {
                number: where[layer.layer_name][1]
                for number, layer in enumerate((*decoder, *beside), layers.start)
            },
            case.num_blocks,
            block_size,
            sidecar.group if sidecar is not None else 0,
            case.copies_pages,
        )
        centrality = Centrality(self.live, block_size, rng)
        state.memory.centrality = cast(Any, centrality)
        sidecars = state.retrieval.sidecars if state.retrieval is not None else None
        if sidecars is not None:
            sidecars._index = cast(Any, SidecarIndex(self.cache))
            sidecars.views = cast(Any, [(layer, None) for layer in layers])
        self.sliding = SlidingLayers(
            sliding,
            {number: where[layer.layer_name][0] for number, layer in sliding.items()},
            by_state,
            self.cache,
            self.counts,
            max_reqs,
            state.max_model_len,
        )
        self.model = Model(
            state.hooks,
            Beside(by_state, self.cache, self.expected, centrality, sidecars, rng, self.counts),
            self.cache,
            self.expected,
            by_state,
            self._starts,
            state.cuts.split_layers,
            OtherLayers(
                beside,
                {name: group for name, (group, _) in where.items()},
                block_sizes,
                self.cache,
                by_state,
                self.counts,
            ),
            self.sliding,
            self.adapters,
        )
        kept, pages = StatesKept(self.cache, self.model.stashed, self.counts), state.prefix_states
        if isinstance(state, StateOfHybrid):
            state.copy_state = kept.carry
        cast(Any, pages).copy_in, cast(Any, pages).copy_out = kept.copy_in, kept.copy_out
        self._free, self._number = list(range(max_reqs)), 1
        self._num_windows = len(state.requests.free_windows)
        self._texts: dict[str, Text] = {}
        self._ids = torch.zeros(max_reqs, state.max_model_len + 1, dtype=torch.int32)

    # What is another thing in a pipeline.

    def layers_of(self, num_layers: int) -> range:
        """Those of the model that are here."""
        return range(num_layers)

    def groups_of(self, config: VllmConfig, specs: dict[str, Any]) -> Any:
        """The KV groups of layers with these specs, by name."""
        return kv_cache_groups(config, specs)

    def _order(self, names: list[str]) -> None:
        self.rng.shuffle(names)

    def _run(self, batch: InputBatch) -> np.ndarray:
        return self.model.run(*self._plan(batch))

    # What the model runner does.

    def expect(self, req_id: str, text: Text) -> None:
        """A request was given to the scheduler, which does not tell the worker its salt."""
        self._texts[req_id] = text

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step.

        Raises:
            Mismatch: see ``Model.run``; or requests hold or compute what they should not.
        """
        for req_id in sorted(output.finished_req_ids | set(output.preempted_req_ids or ())):
            self._remove(req_id)
            self.came.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self._remove(new.req_id)
            self._add(new)
        cached = output.scheduled_cached_reqs
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            one = self.live[req_id]
            if not one.done <= computed <= one.done + one.rejected:
                raise Mismatch(f"{req_id}: {one.done} tokens are in, not {computed}")
            self.counts["rejected unknown"] += computed - one.done
            one.known = computed
            if blocks is not None:
                self.tables.append(self.live[req_id].index, blocks, overwrite=False)
        for block in output.new_block_ids_to_zero or ():
            self.cache.write_block(block, 0)
        for copy in output.kv_cache_block_copies or ():
            self.cache.copy(copy.src_block_id, copy.dst_block_id)
            self.counts["copies"] += 1
        if not output.num_scheduled_tokens:
            return ModelRunnerOutput([], {})
        step = step_of(output) or PolicyStep()
        self.state.memory.private = step.private
        self.counts["moved out"] += len(step.private)
        self.state.prefix_states.in_step = step.states
        drafts = {name: len(ids) for name, ids in output.scheduled_spec_decode_tokens.items()}
        self.counts["padded"] += sum(new.req_id in drafts for new in output.scheduled_new_reqs)
        return self._step(output.num_scheduled_tokens, drafts)

    def _add(self, new: NewRequestData) -> None:
        index, text = self._free.pop(), self._texts[new.req_id]
        policy = request_policy(self.state.settings, new.sampling_params)
        storages = storages_of(policy, new.prompt_len, self._starts, self.cache.block_size)
        self._number += 1
        one = Live(new, index, self._number, policy, text.under, storages)
        self.live[new.req_id] = self._by_state[index] = one
        self.began_at[new.req_id] = one.done
        self.sliding.add(one, self._starts)
        came = self.came.pop(one.req_id, None) if one.done >= one.prompt_len - 1 else None
        self.counts["went on with a prompt"] += came is not None
        self._expectations.begin(one, came)
        self._ids[index, : len(one.tokens)] = torch.tensor(one.tokens)
        self.state.add_request(index, new)
        self.tables.append(index, new.block_ids, overwrite=True)
        self.counts["resumed"] += len(one.tokens) > one.prompt_len
        self.counts["prefix hits"] += one.done > 0
        self.counts["hits of adapters"] += one.done > 0 and text.adapter > 0

    def _remove(self, req_id: str) -> None:
        self.state.remove_request(req_id)
        one = self.live.pop(req_id, None)
        if one is not None:
            del self._by_state[one.index]
            self._free.append(one.index)
            self.finished = [*self.finished[-30:], replace(self._texts[req_id], tokens=one.tokens)]

    def _step(self, scheduled: dict[str, int], drafts: dict[str, int]) -> ModelRunnerOutput:
        names = list(scheduled)
        self._order(names)
        live = [self.live[name] for name in names]
        for name, count in drafts.items():
            self._draft(self.live[name], count)
        batch = input_batch(
            names,
            np.array([one.index for one in live]),
            np.array([one.done for one in live]),
            np.array([scheduled[name] for name in names]),
            np.array([one.prefill_len for one in live]),
            np.array([drafts.get(name, 0) for name in names]),
            self._ids.numpy(),
            np.array([one.known for one in live]),
        )
        self.state.draft = None
        is_final = self._run(batch)
        if self.state.draft is not None:
            tokens = run_draft(self.state.draft, self.model, batch.idx_mapping_np, self.rng)
            self.counts["drafted behind prompts"] += tokens
        self.state.after_forward()
        kept = {
            name: {stage: blocks.tolist() for stage, blocks in by_stage.items()}
            for name, by_stage in self.state.relink_blocks().items()
        }
        for name, by_stage in kept.items():
            self.counts["re-linked"] += 1
            by_start = {self.state.starts[stage]: blocks for stage, blocks in by_stage.items()}
            self._expectations.keep(self.live[name], by_start)
        sampled, ends = [], []
        for one, final in zip(live, is_final, strict=True):
            one.done += scheduled[one.req_id]
            one.rejected = 0
            ends.append(one.done)
            sampled.append(self._sample(one, final, drafts.get(one.req_id, 0)))
            self._check_lens(one)
            if self.transfers is not None and one.done == one.prompt_len:
                self.left[one.req_id] = self._expectations.left_by(one)
        if self.state.settings.drafts is not None:
            given = [drafts.get(name, 0) for name in names]
            self.counts["written behind"] += write_drafts(
                live, ends, given, self.num_drafts, self.state, self.tables, self.cache
            )
        if self.num_drafts:
            # A grammar may leave fewer of them.
            most = [self.rng.choice([0, self.num_drafts, self.num_drafts, 1]) for _ in names]
            self.drafted = DraftTokenIds(names, [[-1] * count for count in most])
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        attach_result(output, PolicyResult(kept))
        return output

    def _plan(self, batch: InputBatch) -> tuple[StepPlan, Batch]:
        """What the model state makes of a step, in the order of vLLM's hooks."""
        self.adapters.begin_step([self._texts[name].adapter for name in batch.req_ids], batch)
        state, config, mode = self.state, self.kv_cache_config, self._graph_mode(batch)
        requests = batch.idx_mapping_np
        owners = np.repeat(requests, np.diff(batch.query_start_loc_np))
        tables, slots = self.tables.gather(requests, owners, batch.positions.numpy())
        state.preprocess_state(batch, tables, config, batch.positions)
        metadata = state.prepare_attn(batch, mode, tables, slots, self._attention_groups, config)
        token_ids = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=self._ids))
        state.prepare_inputs(batch, cast(Any, token_ids))
        plan = self.decoder.take_plan()
        if mode == CUDAGraphMode.FULL and plan.passes is not None:
            raise Mismatch("a graph would replay past the step's passes")
        return plan, Batch(
            batch.idx_mapping_np,
            batch.query_start_loc_np.astype(np.int64),
            1 + _drafts_of(batch),
            batch.positions.numpy(),
            batch.input_ids.numpy(),
            metadata,
            slots.numpy(),
        )

    def _graph_mode(self, batch: InputBatch) -> CUDAGraphMode:
        """Half of the steps of single tokens, or of these and as many drafts each, replay one."""
        counts, drafts = batch.num_scheduled_tokens, _drafts_of(batch)
        is_uniform = (counts == 1 + drafts).all() and np.isin(drafts, (0, self.num_drafts)).all()
        may = is_uniform and len(np.unique(drafts)) == 1 and self._replays()
        begins = batch.num_computed_tokens_np
        if may and not self.state.needs_python(batch.idx_mapping_np, begins, counts):
            self.counts["graphs"] += 1
            self.counts["graphs with drafts"] += bool(drafts.any())
            return CUDAGraphMode.FULL
        return CUDAGraphMode.NONE

    def _replays(self) -> bool:
        return self.rng.random() < 0.5

    def _draft(self, live: Live, count: int) -> None:
        """Any tokens: what stays of them is drawn in `_sample`."""
        tokens = [self.rng.randrange(VOCAB) for _ in range(count)]
        end = len(live.tokens)
        self._ids[live.index, end : end + count] = torch.tensor(tokens, dtype=torch.int32)
        live.tokens += tokens

    def _sample(self, live: Live, is_final: bool, drafts: int) -> list[int]:
        """A token, after those of the last `drafts` that stay."""
        if live.done < len(live.tokens):
            return []
        if not is_final:
            raise Mismatch(f"{live.req_id}: the state of its last token is not its own")
        drafted = live.tokens[live.done - drafts :]
        kept = self.rng.randrange(drafts + 1) if drafts else 0
        token = self.rng.randrange(VOCAB)
        if kept < drafts:
            token += token == drafted[kept]  # Or it would have stayed.
            token %= VOCAB
            live.reject(drafts - kept)
            self.expected.lens[:, live.index] -= drafts - kept
            self.sliding.reject(live)
        self.counts["drafts kept"] += kept
        self.counts["drafts rejected"] += drafts - kept
        self._ids[live.index, len(live.tokens)] = token
        live.tokens.append(token)
        return [*drafted[:kept], token]

    # Expectations.

    def _check_lens(self, live: Live) -> None:
        self.sliding.check(live)
        full = list(self.state.hooks.by_number)
        held = self.expected.lens[full, live.index].tolist()
        wanted = [live.stored_len(layer) for layer in full]
        if held != wanted:
            raise Mismatch(f"{live} holds {held} entries by layer, {wanted} of {live.done} tokens")

    def check_idle(self) -> None:
        """Raises Mismatch if anything is left of a request, or a row that ran was not counted."""
        state = self.state
        left: dict[str, Any] = {
            "requests": state.requests.index or self.live or self._by_state,
            "prompts": state.requests.prompts,
            "windows": self._num_windows - len(state.requests.free_windows),
            "stash": state.stash.used_tokens if state.stash is not None else 0,
        }
        if self.transfers is not None:
            left["transfers"] = not self.transfers.are_done
        if any(left.values()):
            raise Mismatch(f"left in the worker: {left}")
        counted = int(state.stats.layer_tokens_computed.sum())
        if counted != self.model.row_layers:
            raise Mismatch(f"{self.model.row_layers} rows of layers ran, {counted} are counted")


def _drafts_of(batch: InputBatch) -> Ints:
    """(R,) drafted tokens of each request."""
    drafts = batch.num_draft_tokens_per_req
    return np.zeros(batch.num_reqs, dtype=np.int64) if drafts is None else drafts.astype(np.int64)
