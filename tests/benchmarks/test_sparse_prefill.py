"""Prefill that reads chosen blocks of keys: what is chosen, attention over it, and the answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.answers import sparse_model, sparse_prefill
from benchmarks.common.files import ROOT
from benchmarks.ops import prefill_blocks, sparse_prefill_ways
from benchmarks.ops import sparse_prefill as speed
from benchmarks.ops.prefill_blocks import Setting
from benchmarks.ops.prefill_scores_triton import one_bit_shares
from benchmarks.ops.sparse_prefill_triton import Tiles

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = ROOT / "tests/checkpoints/lookup-8l"
HEADS, KV_HEADS, DIM = 4, 2, 16
SIZES = {"block": 64, "key_block": 32, "pool": 64, "stride": 16}
SETTINGS = [
    Setting("antidiagonal", 0.6, **SIZES),
    Setting("antidiagonal", 0.6, heads="union", **{**SIZES, "stride": 8}),
    Setting("pooled", 0.6, **SIZES),
    Setting("pooled", 0.6, **{**SIZES, "pool": 16, "key_block": 64}),
    Setting("one_bit", 0.6, **SIZES),
    Setting("one_bit", 0.6, by="max", **{**SIZES, "pool": 32}),
    Setting("oracle", 0.6, **SIZES),
]


def layer(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose attention falls on few places."""
    made = torch.Generator().manual_seed(0)
    query = torch.randn(HEADS, length, DIM, generator=made) * 2
    keys, values = (torch.randn(KV_HEADS, length, DIM, generator=made) for _ in range(2))
    return query, keys * 2, values


def chosen(query: Tensor, keys: Tensor, first: int, setting: Setting) -> Tensor:
    codes = prefill_blocks.one_bit_keys(keys)
    return prefill_blocks.read_blocks(query, keys, codes, first, DIM**-0.5, setting)


def probabilities(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """(H, n, n) of a mask (G, n, n); each query head by itself."""
    rows = []
    for head, one in enumerate(query):
        group = head // (HEADS // KV_HEADS)
        logits = one @ keys[group].T * DIM**-0.5
        rows.append(logits.masked_fill(~mask[group], -torch.inf).softmax(dim=-1))
    return torch.stack(rows)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_attention_is_that_of_a_mask(setting: Setting) -> None:
    """Of a prompt whose last block is short, in two chunks."""
    query, keys, values = layer(300)
    cut = 2 * setting.block
    out = []
    mask = torch.zeros(KV_HEADS, 300, 300, dtype=torch.bool)
    for first, end in ((0, cut), (cut, 300)):
        rows, seen = query[:, first:end], keys[:, :end]
        reads = chosen(rows, seen, first, setting)
        out.append(
            prefill_blocks.attend(rows, seen, values[:, :end], reads, first, DIM**-0.5, setting)
        )
        for group, block, column in reads.nonzero().tolist():
            begin = first + block * setting.block
            of_keys = slice(column * setting.key_block, (column + 1) * setting.key_block)
            mask[group, begin : begin + setting.block, of_keys] = True
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    assert 0.3 < (mask & causal).sum() / (KV_HEADS * causal.sum()) < 0.97
    probs = probabilities(query, keys, mask & causal)
    expected = probs @ values.repeat_interleave(HEADS // KV_HEADS, dim=0)
    torch.testing.assert_close(torch.cat(out, dim=1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_later_token_changes_a_choice(setting: Setting) -> None:
    """Nor does where chunks end; the first block and the queries' own are always read."""
    query, keys, _ = layer(300)
    whole = chosen(query, keys, 0, setting)
    own = setting.block // setting.key_block
    for end in (64, 128, 256):
        blocks, columns = end // setting.block, end // setting.key_block
        earlier = chosen(query[:, :end], keys[:, :end], 0, setting)
        assert earlier.equal(whole[:, :blocks, :columns])
        assert not whole[:, :blocks, columns:].any()
        assert chosen(query[:, end:], keys, end, setting).equal(whole[:, blocks:])
        assert whole[:, blocks - 1, columns - own : columns].all()
    assert whole[..., 0].all() and whole[:, -1, 8:].all()


def test_the_oracle_is_attention_itself() -> None:
    setting = Setting("oracle", 0.6, **SIZES)
    query, keys, _ = layer(300)
    causal = torch.ones(KV_HEADS, 300, 300, dtype=torch.bool).tril()
    by_token = probabilities(query, keys, causal)
    shares = prefill_blocks.estimate(query, keys, None, 0, DIM**-0.5, setting)
    for block, column in ((0, 0), (2, 3), (4, 0), (4, 9)):
        held = by_token[:, block * 64 : (block + 1) * 64, column * 32 : (column + 1) * 32]
        assert shares[:, block, column].allclose(held.sum(dim=-1).mean(dim=1), atol=1e-6)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_estimates_are_shares(setting: Setting) -> None:
    query, keys, _ = layer(300)
    codes = prefill_blocks.one_bit_keys(keys)
    shares = prefill_blocks.estimate(query, keys, codes, 0, DIM**-0.5, setting)
    assert shares.shape == (HEADS, 5, -(-300 // setting.key_block))
    assert shares.sum(dim=-1).allclose(torch.ones(HEADS, 5), atol=1e-5)


@pytest.mark.parametrize("by", ["sum", "max"])
def test_triton_estimates_what_torch_does(by: str) -> None:
    setting = Setting("one_bit", by=by, **{**SIZES, "pool": 32})
    query, keys, _ = layer(300)
    codes = prefill_blocks.one_bit_keys(keys)
    for first in (0, 128):
        rows = query[:, first:]
        expected = prefill_blocks.estimate(rows, keys, codes, first, DIM**-0.5, setting)
        found = one_bit_shares(rows, codes, first, DIM**-0.5, setting)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_cover_takes_the_fewest_blocks() -> None:
    """Two KV heads of two query heads; six blocks of keys, the last one the queries' own."""
    shares = torch.tensor([[0.1, 0.4, 0.2, 0.15, 0.05, 0.1], [0.1, 0.0, 0.2, 0.55, 0.05, 0.1]])
    shares = torch.cat([shares, shares.flip(0)]).unsqueeze(1)

    def read(**named: Any) -> list[list[int]]:
        setting = Setting("oracle", **named)
        found = prefill_blocks.cover(shares, 2, 5 * 128, 6 * 128, setting)[:, 0]
        return [row.nonzero()[:, 0].tolist() for row in found]

    assert read(cover=0.15) == [[0, 5]] * 2
    # Means: 0.1, 0.2, 0.2, 0.35, 0.05, 0.1.
    assert read(cover=0.5) == [[0, 3, 5]] * 2
    assert read(cover=0.7) == [[0, 1, 3, 5]] * 2
    assert read(cover=0.7, heads="union") == [[0, 1, 2, 3, 5]] * 2
    assert read(cover=1.0) == [list(range(6))] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all", "method 'all' is none of dense, antidiagonal"),
        ("pooled:share=0.9", "no parameter 'share'; there are cover, stride"),
        ("pooled:cover=1.5", "cover=1.5: give more than 0"),
        ("pooled:pool=48", "no multiple of key_block, pool and stride"),
        ("one_bit:key_block=16", "key_block=16 is no multiple of 32"),
        ("one_bit:by=mean", "by=mean: give sum or max"),
        ("pooled:heads=all", "heads=all: give mean or union"),
    ],
)
def test_a_wrong_setting_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Setting.parse(text)


def test_a_setting_is_read_from_its_name() -> None:
    text = "antidiagonal:cover=0.9,stride=8,heads=union,tail=1"
    assert Setting.parse(text) == Setting("antidiagonal", 0.9, 8, heads="union", tail=1)


@pytest.mark.parametrize("page", [16, 128])
def test_kernels_compute_what_the_mask_does(page: int) -> None:
    """Block tables, overlapping pages and Triton; FlashAttention's part is computed in torch."""
    if speed.ON_GPU:
        pytest.skip("a GPU's bfloat16 is measured by the benchmark itself")
    ways = speed.WAYS if page == 16 else speed.WAYS[:2]
    found = list(speed.errors((4, 2, 16), page, [Tiles()], ways))
    assert len(found) == 2 * len(ways)
    assert all(line["off_by"] < 1e-5 for line in found), found


def test_a_share_is_of_what_is_seen() -> None:
    made = sparse_prefill_ways.Layer(2, 1, 16, 1200, 16)
    reads = sparse_prefill_ways.random_reads(made, 512, 1200, 0.5)
    assert reads.shape == (1, 6, 10) and reads[..., 0].all()
    # Blocks 4 to 9: the half of 5 to 10, rounded up.
    assert reads.sum(dim=-1).tolist() == [[3, 3, 4, 4, 5, 5]]
    assert all(reads[0, row, 4 + row] and not reads[0, row, 5 + row :].any() for row in range(6))


@pytest.mark.nightly
def test_the_dry_run_times_every_way(tmp_path: Path) -> None:
    speed.main(["--dry", "--output", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert not report["cut_off"]
    assert {line["way"] for line in report["cases"]} == {"fa3 dense", *speed.WAYS}
    assert not [line for name in ("cases", "costs") for line in report[name] if "error" in line]


def test_answers_of_everything_are_the_dense_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And those of little are not; a second run goes on from the first one's file."""
    out = tmp_path / "out.json"
    least = "pooled:cover=0.01"
    argv = ["--model", str(CHECKPOINT), "--out", str(out), "--lengths", "420", "--tasks", "notes"]
    argv += ["--settings", "oracle:cover=1.0", least, "one_bit:cover=0.9,tail=1"]
    sparse_prefill.main([*argv, "--prompts", "1", "--recall-prompts", "1"])
    first = json.loads(out.read_text())
    assert sparse_prefill.main([*argv, "--prompts", "2", "--time-limit", "-1"]) == 1
    assert json.loads(out.read_text()) == first
    assert sparse_prefill.main([*argv, "--prompts", "2", "--recall-prompts", "1"]) == 0
    report = json.loads(out.read_text())
    assert len(report["prompts"]) == 2 and report["prompts"][0] == first["prompts"][0]
    dense, whole, least_row, tail = report["rows"]
    assert dense["right"] == whole["right"] == 100 and whole["same_answers"] == 2
    assert dense["share"] == whole["share"] == 1
    # Four blocks of queries: two blocks of keys each, but for the first.
    assert least_row["share"] == pytest.approx(7 / 10) and least_row["most"] == 2
    assert tail["share"] > least_row["share"] and tail["most"] == 4
    assert whole["recall"]["mass"] == pytest.approx(1, abs=1e-3)
    assert 0.2 < least_row["recall"]["mass"] < 0.99
    assert "| 420, n = 2 | oracle:cover=1.0 | 100.0 | 100.0 (" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="was made with other settings"):
        sparse_prefill.main([*argv, "--prompts", "3", "--seed", "1"])
    with pytest.raises(SystemExit, match="was made with other --tasks"):
        sparse_prefill.main([*argv, "--tasks", "notes_3", "--prompts", "3"])
    with pytest.raises(SystemExit, match=r"there is no file nowhere\.jsonl"):
        sparse_prefill.main([*argv, "--ruler", "nowhere.jsonl"])


def test_tasks_are_named_by_group_and_settings_are_checked_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--model", "nowhere", "--out", "out.json"]
    parsed = sparse_prefill.parse_args([*argv, "--tasks", "lookups", "notes", "--lengths"])
    assert parsed.tasks == ["question_first", "several_words", "code_lookup", "notes"]
    assert parsed.lengths == [] and list(parsed.named) == list(sparse_prefill.SETTINGS)
    with pytest.raises(SystemExit):
        sparse_prefill.parse_args([*argv, "--settings", "pooled:share=0.1"])
    assert "no parameter 'share'" in capsys.readouterr().err


def test_decode_of_several_settings_is_that_of_one() -> None:
    """The prompt's dense answer is the one of the model's own loop."""
    model = sparse_model.SparseModel(CHECKPOINT, torch.device("cpu"), torch.float32)
    ids = model.tokenizer.encode("Once upon a time there was a cat. " * 12)
    answers, reads = model.answers(ids, [sparse_model.DENSE, Setting("pooled", 0.01)], 6)
    assert [each.share for each in reads] == [1, pytest.approx(reads[1].share)]
    other = sparse_model.Model(CHECKPOINT, torch.device("cpu"), torch.float32)
    assert answers[0] == other.answer(ids, 6)
