"""Attention over what is retrieved, and retrieval as a whole, against their references."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.ragged import NO_BLOCK, make_sinks
from support.retrieved_layers import (
    FP8,
    INT8,
    SCALE,
    SHAPES,
    Layer,
    Shape,
    expected_scores,
    label,
    rows_of,
    with_each_shape,
)
from torch import Tensor

from vllm_kvx.equations.retrieval import num_full_groups, select_units
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.attend import attend, attend_reference
from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE, Backends, choose_backend
from vllm_kvx.ops.retrieval.retrieve import Scratch, retrieve, splits_of
from vllm_kvx.ops.retrieval.rows import RetrievalRows, offsets_of, pack, room_of

pytestmark = pytest.mark.usefixtures("bfloat16_in_the_interpreter")


class TestAttend:
    @with_each_shape("splits", [8, 1, 3])
    def test_matches_reference(self, shape: Shape, splits: int, device: str) -> None:
        self.check(shape, splits, device)

    def test_fp8(self, device: str) -> None:
        self.check(FP8, 2, device, key_scale=0.5, value_scale=2.0)

    @pytest.mark.parametrize("shape", INT8, ids=label)
    def test_int8(self, shape: Shape, device: str) -> None:
        sinks = make_sinks(shape.heads, device)
        self.check(shape, 2, device)
        self.check(shape, 1, device, key_scale=0.5, value_scale=2.0, soft_cap=0.7, sinks=sinks)

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize(
        ("soft_cap", "sink_dtype"),
        [(None, torch.float32), (0.7, None), (0.7, torch.bfloat16)],
        ids=str,
    )
    def test_soft_caps_and_sinks(
        self, soft_cap: float | None, sink_dtype: torch.dtype | None, splits: int, device: str
    ) -> None:
        shape = SHAPES[0]
        sinks = None if sink_dtype is None else make_sinks(shape.heads, device, sink_dtype)
        self.check(shape, splits, device, key_scale=0.5, soft_cap=soft_cap, sinks=sinks)

    def test_reference_caps_and_sinks_as_written_out(self, device: str) -> None:
        layer = Layer.of(SHAPES[0], 0, device)
        cap, sinks, index = 0.7, make_sinks(2, device), torch.arange(9, device=device)
        one = PagedKV(layer.paged.keys[:, :1], layer.paged.values[:, :1])
        query, table = layer.query(1)[0, :2], layer.tables[0]
        ours = attend_reference(query, one, table, index, SCALE, soft_cap=cap, sinks=sinks)
        blocks, slots = table[index // one.block_size].long(), index % one.block_size
        keys, values = (x[blocks, 0, slots].double() for x in (one.keys, one.values))
        for head in range(2):
            weights = (cap * torch.tanh(keys @ query[head].double() * SCALE / cap)).exp()
            expected = weights @ values / (weights.sum() + sinks[head].double().exp())
            torch.testing.assert_close(ours[head].double(), expected, rtol=1e-4, atol=1e-5)

    def check(
        self,
        shape: Shape,
        splits: int,
        device: str,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        layer, host = Layer.of(shape, 0, device), rows_of(shape, device)
        rows, count = host.on_device, len(host.lens)
        query, share = layer.query(count + 2), shape.heads // shape.kv_heads
        rng = torch.Generator().manual_seed(2)
        most = max(host.units(r) for r in range(count)) + 3
        # What is listed past the count, or at all of an idle row, leads nowhere.
        indices = torch.full((count, shape.kv_heads, most), NO_BLOCK, dtype=torch.int32)
        counts = torch.full((count, shape.kv_heads), 1, dtype=torch.int32)
        for r in range(count):
            for g in range(shape.kv_heads):
                # Heads read different units, and different numbers of them.
                number = max(1, host.units(r) * (g + 2) // 4) if host.lens[r] else 1
                number = min(number, max(host.units(r), 1))
                chosen = torch.randperm(host.units(r), generator=rng)[:number].sort().values
                # The newest unit, which need not be full, is always among them.
                if host.lens[r]:
                    chosen[-1] = host.units(r) - 1
                    indices[r, g, :number] = chosen.int()
                counts[r, g] = number
        indices, counts = indices.to(device), counts.to(device)
        out = torch.full(query.shape, float("nan"), dtype=shape.dtype, device=device)
        parts = (count, shape.heads, splits)
        partial = torch.full((*parts, shape.head_dim), float("nan"), device=device)
        lse = torch.full(parts, float("nan"), device=device)
        attend(
            query,
            layer.paged,
            layer.tables,
            rows,
            indices,
            counts,
            partial,
            lse,
            out,
            unit=shape.unit,
            scale=SCALE,
            key_scale=key_scale,
            value_scale=value_scale,
            splits=splits,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        idle = torch.ones(count + 2, dtype=torch.bool)
        for r, length in enumerate(host.lens):
            if not length:
                continue
            idle[host.tokens[r]] = False
            for g in range(shape.kv_heads):
                units = indices[r, g, : counts[r, g]].long()
                entries = units[:, None] * shape.unit + torch.arange(shape.unit, device=device)
                entries = entries[entries < length]
                heads = slice(g * share, (g + 1) * share)
                one = layer.paged.of_head(g)
                expected = attend_reference(
                    query[host.tokens[r], heads],
                    one,
                    layer.tables[host.requests[r]],
                    entries,
                    SCALE,
                    key_scale,
                    value_scale,
                    soft_cap,
                    None if sinks is None else sinks[heads],
                )
                ours = out[host.tokens[r], heads].float()
                exact = shape.dtype == torch.float32
                near = dict(rtol=1e-4, atol=1e-5) if exact else dict(rtol=2e-2, atol=2e-2)
                torch.testing.assert_close(ours, expected, **near)
        assert out[idle].isnan().all(), "wrote rows that do not retrieve"


class TestRetrieve:
    @pytest.mark.parametrize(
        ("shape", "reduction", "soft_cap"),
        [
            (SHAPES[0], "max", None),
            (SHAPES[3], "softmax", None),
            (SHAPES[5], "sum", None),
            (SHAPES[6], "max", 0.7),
            (SHAPES[8], "softmax", None),
            (INT8[0], "max", None),
        ],
        ids=lambda value: label(value) if isinstance(value, Shape) else value,
    )
    def test_backends_agree(
        self, shape: Shape, reduction: str, soft_cap: float | None, device: str
    ) -> None:
        """The kernels one after the other against plain torch, and both against the policy.

        Whether a model caps its logits or has sinks, the same entries are read.
        """
        sinks = None if soft_cap is None else make_sinks(shape.heads, device)
        layer, host = Layer.of(shape, 0, device).fill(), rows_of(shape, device)
        count = len(host.lens)
        # No budget is less than a group, and only what is longer than the budget gets here.
        newest = shape.group // shape.unit
        host = replace(
            host,
            lens=[n if n > shape.group else 0 for n in host.lens],
            budgets=[max(budget, newest) for budget in host.budgets],
        )
        rows, query = host.on_device, layer.query(count + 2)
        found: list[dict[str, Any]] = []
        for backend in ("triton", "torch"):
            scratch = Scratch.of(
                shape.index,
                num_heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                max_rows=count,
                capacity=host.capacity,
                max_units=max(host.budgets),
                unit=shape.unit,
                reduction=reduction,
                device=torch.device(device),
                backend=backend,
            )
            assert scratch.capacity == host.capacity
            out = torch.full(query.shape, float("nan"), dtype=shape.dtype, device=device)
            retrieve(
                query,
                layer.paged,
                layer.sidecar,
                layer.tables,
                rows,
                scratch,
                out,
                scale=SCALE,
                key_scale=1.0,
                value_scale=1.0,
                soft_cap=soft_cap,
                sinks=sinks,
            )
            found.append({"out": out, "scratch": scratch})
        tolerance = 1e-4 if shape.dtype == torch.float32 else 2e-2
        ours, theirs = (f["out"].float() for f in found)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        for r, length in enumerate(host.lens):
            for f in found:
                assert (f["scratch"].counts[r] == min(host.units(r), host.budgets[r])).all()
            if not length:
                continue
            request, q = host.requests[r], query[host.tokens[r]]
            scores = expected_scores(layer, q, request, length, reduction).cpu()
            full = num_full_groups(length, shape.group) * (shape.group // shape.unit)
            for g in range(shape.kv_heads):
                budget = host.budgets[r] * shape.unit
                read = select_units(scores[g, :full], length, shape.group, shape.unit, budget)
                for f in found:
                    units = f["scratch"].indices[r, g, : f["scratch"].counts[r, g]].long().cpu()
                    entries = units[:, None] * shape.unit + torch.arange(shape.unit)
                    assert torch.equal(entries[entries < length], read), (r, g)


class TestRows:
    def test_scores_begin_where_vector_loads_may(self) -> None:
        lens = np.array([5, 0, 4, 17, 1])
        assert room_of(lens, 1).tolist() == [8, 0, 4, 20, 4]
        assert offsets_of(lens, 1).tolist() == [0, 8, 8, 12, 32]
        assert room_of(lens, 16).tolist() == [4, 0, 4, 4, 4]
        fields, offsets = pack(np.arange(5), np.arange(5), lens, lens, 1)
        assert fields.dtype == np.int32 and fields.shape == (4, 5)
        assert offsets.dtype == np.int64

    def test_offsets_of_a_large_batch(self) -> None:
        lens = np.full(64, 1 << 27, dtype=np.int64)
        assert offsets_of(lens, 1)[-1] == 63 << 27

    def test_empty_rows_do_nothing(self, device: str) -> None:
        rows = RetrievalRows.empty(4, torch.device(device))
        few = rows.first(2)
        assert not rows.lens.any() and len(few.lens) == len(few.offsets) == 2
        assert few.lens.data_ptr() == rows.lens.data_ptr()
        assert few.offsets.data_ptr() == rows.offsets.data_ptr()


class TestBackend:
    @pytest.mark.parametrize("name", ["triton", "torch"])
    def test_asked_for(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(BACKEND_VARIABLE, name)
        for device in ("cpu", "cuda") if name == "triton" else ("cpu",):
            backend, why = choose_backend(torch.device(device))
            assert backend == name and BACKEND_VARIABLE in why

    def test_what_there_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(BACKEND_VARIABLE, "numpy")
        with pytest.raises(ValueError, match="one of cuda, triton, torch, got 'numpy'"):
            choose_backend(torch.device("cpu"))
        monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
        with pytest.raises(ValueError, match="needs a GPU"):
            choose_backend(torch.device("cpu"))
        monkeypatch.setenv(BACKEND_VARIABLE, "torch")
        with pytest.raises(ValueError, match="is for CPUs"):
            choose_backend(torch.device("cuda"))

    def test_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
        assert choose_backend(torch.device("cpu"))[0] == "torch"
        assert choose_backend(torch.device("cuda"))[0] in ("cuda", "triton")

    @pytest.mark.parametrize(
        ("options", "ops", "why"),
        [
            ({}, "cuda", "built"),
            ({"reduction": "sum", "head_dim": 256, "share": 16}, "cuda", "built"),
            ({"reduction": "softmax"}, "score and select: triton, attend: cuda", "max or sum"),
            ({"dtype": torch.float32}, "triton", "not float32"),
            ({"head_dim": 32}, "triton", "64, 128, 256, not 32"),
            ({"share": 17, "reduction": "softmax"}, "triton", "at most 16 query heads"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_triton_where_there_is_no_cuda_op(
        self, options: dict[str, Any], ops: str, why: str
    ) -> None:
        query = {"dtype": torch.bfloat16, "head_dim": 128, "share": 4, "reduction": "max"}
        backends = Backends.of("cuda", "built", **(query | options))
        assert str(backends) == ops and why in backends.reason
        for backend in ("triton", "torch"):
            asked = Backends.of(backend, "set", **(query | options))
            assert str(asked) == backend and asked.reason == "set"

    def test_splits(self) -> None:
        assert splits_of(256, 1, 8) == 32
        assert splits_of(256, 1, 8, most=16) == 16
        assert splits_of(256, 100, 8) == 1
