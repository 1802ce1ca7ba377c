"""Stock attention beside retrieval: its batch, where only some rows of a step retrieve.

Stock attention runs over all rows, and those of requests all of whose rows retrieve are cut to one
entry each, which costs it nothing. Retrieval then overwrites their output.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import AttentionGroup

from vllm_kvx.worker.decode.step import HookedLayer, RetrievalStep
from vllm_kvx.worker.shared_attn_metadata import AttentionGroups


class BesideStock:
    """The batches and attention groups of the layers that retrieve, for stock attention.

    lens: (S, max requests) int32, what stock attention sees of each row; at a fixed address, for
        CUDA graphs.
    """

    def __init__(
        self,
        layers: Sequence[HookedLayer],
        num_stages: int,
        max_num_reqs: int,
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """layers: those that retrieve."""
        self._layers, self._vllm_config, self._device = layers, vllm_config, device
        self.lens = torch.zeros(num_stages, max_num_reqs, dtype=torch.int32, device=device)
        self._groups: AttentionGroups | None = None

    def bind(self) -> None:
        """vLLM has allocated another KV cache: its attention groups are new."""
        self._groups = None

    def batch(
        self,
        step: RetrievalStep | None,
        stage: int,
        batch: InputBatch,
        attn_groups: AttentionGroups,
        all_groups: AttentionGroups,
    ) -> tuple[InputBatch, AttentionGroups]:
        """The batch and the attention groups for stock attention; see ``Retrieval.stock_batch``."""
        groups = [
            theirs if mine else []
            for theirs, mine in zip(self.own_groups(all_groups), attn_groups, strict=True)
        ]
        num_reqs = batch.num_reqs_after_padding
        lens = self.lens[stage, :num_reqs]
        bounds = batch.seq_lens_cpu_upper_bound
        if step is None:
            lens.copy_(batch.seq_lens[:num_reqs])
        else:
            cut = np.zeros(num_reqs, dtype=np.int32)
            cut[: step.whole.shape[1]] = step.whole[stage]
            rows = async_tensor_h2d(cut, device=self._device)
            lens.copy_(torch.where(rows > 0, rows, batch.seq_lens[:num_reqs]))
            assert bounds is not None
            on_host = torch.from_numpy(cut)
            bounds = torch.where(on_host > 0, on_host, bounds[:num_reqs])
        return replace(batch, seq_lens=lens, seq_lens_cpu_upper_bound=bounds), groups

    def own_groups(self, attn_groups: AttentionGroups) -> AttentionGroups:
        """The attention groups of the layers that retrieve, with metadata builders of their own.

        A builder keeps the metadata of one batch. attn_groups: all of the model's, by KV group.
        """
        if self._groups is None:
            retrieving = {hook.layer.layer_name for hook in self._layers}
            self._groups = []
            for groups in attn_groups:
                self._groups.append([])
                for group in groups:
                    names = [name for name in group.layer_names if name in retrieving]
                    if not names:
                        continue
                    own = AttentionGroup(
                        group.backend, names, group.kv_cache_spec, group.kv_cache_group_id
                    )
                    own.create_metadata_builders(
                        self._vllm_config, self._device, group.kv_cache_spec.block_size
                    )
                    self._groups[-1].append(own)
        return self._groups
