"""Models in which some layers slide: they can be asked, and the report says what share is saved."""

from argparse import Namespace
from pathlib import Path

from support.configs import write_config

from vllm_kvx.tools.evaluate import report
from vllm_kvx.tools.evaluate.original import models_of
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.store import Answer, QuestionId
from vllm_kvx.tools.evaluate.summary import Summary
from vllm_kvx.tools.kv_layers import KVLayers

TYPES = (["sliding_attention"] * 3 + ["full_attention"]) * 2


def test_the_report_of_a_hybrid_says_what_no_policy_saves_more_than(tmp_path: Path) -> None:
    name = write_config(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        layer_types=TYPES,
        sliding_window=64,
        head_dim=64,
    )
    (model,) = models_of(Namespace(model=name, revision=None, policies=["snapkv"], original=None))
    layers = KVLayers.of(model.text_config)
    assert layers is not None and (layers.total, layers.full, layers.window) == (8, 2, 64)
    full, snapkv = Row("full"), Row("snapkv")
    found = [
        Answer(row, QuestionId("vt", 1024, 0), 1.0, 1024, kept, kept, "x")
        for row, kept in ((full, 1.0), (snapkv, 0.1))
    ]
    summary = Summary(found)
    said = "They hold 84% at 1,024 tokens of the model's KV: no policy that only retains or "
    said += "retrieves saves more."
    assert said in report.table(summary, layers) and said in report.text(summary, layers)
    assert report.as_json(summary, {}, layers)["policy_layers"] == {
        "layers": 8,
        "full_attention": 2,
        "share_of_kv": {"1024": 0.84211},
    }
    assert "saves more" not in report.table(summary)
    assert "policy_layers" not in report.as_json(summary, {})
