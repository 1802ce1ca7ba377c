"""What a layer costs whole and with retrieval, and from where on a batch retrieves."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ops import retrieval_costs as fit
from vllm_kvx.ops.retrieval.backends import BACKENDS
from vllm_kvx.ops.retrieval.costs import (
    ATTENDS,
    BESIDE_STATES_US,
    COSTS,
    IN_ENGINE_US,
    KI,
    ONE_LAUNCH,
    ONE_LAUNCH_IN_ENGINE_US,
    Begins,
    Costs,
    StepCosts,
    alone_from,
    costs,
    step_costs,
)
from vllm_kvx.ops.retrieval.crossover import CROSSOVERS, NEVER, crossover
from vllm_kvx.policy.methods.fier import FIER
from vllm_kvx.policy.retrieval_layers import RetrievalLayers
from vllm_kvx.worker.decode.step import Rules, retrieving_lens

EVEN = Costs(whole=10, whole_entry=4, fixed=30, scored=1, read=2)


def test_the_table_is_what_was_measured() -> None:
    """Every figure follows from the result files."""
    assert set(COSTS) == set(BACKENDS) and not COSTS["torch"]
    found = fit.table(
        {backend: json.loads(path.read_text()) for backend, path in fit.LAYERS.items()}
    )
    assert found == {backend: COSTS[backend] for backend in found}
    engines = json.loads(fit.ENGINE.read_text())["engines"]
    assert fit.in_engine(engines, COSTS["cuda"][fit.ENGINE_SHAPE]) == IN_ENGINE_US
    for backend, path in fit.OPS.items():
        report = json.loads(path.read_text())
        assert fit.attends(report, backend, found[backend][fit.OPS_SHAPE]) == ATTENDS[backend]
    assert fit.of_steps(fit.in_steps(1)) == ONE_LAUNCH
    few = json.loads(fit.FEW_ENGINE.read_text())["engines"]
    assert fit.few_in_engine(few, ONE_LAUNCH[fit.ENGINE_SHAPE]) == ONE_LAUNCH_IN_ENGINE_US


def test_reports_of_several_shapes_and_budgets() -> None:
    ways = {"as served at 512": 3, "as served at 2048": 4, "three launches at 512": 5, "stock": 9}
    case = {"layers": 4, "launches": 1, "rest_us": 1.5}
    case |= {name: {"us": us} for name, us in ways.items()}
    cases = {"llama-3.1-8b 2x4096": case, "qwen2.5-7b 1x64": case | {"launches": 3}}
    found = list(fit.timed({"budget": [512, 2048], "cases": cases}))
    assert found[1] == fit.Timed("llama-3.1-8b", 2, 4096, 2048, "as served", 4, 9, 1)
    assert [(each.budget, each.way, each.us) for each in found[3:]] == [
        (512, "as served", 3),
        (2048, "as served", 4),
        (512, "three launches", 5),
    ]
    assert {(each.shape, each.batch, each.launches) for each in found[3:]} == {("qwen2.5-7b", 1, 3)}
    (one,) = fit.timed(
        {"budget": 64, "cases": {"1x64": {"launches": 3, "stock": {"us": 1}, "w": {"us": 2}}}}
    )
    assert one == fit.Timed("", 1, 64, 64, "w", 2, 1, 3)


def test_one_launch_takes_what_the_fit_says() -> None:
    """Whatever query heads share a KV head: nine in ten times within 7%.

    Where the costs choose the slower way, it takes at most a tenth longer.
    """
    cases, errors = list(fit.in_steps(1)), list[float]()
    assert len({case.shape for case in cases}) == 11 and len(cases) > 130
    for case in cases:
        found = few_in_engine(*fit.shape_of(case))
        entries, read = case.batch * case.length / KI, case.batch * case.budget / KI
        whole = found.whole + found.whole_entry * entries
        ours = found.fixed + found.scored * entries + found.read * read
        measured = case.us + ONE_LAUNCH_IN_ENGINE_US
        errors += [abs(whole / case.stock - 1), abs(ours / measured - 1)]
        chosen = measured if ours < whole else case.stock
        assert chosen <= 1.1 * min(measured, case.stock), case
    assert np.quantile(errors, 0.9) < 0.07 and max(errors) < 0.13


def test_one_launch_saves_what_an_engine_saved() -> None:
    """Llama-3.1-8B's shape, 30 layers of which retrieve, its KV heads on one GPU or on two.

    One machine lost what an engine adds. Shorter contexts save no more than starts differ by.
    """
    for name, kv_heads, besides in (
        ("h200-decode-shorter-code", 8, 0.0),
        ("h200-few-rows", 8, ONE_LAUNCH_IN_ENGINE_US),
        ("h200-few-rows-of-1", 8, 0.0),
        ("h200-few-rows-of-2", 4, 0.0),
    ):
        found = ONE_LAUNCH[kv_heads, 512]
        engines = json.loads((fit.RESULTS / "engine" / f"{name}.json").read_text())["engines"]
        stock, ours = (engines[each]["cases"] for each in ("stock", "fier-2048"))
        for length in (32_768, 130_000):
            gain = found.gain(np.array([length]), np.array([2048]))[0] + found.whole - found.fixed
            case = f"tpot:{length}"
            measured = (stock[case]["median"] - ours[case]["median"]) * 1e3 / 30
            assert gain - besides == pytest.approx(measured, rel=0.12), (name, length)


@pytest.mark.parametrize(("backend", "most"), [("cuda", 1.125), ("triton", 1.2)])
def test_the_fit_chooses_what_was_faster(backend: str, most: float) -> None:
    """Where the costs' choice was the slower one, it took at most an eighth, or a fifth, longer."""
    for case in json.loads(fit.LAYERS[backend].read_text())["cases"]:
        found = COSTS[backend][case["kv_heads"], case["head_bytes"]]
        entries = case["batch"] * case["length"]
        for budget, ours in case.get(backend, {}).items():
            whole = found.whole + found.whole_entry * entries / KI
            read = found.read * case["batch"] * int(budget)
            retrieves = found.fixed + (found.scored * entries + read) / KI
            chosen = ours if retrieves < whole else case["stock"]
            assert chosen <= most * min(ours, case["stock"]), (case, budget)


def test_from_where_on_a_batch_retrieves() -> None:
    # (4 - 1) n = 2 * budget + (30 - 10) * 1024 / requests
    assert EVEN.pays_from(1536, 1) == (3072 + 20480) // 3 + 1
    assert EVEN.pays_from(1536, 8) == (3072 + 2560) // 3 + 1
    assert EVEN.pays_from(1536, 1 << 20) == 1025
    assert replace(EVEN, fixed=5).pays_from(1536, 1) == 1025
    assert replace(EVEN, scored=4).pays_from(64, 256) == NEVER
    n = EVEN.pays_from(1536, 8)
    for entries, pays in ((n, True), (n - 1, False)):
        saved = EVEN.gain(np.full(8, entries), np.full(8, 1536)).sum()
        assert (saved + EVEN.whole > EVEN.fixed) == pays


def test_the_share_of_layers_that_choose() -> None:
    """The first two layers read everything, and the third chooses."""
    assert RetrievalLayers(reuse=1).share_that_chooses(32) == 1
    assert RetrievalLayers(reuse=2).share_that_chooses(32) == 0.5
    assert RetrievalLayers(dense=0, reuse=4).share_that_chooses(32) == 0.25
    assert RetrievalLayers(reuse=4).share_that_chooses(32) == 8 / 30
    assert [RetrievalLayers(reuse=8).share_that_chooses(layers) for layers in (3, 2)] == [1, 1]


def test_layers_that_read_what_others_chose_score_and_select_nothing() -> None:
    shared = EVEN.shared(choosing=0.25, attends=0.4)
    assert shared == Costs(whole=10, whole_entry=4, fixed=12 + 18 / 4, scored=0.25, read=2)
    assert EVEN.shared(1, 0.4) == EVEN
    # (4 - 0.25) n = 2 * budget + (16.5 - 10) * 1024
    assert shared.pays_from(1536, 1) == int((3072 + 6.5 * 1024) / 3.75) + 1


def test_what_was_measured_of_layers_that_share_a_choice() -> None:
    """One layer's graph takes some 5 us longer than a layer's part of a step's."""
    path = fit.RESULTS / "ops" / "h100-retrieval-reuse.json"
    report = json.loads(path.read_text())
    for name, case in report["cases"].items():
        batch, length = map(int, name.split("x"))
        for layers in (2, 4):
            found = COSTS["cuda"][8, 512].shared(1 / layers, ATTENDS["cuda"])
            entries, budgets = batch * length / KI, batch * report["budget"] / KI
            us = found.fixed - 5 + found.scored * entries + found.read * budgets
            assert us == pytest.approx(case[f"reuse_layers={layers}"]["us"], rel=0.2), name


def test_what_an_engine_saved_by_shared_choices() -> None:
    """Llama-3.1-8B's shape, 30 layers of which retrieve."""
    path = fit.RESULTS / "engine" / "h100-reuse-layers.json"
    engines = json.loads(path.read_text())["engines"]
    alone, shared = (engines[f"fier-2048{name}"]["cases"] for name in ("", ":reuse_layers=4"))
    share = RetrievalLayers(reuse=4).share_that_chooses(32)
    own, less = (costs("cuda", "max", 8, 512, choosing=each) for each in (1, share))
    for name, batch, length in (
        ("tpot:32768", 1, 32_768),
        ("tpot:130000", 1, 130_000),
        ("decode:12x32768", 12, 32_768),
    ):
        saved = own.fixed - less.fixed + (own.scored - less.scored) * batch * length / KI
        measured = (alone[name]["median"] - shared[name]["median"]) * 1e3 / 30
        assert saved == pytest.approx(measured, rel=0.25), name


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_shared_choices_pay_from_a_shorter_context(backend: str) -> None:
    for shape in COSTS[backend]:
        machine = backend, "max", *shape
        alone = [alone_from(*machine, choosing=share) for share in (1, 0.9, 0.5, 0.25)]
        assert alone == sorted(alone, reverse=True) and alone[-1] < alone[0] / 2
        assert alone[0] == crossover(*machine)
        batch = [costs(*machine, choosing=share).pays_from(512, 8) for share in (1, 0.5, 0.25)]
        assert batch == sorted(batch, reverse=True) and batch[-1] < batch[0]
    # An engine loses as much as where each layer chooses.
    shared = COSTS["cuda"][8, 512].shared(0.5, ATTENDS["cuda"])
    expected = replace(shared, fixed=shared.fixed + IN_ENGINE_US)
    assert costs("cuda", "max", 8, 512, choosing=0.5) == expected
    # What never or always pays does so whoever chooses.
    assert alone_from("torch", "max", 2, 256, choosing=0.5) == 0
    assert alone_from("triton", "softmax", 8, 512, choosing=0.5) == NEVER
    assert alone_from("cuda", "max", 2, 1024, keeps_state=True, choosing=0.5) == NEVER


def test_never_and_always() -> None:
    always, never = costs("torch", "softmax", 1, 64), costs("triton", "softmax", 8, 512)
    assert always.pays_from(64, 1) == 1 and always.gain(np.array([65]), np.array([64])) > 0
    assert never.pays_from(64, 256) == NEVER
    assert not never.gain(np.array([1 << 20]), np.array([64])) > 0


def test_shapes_that_were_not_measured() -> None:
    table = COSTS["cuda"]
    in_engine = {
        shape: replace(found, fixed=found.fixed + IN_ENGINE_US) for shape, found in table.items()
    }
    assert costs("cuda", "max", 8, 512) == costs("cuda", "max", 16, 1024) == in_engine[8, 512]
    assert costs("cuda", "sum", 5, 700) == in_engine[4, 512]
    assert costs("cuda", "max", 8, 256) == in_engine[8, 256]  # fp8, say
    # Half of the smallest row's bytes.
    half = replace(in_engine[2, 256], whole_entry=table[2, 256].whole_entry / 2)
    assert costs("cuda", "max", 1, 256) == half
    assert costs("cuda", "max", 1, 512) == in_engine[2, 256]


@pytest.mark.parametrize("shape", CROSSOVERS["cuda"])
def test_a_batch_retrieves_earlier_than_one(shape: tuple[int, int]) -> None:
    one = crossover("cuda", "max", *shape)
    found = costs("cuda", "max", *shape)
    assert found.pays_from(2048, 8) < one / 2 < NEVER
    assert found.pays_from(512, 8) < found.pays_from(2048, 8) < found.pays_from(2048, 2)


def test_beside_layers_that_keep_a_state_a_batch_alone_pays() -> None:
    """Qwen3-Next's shape, as it was measured: one request of 130,000 lost, 64 of 32,768 gained."""
    shape = 2, 1024
    assert crossover("cuda", "max", *shape) < 130_000
    assert crossover("cuda", "max", *shape, keeps_state=True) == NEVER
    machine = costs("cuda", "max", *shape, keeps_state=True)
    lengths = FIER(2048).floor(NEVER), FIER(2048).floor(0), 2048
    begins = Begins.of(*lengths, StepCosts(machine), 64)
    assert begins.alone == NEVER and begins.batch < 32_768
    assert str(begins).startswith("of no length alone, from ")
    # What it loses is what these costs are off by for one, and less than what 64 gained.
    path = fit.RESULTS / "engine" / "h100-qwen3-next.json"
    engines = json.loads(path.read_text())["engines"]
    stock, ours = (engines[name]["cases"] for name in ("stock", "fier-2048"))
    # Two of its four full layers retrieve.
    lost_us = (ours["tpot:130000"]["median"] - stock["tpot:130000"]["median"]) * 1e3 / 2
    batch = "pool_decode:32768"
    gained_us = (stock[batch]["median"] - ours[batch]["median"]) * 1e3 / 2
    by_budget = np.array([2048])
    without = replace(machine, fixed=machine.fixed - BESIDE_STATES_US)
    saved = without.gain(np.array([130_000]), by_budget).sum() + without.whole - without.fixed
    assert abs(lost_us + saved - BESIDE_STATES_US) < 1
    saved = 64 * without.gain(np.array([32_768]), by_budget).sum() + without.whole - without.fixed
    assert BESIDE_STATES_US < saved < gained_us
    never, least, budget = [NEVER], [2049], [2048]
    for requests, entries, retrieve in (
        (1, 130_000, False),
        (1, 262_144, False),
        (8, 32_768, False),
        (64, 32_768, True),
    ):
        rules = Rules(*(np.array(each * requests) for each in (budget, least, never)), unit=1)
        stored = np.full((1, requests), entries)
        found = retrieving_lens(rules, machine, np.ones(requests, dtype=bool), stored)
        assert (found > 0).all() == (found > 0).any() == retrieve, (requests, entries)
    # What a policy names itself holds, and a CPU's ops gain nothing anyway.
    assert FIER(2048, dense_below=4096).floor(NEVER) == 4096
    assert crossover("torch", "max", *shape, keeps_state=True) == 0
    assert costs("torch", "max", *shape, keeps_state=True) == costs("torch", "max", *shape)


def test_no_batch_pays_where_answers_may_not_depend_on_it() -> None:
    for backend in COSTS:
        found = costs(backend, "max", 8, 512, invariant=True)
        assert found.pays_from(65, 256) == NEVER
        assert not (found.gain(np.array([1, 10**6]), np.array([0, 64])) > 0).any()
        assert Begins.of(16384, 2049, 2048, StepCosts(found), 64) == Begins(16384, 16384, 64)


def test_from_where_on_and_in_words() -> None:
    machine = StepCosts(costs("cuda", "max", 8, 512))
    several = Begins.of(16384, 2049, 2048, machine, 64)
    assert 2049 < several.batch < 4096
    batches = f"from {several.batch} in steps of 64 such requests"
    assert str(several) == f"from 16384 tokens on, {batches}"
    assert str(Begins.of(9000, 9000, 2048, machine, 64)) == "from 9000 tokens on"  # dense_below
    never = StepCosts(costs("triton", "softmax", 8, 512))
    assert str(Begins.of(NEVER, 65, 64, never, 64)) == "of no length"
    alone_never = Begins.of(NEVER, 65, 64, machine, 64)
    assert str(alone_never).startswith("of no length alone, from ")
    always = StepCosts(costs("torch", "max", 2, 256))
    assert Begins.of(65, 65, 64, always, 9) == Begins(65, 65, 9)


def few_in_engine(kv_heads: int, head_bytes: int) -> Costs:
    found = ONE_LAUNCH[kv_heads, head_bytes]
    return replace(found, fixed=found.fixed + ONE_LAUNCH_IN_ENGINE_US)


def test_few_rows_take_one_launch() -> None:
    """Which costs less than three, so one request retrieves from a shorter context on."""
    machine = ("cuda", "max", 8, 512, False, False, 1.0)
    found = step_costs(*machine, few_rows=4)
    many, few = costs("cuda", "max", 8, 512), few_in_engine(8, 512)
    assert [found.of(rows) for rows in (1, 4, 5, 64)] == [few, few, many, many]
    begins = Begins.of(16384, 2049, 2048, found, 64)
    assert (begins.alone, begins.one, begins.shortest) == (16384, 12288, begins.batch)
    said = f"from 12288 in a step of its own, from {begins.batch} in steps of 64 such requests"
    assert str(begins) == f"from 16384 tokens on, {said}"
    one = Begins.of(16384, 2049, 2048, found, 1)
    assert (
        str(one) == "from 16384 tokens on, from 12288 in a step of its own" and one.batch == 12288
    )
    # What a policy names itself holds.
    assert str(Begins.of(9000, 9000, 2048, found, 64)) == "from 9000 tokens on"
    # Not with fewer entries in all than paid in an engine; more rows never need longer contexts.
    assert [few.pays_from(512, rows) for rows in (1, 2, 3)] == [12288, 6144, 4096]
    pays = [few.pays_from(2048, rows) for rows in (1, 2, 3, 4)]
    assert pays == sorted(pays, reverse=True)
    assert all(n <= many.pays_from(2048, rows) for rows, n in enumerate(pays, 1))
    # Shapes that it was not measured with are taken for those with fewer heads of as many bytes.
    for shape, expected in (
        ((4, 512), (4, 512)),
        ((7, 512), (4, 512)),
        ((3, 512), (2, 512)),
        ((4, 256), (2, 256)),
        ((16, 512), (8, 512)),
    ):
        found = step_costs("cuda", "max", *shape, False, False, 1.0, few_rows=2)
        assert found.of(2) == few_in_engine(*expected)
    for heads, size in ((1, 512), (8, 1024)):
        assert step_costs("cuda", "max", heads, size, False, False, 1.0, few_rows=4).few is None
    # Nor where none is taken, where layers keep a state, or where a batch may decide nothing.
    for more, rows in (((False, False), 0), ((True, False), 4), ((False, True), 4)):
        assert step_costs("cuda", "max", 8, 512, *more, 1.0, few_rows=rows).few is None
