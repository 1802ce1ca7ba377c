"""A layer's cache in 8 bits: its pages, the kernels over them, and the benchmark's way through."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from benchmarks.common.files import ROOT
from benchmarks.ops import int8_accuracy, int8_pages
from benchmarks.ops import int8_cache as bench
from benchmarks.ops.int8_checks import checks
from benchmarks.ops.int8_pages import LAYOUTS, Int8Pages, page_bytes
from benchmarks.ops.int8_prefill_ways import Way
from benchmarks.ops.retrieval_layer import LLAMA_8B, ON_GPU, block_bytes
from vllm_kvx.indexes.table import INDEXES
from vllm_kvx.ops.int8.numbers import quantized, undone

pytestmark = pytest.mark.usefixtures("one_thread")


def test_kernels_compute_what_plain_torch_does() -> None:
    """Store, codes, undo, prefill and decode, by both layouts; vLLM's kernels among them."""
    if ON_GPU:
        pytest.skip("a GPU's bfloat16 is measured by the benchmark itself")
    found = list(checks(bench.DRY))
    assert not [line for line in found if "error" in line]
    # Five lines of stores for each layout, ten ways of prefill over two contexts, and decode.
    assert len(found) == 10 + 20 + 8
    assert all(line["off_by"] < 1e-5 for line in found), found
    assert all(line.get("differ", 0) == line.get("beside", 0) == 0 for line in found)
    assert all(line.get("scales_off_by", 0) < 1e-6 for line in found)


def test_numbers_are_at_most_half_a_step_off() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 32)
    x[1, 1] = 0
    numbers, scales = quantized(x)
    assert numbers.abs().amax(dim=-1).flatten().tolist() == [127] * 4 + [0] + [127] * 10
    assert ((undone(numbers, scales) - x).abs() <= scales[..., None] * 0.5001).all()
    rough, rough_scales = quantized(x, torch.bfloat16)
    assert rough_scales.dtype == torch.bfloat16
    # The numbers make up for a scale that was rounded, but for the largest ones.
    assert (undone(rough, rough_scales) - x).abs().max() < 2 * float(scales.max())


def test_inline_pages_are_those_of_vllm() -> None:
    """As its backend asks for them, and finds the scales in them."""
    spec: Any = TritonAttentionBackend.customize_spec(
        FullAttentionSpec(
            block_size=LLAMA_8B.block_size,
            num_kv_heads=LLAMA_8B.kv_heads,
            head_size=LLAMA_8B.head_dim,
            dtype=torch.int8,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
        )
    )
    room = INDEXES["one_bit"].page_bytes(LLAMA_8B.page_shape)
    assert spec.page_size_bytes + room == page_bytes(LLAMA_8B, "inline")
    pages = Int8Pages.empty(LLAMA_8B, 3, "inline")
    width = spec.state_content_size_bytes
    paged = pages.paged
    blocks, heads, size, _ = paged.keys.shape
    cache = paged.keys.as_strided((blocks, heads, size, width), paged.keys.stride())
    impl = object.__new__(TritonAttentionImpl)
    impl._kv_quant_mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    keys, values = impl._pth_key_value_caches(cache)
    assert keys.data_ptr() == paged.keys.data_ptr()
    assert values.data_ptr() == paged.values.data_ptr()
    for theirs, ours in (
        (impl._k_scale_cache, paged.key_scales),
        (impl._v_scale_cache, paged.value_scales),
    ):
        assert theirs is not None and ours is not None and theirs.data_ptr() == ours.data_ptr()
        assert theirs.transpose(1, 2).stride() == ours.stride()
        assert theirs.transpose(1, 2).shape == ours.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_in_a_page_lies_on_another(layout: str) -> None:
    pages = Int8Pages.empty(bench.DRY, 2, layout)
    paged = pages.paged
    assert paged.key_scales is not None and paged.value_scales is not None
    views = (paged.keys, paged.values, paged.key_scales, paged.value_scales)
    views += (pages.sidecar.codes, pages.sidecar.scales)
    raw = torch.zeros(2 * pages.page_bytes, dtype=torch.uint8)
    raw.set_(paged.keys.untyped_storage())  # type: ignore[call-overload]
    assert raw.numel() == 2 * pages.page_bytes
    # Numbers none of whose bytes is zero.
    ones = {1: 1, 2: 0x0101, 4: 0x01010101}
    types = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    for number, view in enumerate(views):
        size = view.itemsize
        assert not view.view(types[size]).any(), number
        view.view(types[size]).fill_(ones[size])
    assert (raw == 1).all()


def test_a_pool_of_8_bits_holds_less_than_twice_as_much() -> None:
    found = int8_pages.token_bytes(LLAMA_8B)
    assert found["16 bits, 1-bit keys"]["bytes"] * 32 == block_bytes(LLAMA_8B, torch.bfloat16)
    ours = found["int8, fp32 scales, 1-bit keys"]
    assert ours["bytes"] * 32 == page_bytes(LLAMA_8B, "apart") == page_bytes(LLAMA_8B, "inline")
    assert ours["bytes"] == 8 * (256 + 8 + 32)
    assert (ours["more_than_stock"], ours["more_than_fier"]) == (1.7297, 1.8378)
    assert found["int8, bf16 scales, 1-bit keys"]["more_than_fier"] == 1.863
    # An entry of 264 bytes lies in nine sectors of 32, wherever it begins; and so do 256 and two
    # scales elsewhere.
    assert {int8_pages.sectors_of_an_entry(LLAMA_8B, layout) for layout in LAYOUTS} == {288}
    assert int8_pages.sectors_of_an_entry(LLAMA_8B, "16 bits") == 512


def test_8_bit_integers_keep_more_than_fp8() -> None:
    torch.manual_seed(0)
    found = list(int8_accuracy.lines(bench.DRY, 256, 64))
    assert len(found) == 4 * 2 * 2 * 3

    def errors(rounding: str) -> list[float]:
        """Not of tails that are heavier: there few numbers leave little to the others."""
        lines = (line for line in found if line["rounding"] == rounding)
        keys = ("random", "biased channels")
        return [1 - line["cosine"] for line in lines if line["keys"] in keys]

    pairs = list(zip(errors("int8, fp32 scales"), errors("fp8, fp32 scales"), strict=True))
    assert len(pairs) == 8 and all(ours < 0.3 * theirs for ours, theirs in pairs), pairs


def test_a_way_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def fails() -> Way:
        raise RuntimeError("no room\nand more")

    ran: list[int] = []
    ways = {"fails": fails, "16 bits": lambda: Way(lambda: ran.append(1))}
    ways["undone"] = lambda: Way(lambda: ran.append(2), 10, 20)
    lines = list(bench.timed_ways({"context": 3}, ways, 2, 1.0))
    assert [line["way"] for line in lines] == ["fails", "16 bits", "undone"]
    assert lines[0]["error"] == "no room"
    assert lines[1]["lost"] == 0 and ran == [1, 2] * 3
    assert lines[2]["scratch_bytes"] == 10
    assert lines[2]["ideal_ms"] == pytest.approx(lines[1]["ms"] + 0.02, abs=1e-3)
    # Nor does it matter which: what others are held against is missing then.
    lines = list(bench.timed_ways({}, {"16 bits": fails, "undone": ways["undone"]}, 1, 1.0))
    assert "error" in lines[0] and "ms" in lines[1] and "lost" not in lines[1]


def test_a_part_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> Iterator[dict[str, Any]]:
        yield {"context": 0, "chunk": 1, "error": "no room"}
        raise RuntimeError

    out = tmp_path / "out.json"
    monkeypatch.setattr(bench, "prefill", fails)
    bench.main(["--dry", "--output", str(out), "--parts", "prefill", "accuracy"])
    report = json.loads(out.read_text())
    assert [line["error"] for line in report["prefill"]] == ["no room", "RuntimeError"]
    assert len(report["accuracy"]) == 48 and not report["decode"]
    assert "| 0 | 1 | - | no room | - | - | 0.0 |" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    bench.main(["--dry", "--output", str(out), "--time-limit", "0"])
    report = json.loads(out.read_text())
    assert report["cut_off"] and not report["prefill"] and not report["decode"]
    assert report["token_bytes"]["16 bits"]["more_than_stock"] == 1
    with pytest.raises(SystemExit):
        bench.parse_args(["--output", "out.json", "--chunk", "100"])
    assert "give a multiple of 32" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_dry_run_measures_every_way(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    bench.main(["--dry", "--output", str(out), "--commit", "c"])
    report = json.loads(out.read_text())
    assert not report["cut_off"]
    lines = [line for part in bench.PARTS for line in report[part]]
    failed = {line["way"] for line in lines if "error" in line}
    in_cuda = {line["way"] for line in lines if line.get("way", "").endswith("CUDA")}
    assert len(in_cuda) == 4 and failed == (set() if ON_GPU else in_cuda)
    pairs = {(line["context"], line["chunk"]) for line in report["prefill"]}
    assert pairs == {(0, 64), (96, 64), (96, 32)}
    assert {line["tokens"] for line in report["store"]} == {64, 24, 1}


@pytest.mark.nightly
def test_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and vLLM's, in a process of its own: the tests' Triton interprets kernels."""
    for variable in ("TRITON_INTERPRET", "KVX_CPU"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    run = [sys.executable, "-m", "support.int8_compiles"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    by_layout = json.loads(done.stdout.splitlines()[-1])
    reads = ("_undo_kernel", "_attend_kernel", "kernel_unified_attention")
    for layout, compiled in by_layout.items():
        # Of several launches of one kernel those that compile it anew.
        names = [name for name, _ in compiled]
        assert len(names) == 9 and names.count("_undo_kernel") == 1
        # Entries that begin every 264 bytes are read a byte at a time, by vLLM's kernel too.
        by_byte = {name: count for name, count in compiled if name in reads}
        assert set(by_byte) == set(reads)
        assert all((count > 0) == (layout == "inline") for count in by_byte.values()), by_byte
