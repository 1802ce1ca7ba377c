"""The ideals that measurements are held against, checked by hand-made numbers."""

from dataclasses import replace

import pytest
from support.configs import GLM_AIR

from benchmarks.engine import ideal, shapes
from vllm_kvx.tools.ideal import work as counted
from vllm_kvx.tools.ideal.shape import Shape

LLAMA = shapes.SHAPES["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama-3.1-8b", 8.03e9),
        ("qwen2.5-7b", 7.62e9),
        ("qwen2.5-14b", 14.77e9),
        ("qwen2.5-32b", 32.76e9),
    ],
)
def test_shapes_have_the_weights_of_their_models(name: str, weights: float) -> None:
    shape = shapes.SHAPES[name]
    count = shape.layers * shape.layer_weights + 2 * shape.head_weights
    assert count == pytest.approx(weights, rel=1e-3)


def test_experts_that_are_read() -> None:
    """Qwen3-30B-A3B: 30.5 billion weights, of which a token uses 3.3 billion."""
    shape = shapes.SHAPES["qwen3-30b-a3b"]
    used = shape.layers * shape.layer_weights + 2 * shape.head_weights
    assert used == pytest.approx(3.35e9, rel=1e-2)
    assert shape.weights_read(1) == pytest.approx(shape.layer_weights)
    every = shape.layers * shape.weights_read(100_000) + 2 * shape.head_weights
    assert every == pytest.approx(30.53e9, rel=1e-3)
    # Sixteen tokens of 8 experts each choose 64% of 128.
    experts = 3 * shape.hidden * shape.expert_size * shape.experts
    more = shape.weights_read(16) - shape.weights_read(1)
    assert more / experts == pytest.approx(0.6439 - 1 / 16, rel=1e-3)


def test_dense_layers_and_experts_that_every_token_runs() -> None:
    """GLM-4.5-Air: 106 billion weights, of which a token uses 12 billion in its layers."""
    shape = Shape.from_config(GLM_AIR)
    assert shape.all_read(100_000) + shape.head_weights == pytest.approx(106.8e9, rel=1e-2)
    used = sum(shape.weights_of(layer) for layer in range(shape.layers))
    assert used == pytest.approx(12.2e9, rel=1e-2)
    assert shape.all_read(1) == pytest.approx(used + shape.head_weights)
    attention = 2 * 4096 * 128 * (96 + 8)
    assert shape.weights_of(0) == attention + 3 * 4096 * 10944
    assert shape.weights_of(1) == attention + 4096 * (3 * 9 * 1408 + 128)
    assert shapes.shape_of(shape.as_dict()) == replace(shape, rope_theta=5e5)


def test_layers_that_keep_a_state() -> None:
    """Qwen3-Next-80B-A3B: 80 billion weights, of which a token uses 3 billion in its layers."""
    shape = replace(shapes.SHAPES["qwen3-next-16-layers"], layers=48)
    assert shape.all_read(100_000) + shape.head_weights == pytest.approx(79.6e9, rel=1e-2)
    used = sum(shape.weights_of(layer) for layer in range(shape.layers))
    assert used + shape.head_weights == pytest.approx(3.6e9, rel=5e-2)
    assert shape.full_layers == 12
    # Entries of all that a step reads at 1,000 tokens are those of the layers with attention.
    work = counted.work_in(shape, None, 1000)
    assert work is not None
    assert sum(work.read) == 12_000


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shape_survives_its_config(name: str) -> None:
    shape = shapes.SHAPES[name]
    again = Shape.from_config(shape.config())
    assert {**again.as_dict(), "extra": {}, "rope_theta": 0.0} == {
        **shape.as_dict(),
        "extra": {},
        "rope_theta": 0.0,
    }


def test_prefill_flops_by_hand() -> None:
    shape = Shape("llama", 2, 8, 2, 1, 4, 16, 10, 64)
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q; k and v; o; gate, up, down
    pairs = 1 + 2 + 3
    expected = 2 * (3 * 2 * weights + 4 * 2 * 4 * pairs) + 2 * 8 * 10
    assert counted.prefill_flops(shape, counted.full_work(2, 3)) == expected


def test_attention_over_an_fp8_cache_counts_half() -> None:
    """At 130,000 tokens of this shape it is 70.9% of the FLOPs."""
    work = counted.full_work(32, 130000)
    whole, in_fp8 = (counted.prefill_flops(LLAMA, work, kv) for kv in (2, 1))
    assert whole - in_fp8 == 2 * 32 * 128 * 32 * 130000 * 130001 / 2
    case = ideal.Case.parse("ttft:130000")
    against_itself = ideal.case_ratio(LLAMA, case, None, stock_kv_bytes=1, kv_bytes=1)
    assert against_itself == 1
    over_stock = ideal.case_ratio(LLAMA, case, None, stock_kv_bytes=2, kv_bytes=1)
    assert over_stock == pytest.approx(whole / in_fp8)
    # What a policy leaves out is counted on top.
    with_speed = ideal.case_ratio(LLAMA, case, "speed-24", stock_kv_bytes=2, kv_bytes=1)
    assert with_speed == pytest.approx(over_stock * 32 / 23, rel=0.01)


@pytest.mark.parametrize("length", [32768, 130000])
@pytest.mark.parametrize(("policy", "layers"), [("speed-24", 23), ("speed-16", 15)])
def test_prefill_ratio_of_speed(policy: str, layers: int, length: int) -> None:
    """Layer K - 1 makes entries alone: less than 2% of a layer."""
    ratio = counted.prefill_ratio(LLAMA, policy, length)
    assert ratio is not None and 32 / (layers + 0.04) < ratio < 32 / layers


def test_rows_that_go_on_see_all_of_the_last_full_layer() -> None:
    work = counted.work_of("speed-3:anchors=2,tail=3", 5, 100)
    assert work is not None
    assert work.rows == (100, 100, 5, 5, 5) and work.projected == (0, 0, 95, 0, 0)
    assert work.pairs == (5050, 5050, 1 + 2 + 98 + 99 + 100, 15, 15)
    assert work.stored == (100, 100, 100, 5, 5)
    work = counted.work_of("gemfilter:layer=2,rate=0.5,kv_floor=0", 5, 100)
    assert work is not None and work.rows == (150, 150, 50, 50, 50)
    assert work.pairs == (5050 + 1275,) * 2 + (1275,) * 3 and work.projected == (0, 0, 100, 0, 0)


@pytest.mark.parametrize(("policy", "ratio"), [("speed-24", 1.15), ("speed-16", 1.36)])
def test_decode_ratio_of_speed_at_130k(policy: str, ratio: float) -> None:
    assert counted.decode_ratio(LLAMA, policy, 130000) == pytest.approx(ratio, abs=0.005)


def test_decode_ratio_tends_to_layers_over_cutoff_with_the_batch() -> None:
    ratios = [counted.decode_ratio(LLAMA, "speed-16", 130000, batch=b) for b in (1, 8, 64, 4096)]
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(2.0, rel=1e-3)


def test_decode_ratio_counts_the_larger_batch() -> None:
    same = counted.decode_ratio(LLAMA, "speed-16", 128000, batch=7)
    larger = counted.decode_ratio(LLAMA, "speed-16", 128000, batch=14, stock_batch=7)
    assert same is not None and larger is not None
    work = counted.work_of("speed-16", 32, 128000)
    assert work is not None
    bytes_7, bytes_14 = (counted.decode_bytes(LLAMA, work, b) for b in (7, 14))
    assert larger == pytest.approx(same * 2 * bytes_7 / bytes_14)


def test_decode_bytes_by_hand() -> None:
    work = counted.full_work(32, 130000)
    weights = 32 * LLAMA.layer_weights + LLAMA.head_weights
    cache = 130000 * 32 * 2 * 8 * 128
    assert counted.decode_bytes(LLAMA, work) == 2 * (weights + cache)
    assert counted.decode_bytes(LLAMA, work, kv_bytes=1) == 2 * weights + cache
    more = counted.decode_bytes(LLAMA, work, batch=3, generated=100)
    assert more == 2 * weights + 3 * 2 * cache * 130100 / 130000


def test_a_sidecar_is_not_smaller_in_an_fp8_cache() -> None:
    work = counted.work_of("fier-1024", 32, 131072)
    assert work is not None
    weights = 2 * (32 * LLAMA.layer_weights + LLAMA.head_weights)
    values = 2 * 131072 + 30 * 1024 + 2 * 30 * 131072 / 16
    read = counted.decode_bytes(LLAMA, work, kv_bytes=1) - weights
    assert read == pytest.approx(values * 2 * 8 * 128)
    # Stock with a 16-bit cache reads what it always reads.
    mixed = counted.decode_ratio(LLAMA, None, 131072, kv_bytes=1, stock_kv_bytes=2)
    stock = counted.full_work(32, 131072)
    bytes_ = [counted.decode_bytes(LLAMA, stock, kv_bytes=kv) for kv in (2, 1)]
    assert mixed == bytes_[0] / bytes_[1]
    assert [counted.entry_bytes(d) for d in (None, "auto", "fp8", "turboquant_4bit_nc")] == [
        *(2, 2, 1, None)
    ]
    # A float32 scale for the 128 channels of a head.
    int8 = "int8_per_token_head"
    assert counted.entry_bytes(int8, head_dim=128) == 1 + 4 / 128
    assert counted.entry_bytes(int8) is None
    mean = counted.mean_entry_bytes(f"{int8}-skip-0-1", 32, 128)
    # Of two numbers, with 1-bit keys: what docs/notebook/int8-cache.md has.
    assert mean is not None and 8 * 128 * 2 * mean + 30 / 32 * 256 == 2476


def test_layers_that_skip_the_cache() -> None:
    """`stock@fp8-skip-0-1` at 131,072 tokens: two layers of 32 read twice as much of each."""
    names = (None, "auto-skip-0", "fp8-skip-0-1", "turboquant_4bit_nc-skip-0")
    found = [counted.entry_bytes_of(name, 4) for name in names]
    assert found == [2, (2, 2, 2, 2), (2, 2, 1, 1), None]
    assert counted.entry_bytes_of("fp8-skip-sliding_window", 4) is None
    kv = counted.entry_bytes_of("fp8-skip-0-1", 32)
    assert kv is not None and counted.mean_bytes(kv) == 34 / 32
    weights = 2 * (32 * LLAMA.layer_weights + LLAMA.head_weights)
    stock = counted.full_work(32, 131072)
    values = 34 * 131072
    assert counted.decode_bytes(LLAMA, stock, kv_bytes=kv) == weights + values * 2 * 8 * 128
    # FIER reads all of the very layers that skip it.
    fier = counted.work_of("fier-1024", 32, 131072)
    assert fier is not None
    values = 2 * 2 * 131072 + 30 * 1024 + 2 * 30 * 131072 / 16
    read = counted.decode_bytes(LLAMA, fier, kv_bytes=kv) - weights
    assert read == pytest.approx(values * 2 * 8 * 128)
    whole, in_fp8, mixed = (counted.attention_flops(LLAMA, stock, each) for each in (2, 1, kv))
    assert mixed == whole * 2 / 32 + in_fp8 * 30 / 32


@pytest.mark.parametrize(
    ("model", "policy"),
    [("llama-3.1-8b", "speed-24"), ("qwen2.5-7b", "speed-24"), ("qwen3-8b", "speed-12")],
)
def test_pool_ratio_is_layers_over_cutoff(model: str, policy: str) -> None:
    shape = shapes.SHAPES[model]
    cutoff = int(policy.removeprefix("speed-"))
    assert counted.pool_ratio(shape, policy) == pytest.approx(shape.layers / cutoff, rel=1e-4)


@pytest.mark.parametrize("policy", [None, "full"])
def test_full_gains_nothing(policy: str | None) -> None:
    assert counted.prefill_ratio(LLAMA, policy, 32768) == 1
    assert counted.decode_ratio(LLAMA, policy, 32768, batch=4) == 1
    assert counted.pool_ratio(LLAMA, policy) == 1


def test_prompt_within_anchors_and_tail_gains_nothing() -> None:
    assert counted.prefill_ratio(LLAMA, "speed-16:anchors=8,tail=8", 16) == 1


def test_two_methods_gain_together() -> None:
    speed = counted.work_of("speed-24", 32, 32768)
    both = counted.work_of("speed-24+fier-1024", 32, 32768)
    kept = counted.work_of("speed-24+snapkv:kv_floor=0", 32, 32768)
    assert speed is not None and both is not None and kept is not None
    assert both.rows == kept.rows == speed.rows and both.stored == speed.stored
    assert both.read[:2] == (32768, 32768) and both.read[24:] == (2,) * 8
    assert both.read[2] == 1024 + 32768 / 16
    assert kept.stored == kept.read == (3276,) * 24 + (2,) * 8


def test_swiftkv_saves_prefill_and_projects_what_it_stores() -> None:
    work = counted.work_of("swiftkv-24", 32, 10000)
    assert work is not None
    assert work.rows == (10000,) * 24 + (1,) * 8
    assert work.pairs == (10000 * 10001 // 2,) * 24 + (10000,) * 8
    assert work.stored == work.read == (10000,) * 32
    assert work.projected == (0,) * 24 + (10000,) * 8
    # 2 matrices of 4096 x 1024 a token in eight layers, 2 FLOPs an element.
    bare = counted.prefill_flops(LLAMA, replace(work, projected=()))
    assert counted.prefill_flops(LLAMA, work) - bare == 8 * 10000 * 2 * 2 * 4096 * 1024
    speed = counted.prefill_ratio(LLAMA, "speed-24", 10000)
    swift = counted.prefill_ratio(LLAMA, "swiftkv-24", 10000)
    assert speed is not None and swift is not None and 1.25 < swift < speed < 32 / 23


@pytest.mark.parametrize(
    ("policy", "sidecar"),
    [
        # A code bit is 1/32 of a 16-bit key and value, a scale and a zero are 1/group.
        ("fier-1024", 1 / 32 + 1 / 32),
        ("fier-1024:group=128", 1 / 32 + 1 / 128),
        ("quest-1024", 1 / 16),
    ],
)
def test_retrieval_saves_what_decode_reads(policy: str, sidecar: float) -> None:
    work = counted.work_of(policy, 32, 131072)
    assert work is not None
    assert work.read == (131072, 131072) + (1024 + 131072 * sidecar,) * 30
    assert work.sidecar == (0, 0) + (131072 * sidecar,) * 30
    assert work == replace(counted.full_work(32, 131072), read=work.read, sidecar=work.sidecar)
    assert counted.prefill_ratio(LLAMA, policy, 131072) == counted.pool_ratio(LLAMA, policy) == 1
    ratio = counted.decode_ratio(LLAMA, policy, 131072)
    assert ratio is not None and ratio > 1
    of_three = counted.work_of(f"{policy}{',' if ':' in policy else ':'}reuse_layers=3", 32, 131072)
    chosen, others = (1024 + 131072 * sidecar,), (1024,) * 2
    assert of_three is not None and of_three.read == (131072, 131072) + (chosen + others) * 10
    for short in (policy, "fier-64:dense_below=1001"):
        assert counted.work_of(short, 32, 1000) == counted.full_work(32, 1000)


FASTKV = "fastkv:tsp_layer=15,tsp_rate=0.2,kv_rate=0.1,kv_floor=0"


@pytest.mark.parametrize(("length", "ratio"), [(32768, 1.83), (130000, 1.93)])
def test_prefill_ratio_of_fastkv(length: int, ratio: float) -> None:
    assert counted.prefill_ratio(LLAMA, FASTKV, length) == pytest.approx(ratio, abs=0.005)


def test_retention_is_what_decode_reads_and_the_pool_holds() -> None:
    for policy in (FASTKV, "snapkv:kv_floor=0"):
        work = counted.work_of(policy, 32, 130000)
        assert work is not None and set(work.stored) == set(work.read) == {13000}
        assert counted.pool_ratio(LLAMA, policy) == pytest.approx(10, rel=1e-4)
        short = counted.full_work(32, 13000)
        assert counted.decode_bytes(LLAMA, work) == counted.decode_bytes(LLAMA, short)
    assert counted.prefill_ratio(LLAMA, "snapkv:kv_floor=0", 32768) == 1
    work = counted.work_of("fastkv:tsp_layer=15,kv_rate=0.3,kv_floor=0", 32, 1000)
    assert work is not None and work.stored == (300,) * 16 + (200,) * 16
    work = counted.work_of("streamingllm", 2, 5000)
    assert work is not None and work.stored == (1024, 1024)


def test_structkv_counts_as_fastkv_does() -> None:
    for length in (5, 32768, 130000):
        structkv, fastkv = (
            counted.work_of(name, 32, length) for name in ("structkv:pivot=15,kv_floor=0", FASTKV)
        )
        assert structkv is not None and structkv == fastkv
    work = counted.work_of(
        "structkv:pivot=2,struct_rate=0.3,kv_rate=0.5,kv_floor=0,window=64", 4, 1000
    )
    assert work is not None
    assert work.rows == (1000, 1000, 300, 300) and work.projected == (0, 0, 700, 0)
    # A chosen row is anywhere.
    assert work.pairs[2:] == (300 * 1001 // 2, 300 * 301 // 2)
    assert work.stored == work.read == (500, 500, 500, 300)
    work = counted.work_of("structkv:pivot=0,kv_floor=0,window=64", 2, 100)
    assert work is not None and (work.rows, work.stored) == ((64, 64), (64, 64))


@pytest.mark.parametrize(("model", "pivot"), [("qwen2.5-7b", 12), ("qwen2.5-32b", 28)])
def test_ratios_of_structkv_at_other_depths(model: str, pivot: int) -> None:
    shape, policy = shapes.SHAPES[model], f"structkv:pivot={pivot}"
    length, layers, lower = 100000, shape.layers, pivot + 1
    rows = pivot * length + (layers - pivot) * length // 5
    pairs = (pivot + 1 / 5 + (layers - lower) / 25) * length**2 / 2
    flops = 2 * shape.layer_weights * rows + 4 * shape.heads * shape.head_dim * pairs
    flops += 4 * shape.hidden * shape.kv_heads * shape.head_dim * length * 4 // 5
    work = counted.work_of(policy, layers, length)
    assert work is not None
    assert counted.prefill_flops(shape, work) == pytest.approx(flops, rel=1e-4)
    cache = 2 * layers * (length // 10) * 2 * shape.kv_heads * shape.head_dim
    weights = 2 * (layers * shape.layer_weights + shape.head_weights)
    assert counted.decode_bytes(shape, work) == weights + cache
    assert counted.pool_ratio(shape, policy) == pytest.approx(10, rel=1e-4)


@pytest.mark.parametrize(
    ("policy", "length", "stored"),
    [
        # 63 blocks below and 13 above, the last of each with 8 entries: 7 of them stay.
        ("structkv:pivot=2,kv_floor=0", 1000, (104, 104, 104, 104)),
        # 64 whole blocks, 13 with 12 entries in the last: 7 again.
        ("structkv:pivot=2,kv_floor=0", 1024, (112, 112, 112, 108)),
        # The window, 60 .. 99, lies in 4 of 7 blocks; above there is nothing else, in 3.
        ("structkv:pivot=2,kv_rate=0.01,kv_floor=0,window=40", 100, (52, 52, 52, 40)),
        ("structkv:pivot=2,kv_rate=0.5,kv_floor=0", 1000, (504, 504, 504, 200)),
        ("structkv:pivot=2,kv_floor=0", 10, (10, 10, 10, 8)),
    ],
)
def test_whole_blocks_stay(policy: str, length: int, stored: tuple[int, ...]) -> None:
    work = counted.work_of(f"{policy},granularity=block", 4, length)
    token = counted.work_of(policy, 4, length)
    assert work is not None and token is not None
    assert work.stored == work.read == stored
    assert (work.rows, work.pairs) == (token.rows, token.pairs)


@pytest.mark.parametrize(
    "policy", ["structkv:pivot=online,kv_floor=0", "structkv:kv_floor=0", "fastkv:kv_floor=0"]
)
def test_a_name_without_the_layer_has_no_ideal(policy: str) -> None:
    assert counted.prefill_ratio(LLAMA, policy, 32768) is None
    assert counted.decode_ratio(LLAMA, policy, 32768) is None
    assert counted.pool_ratio(LLAMA, policy) is None


def test_what_selects_nothing_needs_no_layer() -> None:
    for policy in ("structkv:struct_rate=1,kv_floor=0", "fastkv:kv_floor=0,tsp_rate=1"):
        assert counted.work_of(policy, 32, 5000) == counted.work_of("snapkv:kv_floor=0", 32, 5000)


def test_rows_leave_among_layers_that_slide() -> None:
    shape = Shape("gemma3_text", 4, 8, 2, 1, 4, 16, 10, 4096, full_every=2, window=100)
    work = counted.work_in(shape, "speed-2", 1000)
    # Layers 0 and 2 slide; of the layer below the cut two rows go on.
    assert work.rows == (1000, 2, 2, 2)
    assert work.stored == work.read == (100, 1000, 2, 2)
    assert work.pairs[0] == 100 * 101 // 2 + 900 * 100 and work.pairs[2] == 3
    full = counted.work_in(shape, None, 1000)
    assert sum(full.stored) == 2200
    assert counted.prefill_ratio(shape, "speed-2", 1000) > 1.5
