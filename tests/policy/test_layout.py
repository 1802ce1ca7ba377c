"""Layouts: splits, what fits, and how many layers a KV group holds."""

import re
from dataclasses import replace

import pytest

from vllm_kvx.cache.group_size import GroupChoice, choose_group_size, group_layers
from vllm_kvx.policy.layout import Layout, RetrievalLayout, Stage, check_fits, layout_of
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.windows import Windows

FIER = RetrievalLayout("one_bit", group=32, unit=1, reduction="max", max_units=64)
QUEST = RetrievalLayout("page_bounds", group=16, unit=16, reduction="max", max_units=4)


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        ([], Layout(())),
        (["full"], Layout(())),
        (["speed-24"], Layout((24,))),
        (["speed-24", "speed-16", "speed-24:anchors=0", "full"], Layout((16, 24))),
        (["streamingllm"], Layout((), retain=True)),
        (["snapkv", "streamingllm"], Layout((), retain=True, window=8)),
        (["snapkv", "criticalkv"], Layout((), retain=True, window=8, value_norms=True)),
        (["snapkv:score=critical"], Layout((), retain=True, window=8, value_norms=True)),
        (["criticalkv:kv_rate=1"], Layout(())),
        (["snapkv", "snapkv:window=16"], Layout((), retain=True, window=16)),
        (
            ["snapkv", "snapkv:window=4,lookahead=9"],
            Layout((), retain=True, window=13, lookahead=9),
        ),
        (["snapkv:kv_rate=1,lookahead=9"], Layout(())),
        (["fastkv:tsp_layer=15"], Layout((16,), retain=True, window=8, stash=True)),
        (["fastkv:tsp_layer=15,kv_rate=1"], Layout((16,), window=8, stash=True)),
        (["fastkv:tsp_layer=31"], Layout((), retain=True, window=8)),
        (["fastkv:tsp_rate=1,kv_budget=512"], Layout((), retain=True, window=8)),
        (["fastkv:tsp_layer=15", "speed-24"], Layout((16, 24), retain=True, window=8, stash=True)),
        (["structkv:pivot=10,kv_rate=0.3"], Layout((11,), retain=True, window=8, stash=True)),
        (["structkv:pivot=10,granularity=block"], Layout((11,), retain=True, window=8, stash=True)),
        (
            ["structkv:pivot=online,min_layer=8,max_layer=10"],
            Layout((), retain=True, window=8, stash=True, online_cuts=(9, 10, 11)),
        ),
        (["structkv:pivot=online,struct_rate=1"], Layout((), retain=True, window=8)),
        (["structkv:pivot=31,granularity=block"], Layout((), retain=True, window=8)),
        (["fier-64"], Layout((), sidecar=FIER)),
        (["quest-79", "speed-8"], Layout((8,), sidecar=QUEST)),
        (
            ["fier-64:group=64,reduction=sum", "fier-200:group=64,reduction=sum,dense_below=9"],
            Layout((), sidecar=RetrievalLayout("one_bit", 64, 1, "sum", 200)),
        ),
        (
            ["quest-512:page=64"],
            Layout((), sidecar=RetrievalLayout("page_bounds", 64, 64, "max", 8)),
        ),
        (["speed-24+fier-64", "snapkv"], Layout((24,), sidecar=FIER, retain=True, window=8)),
    ],
)
def test_layout_of(names: list[str], layout: Layout) -> None:
    assert layout_of(map(parse_policy, names), 32) == cut(layout)


def cut(layout: Layout) -> Layout:
    """`layout`, whose rows may leave the batch wherever a KV group begins."""
    return replace(layout, row_cuts=layout.later_starts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speed-32", "use speed-1 .. speed-31"),
        ("fastkv", "write tsp_layer=<int>, or measure it once with `vllm-kvx calibrate"),
        ("structkv:granularity=block", "write pivot=<int>"),
    ],
)
def test_no_layout(name: str, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        layout_of([parse_policy(name)], 32)


@pytest.mark.parametrize(
    "names",
    [
        ("fier-64", "quest-64"),
        ("fier-64", "fier-64:group=64"),
        ("quest-64", "quest-64:page=8"),
        ("fier-64:reduction=sum", "speed-24+fier-64"),
    ],
)
def test_one_sidecar(names: tuple[str, str]) -> None:
    with pytest.raises(PolicyError, match=r"one sidecar, but .* the same method") as error:
        layout_of(map(parse_policy, names), 32)
    for name in names:
        assert f" {name} " in str(error.value)


def test_a_sidecar_is_of_its_widest_policy() -> None:
    names = ("fier-64", "speed-24+fier-128", "fier-99", "quest-64")
    with pytest.raises(PolicyError, match=r"but speed-24\+fier-128 .* up to 128\), and quest-64 "):
        layout_of(map(parse_policy, names), 32)


def test_online_limits_are_layers_below_the_last() -> None:
    for limits in ("min_layer=9,max_layer=8", "max_layer=31", "min_layer=31"):
        with pytest.raises(PolicyError, match="they must be in this order and below its last"):
            layout_of([parse_policy(f"structkv:pivot=online,{limits}")], 32)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ("", (21, 26)),
        (",min_layer=8", (8, 26)),
        (",min_layer=28", (28, 28)),
        (",max_layer=28", (21, 28)),
        (",max_layer=10", (10, 10)),
        (",min_layer=8,max_layer=10", (8, 10)),
    ],
)
def test_a_given_limit_moves_the_other(limits: str, expected: tuple[int, int]) -> None:
    policy = parse_policy(f"structkv:pivot=online{limits}")
    assert policy.propagate is not None
    rule = policy.propagate.online_rule(32)
    assert rule is not None and (rule.lowest, rule.highest) == expected


def test_online_pivots_need_room() -> None:
    policy = parse_policy("structkv:pivot=online,max_layer=28")
    with pytest.raises(PolicyError, match="needs online pivots at"):
        check_fits(policy, layout_of([parse_policy("structkv:pivot=online")], 32), 32)


def test_stage_sizes() -> None:
    assert Layout(()).stage_sizes(32) == (32,)
    assert Layout((24,)).stage_sizes(32) == (24, 8)
    assert Layout((1, 16, 27), FIER).stage_sizes(28) == (1, 15, 11, 1)


def test_stages_of_layers_that_slide() -> None:
    """Those below the first cut are in none."""
    layout = Layout((4, 6, 7), row_cuts=(4, 6, 7), windows=Windows((0, 1, 3, 4, 5, 7), 64))
    full = [Stage(0), Stage(4), Stage(6), Stage(7)]
    assert list(layout.stages) == [*full, Stage(4, True), Stage(7, True)]
    assert [layout.sliding_stage_of(layer) for layer in layout.sliding] == [None] * 3 + [4, 4, 5]
    assert [layout.stage_of(layer) for layer in (2, 6)] == [0, 2]
    assert Layout((4,)).stages == (Stage(0), Stage(4))


def test_beside_layers_that_slide() -> None:
    windows = Windows((0, 1, 2, 4, 5, 6), 64)
    layout = Layout((4, 6), None, True, 12, True, row_cuts=(4, 6), windows=windows)
    for name in ("full", "speed-4:anchors=3", "snapkv", "fastkv:tsp_layer=3", "gemfilter:layer=3"):
        check_fits(parse_policy(name), layout, 8)
    # After the last layer nothing is left to select for.
    check_fits(parse_policy("structkv:pivot=7"), layout, 8)
    check_fits(parse_policy("fastkv:tsp_layer=3,after=4"), layout, 8)
    for name, says in (
        ("selfonly-4", "speed-K, fastkv, structkv and gemfilter can run, not selfonly-4"),
        ("speed-4+fier-64", "beside nothing that retrieves"),
        ("fier-64", "beside nothing that retrieves"),
        ("fastkv:tsp_layer=3+fier-64", "beside nothing that retrieves"),
        ("speed-4+snapkv", "beside nothing that retains"),
        ("pyramidkv", "pyramidkv divides layers"),
        ("structkv:pivot=3,granularity=block", "use granularity=token"),
        ("structkv:pivot=online", "use pivot=calibrated or pivot=<int>"),
        ("fastkv:tsp_layer=4", "layer 4 slides over a window.* use tsp_layer=3 or tsp_layer=7$"),
        ("gemfilter:layer=1", "use layer=3$"),
        ("structkv:pivot=0", "use pivot=3$"),
    ):
        with pytest.raises(PolicyError, match=says):
            check_fits(parse_policy(name), layout, 8)


def test_the_last_tokens_go_on_where_layers_slide() -> None:
    """As many as a window reaches; the score chooses as many before them as anywhere."""
    name = "fastkv:tsp_layer=3,tsp_rate=0.2,kv_floor=0"
    alone = parse_policy(name).selection(1000, 8)
    assert alone is not None and (alone.count, alone.last) == (200, 8)
    beside = replace(parse_policy(name), windows=Windows((0, 1, 2, 4, 5, 6), 64))
    assert beside == parse_policy(name)
    found = beside.selection(1000, 8)
    assert found is not None and (found.count, found.last) == (200 - 8 + 64, 64)
    assert beside.selection(320, 8) is not None  # 64 - 8 + 64 tokens.
    for length in (64, 65, 70):  # All go on.
        assert beside.selection(length, 8) is None
    # A window no longer than the score's, and no layer that slides above.
    for windows in (Windows((5,), 4), Windows((0, 1, 2), 64)):
        assert replace(beside, windows=windows).selection(1000, 8).count == 200  # type: ignore[union-attr]
    again = replace(parse_policy("gemfilter:layer=3,kv_floor=0"), windows=Windows((0, 1), 64))
    assert again.selection(1000, 8).count == 100 - 1 + 64  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("full", Layout(())),
        ("full", Layout((16,), FIER)),
        ("speed-16:anchors=4", Layout((16, 24))),
        ("streamingllm", Layout((16,), retain=True)),
        ("snapkv:window=4", Layout((16,), retain=True, window=8)),
        ("fastkv:tsp_layer=15,tsp_rate=0.5", Layout((16, 24), retain=True, window=8, stash=True)),
        ("speed-24+fier-64", Layout((24,), FIER)),
        ("fier-64:dense_below=1000", Layout((), RetrievalLayout("one_bit", 32, 1, "max", 99))),
        ("quest-79", Layout((), QUEST)),
    ],
)
def test_fits(name: str, layout: Layout) -> None:
    check_fits(parse_policy(name), cut(layout), 32)


def test_does_not_fit() -> None:
    with pytest.raises(PolicyError) as error:
        check_fits(parse_policy("speed-16"), Layout((24,)), 32)
    assert str(error.value) == (
        "speed-16 does not fit this server: its layout has KV groups split at layer 24, no "
        "sidecar; speed-16 needs a split at layer 16: start the server with --kv-policy speed-16, "
        "or add speed-16 to its --kv-layout"
    )
    with pytest.raises(PolicyError, match="needs a split at layer 8 and a sidecar of 1-bit keys"):
        check_fits(parse_policy("speed-8+fier-64"), Layout((16, 24)), 32)
    with pytest.raises(PolicyError, match="needs a window of 9 tokens: start"):
        check_fits(parse_policy("snapkv:window=9"), Layout((), retain=True, window=8), 32)
    with pytest.raises(PolicyError, match="needs a lookahead of 4 tokens: start"):
        check_fits(parse_policy("snapkv:lookahead=4"), Layout((), retain=True, window=64), 32)
    with pytest.raises(
        PolicyError, match="needs retention and a window of 8 tokens and a stash: start"
    ):
        check_fits(parse_policy("fastkv:tsp_layer=15"), cut(Layout((16,))), 32)
    with pytest.raises(PolicyError, match="this model has 32 layers; use speed-1"):
        check_fits(parse_policy("speed-40"), Layout((24,)), 32)


HAS_FIER = "a sidecar of 1-bit keys in groups of 32 tokens (max, budgets of up to 64)"


@pytest.mark.parametrize(
    ("name", "layout", "has", "needs"),
    [
        ("fier-64", Layout(()), "no sidecar", HAS_FIER),
        ("fier-65", Layout((), FIER), HAS_FIER, HAS_FIER.replace("up to 64", "up to 65")),
        ("fier-64:group=64", Layout((), FIER), HAS_FIER, HAS_FIER.replace("of 32", "of 64")),
        ("fier-64:reduction=sum", Layout((), FIER), HAS_FIER, HAS_FIER.replace("max", "sum")),
        (
            "quest-79",
            Layout((), FIER),
            HAS_FIER,
            "a sidecar of bounds of pages of 16 tokens (max, budgets of up to 64)",
        ),
        ("fier-64", Layout((), QUEST), "a sidecar of bounds of pages of 16 tokens", HAS_FIER),
    ],
)
def test_another_sidecar(name: str, layout: Layout, has: str, needs: str) -> None:
    with pytest.raises(PolicyError) as error:
        check_fits(parse_policy(name), layout, 32)
    assert f"its layout has no split, {has}" in str(error.value)
    assert f"{name} needs {needs}: " in str(error.value)


@pytest.mark.parametrize(
    ("name", "server", "instead"),
    [
        ("quest-512", "fier-2048", "fier-512"),
        ("fier-512:group=64", "fier-2048", "fier-512"),
        ("fier-512:reduction=softmax", "fier-2048", "fier-512"),
        ("fier-512", "fier-2048:reduction=sum", "fier-512:reduction=sum"),
        ("fier-512:dense_below=9", "quest-1024:page=64", "quest-512:page=64,dense_below=9"),
        ("fier-512", "quest-79", "quest-64"),
        ("quest-64", "fier-256:group=128", "fier-128:group=128"),
        ("speed-8+quest-64", "speed-8+fier-64", "speed-8+fier-64"),
        ("quest-64+snapkv:kv_rate=0.2", "fier-64", None),
        ("speed-8+quest-64", "fier-64", None),
    ],
)
def test_what_fits_in_its_place(name: str, server: str, instead: str | None) -> None:
    policy, layout = parse_policy(name), layout_of([parse_policy(server)], 32)
    with pytest.raises(PolicyError) as error:
        check_fits(policy, layout, 32)
    way_out = f"start a server of its own with --kv-policy {policy}"
    if instead is not None:
        check_fits(parse_policy(instead), layout, 32)
        way_out = f"request {instead}, which fits, or {way_out}"
    assert str(error.value).rpartition(": ")[2] == way_out
    check_fits(policy, layout_of([policy], 32), 32)


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ((32,), GroupChoice(32, (1,), 0, 0)),
        ((24, 8), GroupChoice(8, (3, 1), 0, 0)),
        ((16, 16), GroupChoice(16, (1, 1), 0, 0)),
        ((24, 12), GroupChoice(12, (2, 1), 0, 0)),
        ((24, 4), GroupChoice(4, (6, 1), 0, 0)),
        ((20, 12), GroupChoice(4, (5, 3), 0, 0)),
        ((28, 4), GroupChoice(4, (7, 1), 0, 0)),
        ((21, 7), GroupChoice(7, (3, 1), 0, 0)),
        ((48, 16), GroupChoice(16, (3, 1), 0, 0)),
        # 6 pads as little as 12 does, with twice the groups; 8 pads 8 layers, 23 pads 14.
        ((23, 9), GroupChoice(12, (2, 1), 4, 1)),
        ((31, 1), GroupChoice(8, (4, 1), 8, 1)),
        # Any padding would double the lower layers, and 8 groups cannot do without it.
        ((1, 31), GroupChoice(1, (1, 31), 0, 0)),
        ((8, 8, 16), GroupChoice(8, (1, 1, 2), 0, 0)),
    ],
)
def test_choose_group_size(segments: tuple[int, ...], expected: GroupChoice) -> None:
    assert choose_group_size(segments) == expected


def test_choose_group_size_keeps_its_rule() -> None:
    for num_layers in range(2, 81):
        for cutoff in range(1, num_layers):
            segments = (cutoff, num_layers - cutoff)
            choice = choose_group_size(segments)
            held = [n * choice.size for n in choice.groups_per_stage]
            assert all(h >= s > h - choice.size for h, s in zip(held, segments, strict=True))
            assert choice.padding_layers == sum(held) - num_layers
            assert choice.first_stage_padding == held[0] - cutoff
            assert choice.first_stage_padding <= 0.05 * cutoff
            # More than 8 groups only where 8 cannot be had, and then nothing is wasted.
            assert sum(choice.groups_per_stage) <= 8 or choice.padding_layers == 0


def test_a_stage_of_one_layer_between_others_makes_many_groups() -> None:
    """vLLM makes none larger than the smallest stage, unless the largest is nearly as small."""
    assert group_layers((23, 1, 8)) == GroupChoice(1, (23, 1, 8), 0, 0)
    assert group_layers((23, 1, 8)).has_many
    assert not group_layers((24, 8)).has_many


@pytest.mark.parametrize("segments", [(), (0,), (24, 0), (-1, 4)])
def test_choose_group_size_refuses(segments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        choose_group_size(segments)


@pytest.mark.parametrize(
    ("name", "splits", "row_cuts"),
    [
        ("pyramidkv", (4, 8, 12, 16, 20, 24, 28), ()),
        ("pyramidkv:groups=3", (11, 22), ()),
        ("pyramidkv:groups=64", tuple(range(1, 32)), ()),
        ("pyramidkv:kv_rate=1", (), ()),
        ("knorm", (), ()),
        ("structkv:pivot=10,granularity=block,struct_rate=1", (11,), ()),
        ("gemfilter:layer=13", (14,), (14,)),
        ("gemfilter:layer=13,rate=1", (), ()),
        ("speed-6+pyramidkv:groups=2", (6, 16), (6,)),
    ],
)
def test_kv_groups_and_compiled_segments_are_two_things(
    name: str, splits: tuple[int, ...], row_cuts: tuple[int, ...]
) -> None:
    layout = layout_of([parse_policy(name)], 32)
    assert (layout.later_starts, layout.row_cuts) == (splits, row_cuts)
    assert not layout.stash


def test_value_norms_need_room() -> None:
    snapkv, criticalkv = parse_policy("snapkv"), parse_policy("criticalkv")
    with pytest.raises(PolicyError, match=r"criticalkv needs value norms: start the server with"):
        check_fits(criticalkv, layout_of([snapkv], 32), 32)
    for name in ("snapkv", "pyramidkv", "fastkv:tsp_layer=3", "structkv:pivot=3"):
        plain, scored = (
            parse_policy(f"{name}{':' if ':' not in name else ','}score={score}")
            for score in ("attention", "critical")
        )
        with pytest.raises(PolicyError, match=r"score=critical[^ ]* needs value norms"):
            check_fits(scored, layout_of([plain], 32), 32)
        check_fits(scored, layout_of([plain, scored], 32), 32)
    layout = layout_of([criticalkv], 32)
    check_fits(snapkv, layout, 32)
    assert str(layout).endswith("value norms")


def test_projection_needs_room() -> None:
    speed, swift = parse_policy("speed-24"), parse_policy("swiftkv-24")
    with pytest.raises(PolicyError, match="swiftkv-24 needs projection: start the server with"):
        check_fits(swift, layout_of([speed], 32), 32)
    layout = layout_of([swift], 32)
    assert layout == Layout((24,), row_cuts=(24,), projects=True)
    check_fits(speed, layout, 32)
    assert str(layout) == "KV groups split at layer 24, no sidecar, projection"


def test_rows_leave_only_where_a_segment_begins() -> None:
    pyramid = layout_of([parse_policy("pyramidkv:groups=4")], 32)
    with pytest.raises(PolicyError, match="needs rows to leave at layer 8, where this server"):
        check_fits(parse_policy("speed-8"), pyramid, 32)
    both = layout_of(map(parse_policy, ("pyramidkv:groups=4", "speed-8")), 32)
    check_fits(parse_policy("speed-8"), both, 32)
