"""The calibration's figures say of how many prompts they are."""

from typing import Any

import pytest

from vllm_kvx.tools.calibrate.figures import pivot_curves, tsp_curve
from vllm_kvx.tools.diagnose.figures import access_curves, cutoff_curves, recovery_curves
from vllm_kvx.tools.tune_speed.figures import loss_curves

LAYERS = [0.1, 0.2, 0.3]
RECORD: dict[str, Any] = {
    **{"model": "org/m", "layers": 3, "tsp_layer": 1, "pivot": 1, "prompts": {"count": 5}},
    **{"distances": {"mean": LAYERS, "std": LAYERS}, "transition": [None, 0.5, 0.2]},
    "metrics": {"entropy": LAYERS, "sparsity": LAYERS, "variance": [None, float("nan"), None]},
    "recovery": {name: {"mean": LAYERS} for name in ("structkv", "fastkv", "gemfilter", "snapkv")},
    "cutoffs": [1, 2],
    "samples": [{"answer": [1, 2]}, {"answer": [3]}],
}


def group(prompts: int) -> dict[str, Any]:
    names = ("user", "normalised", "straightening", "first", "earlier")
    curves = {name: [float("nan")] * 3 if name == "straightening" else LAYERS for name in names}
    cut = {"same": [0.5, 1.0], "kl": [1.0, 0.1]}
    return {"prompts": prompts, "curves": curves, "cut": cut, "suggested": {"range": None}}


@pytest.fixture
def pyplot() -> Any:
    return pytest.importorskip("matplotlib.pyplot")


def test_n(pyplot: Any) -> None:
    of_prompts = (
        tsp_curve(pyplot, RECORD),
        pivot_curves(pyplot, RECORD),
        recovery_curves(pyplot, RECORD, dict.fromkeys(RECORD["recovery"], "a method")),
    )
    for figure in of_prompts:
        assert "\nn = 5 prompts" in figure.axes[0].get_title(loc="left")
    assert "bars: standard deviation" in of_prompts[0].axes[0].get_title(loc="left")
    record = RECORD | {"groups": {"lookup": group(2), "chat": group(7), "all": group(9)}}
    figure = cutoff_curves(pyplot, record)
    assert "n = 2 answers of 3 tokens" in figure.axes[0].get_title(loc="left")
    legend = access_curves(pyplot, record).axes[2].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["lookup, n = 2", "chat, n = 7"]
    held_out = {"answers": 11, "greedy": 0.5, "same": 0.25}
    figure = loss_curves(pyplot, {"log": [], "before": {"all": held_out}})
    assert figure.axes[1].get_title() == "agreement, n = 11 answers"
    pyplot.close("all")


def test_a_panel_without_values_says_so(pyplot: Any) -> None:
    record = RECORD | {"groups": {"lookup": group(2), "all": group(2)}}
    curves = pivot_curves(pyplot, RECORD).axes
    access = access_curves(pyplot, record).axes
    (training, _) = loss_curves(
        pyplot, {"log": [], "before": {"all": {"answers": 1, "greedy": 0.5, "same": 0.5}}}
    ).axes
    says = [[text.get_text() for text in axis.texts] for axis in (*curves, *access, training)]
    empty = ["nothing was measured"]
    assert says == [[], [], empty, [], [], [], empty, empty]
    pyplot.close("all")
