"""What uneven budgets would keep: every way keeps as much, and the recording is the dense one."""

import json
from pathlib import Path

import pytest
import torch
from support.models import LOOKUP

from benchmarks.answers import budgets
from benchmarks.answers.budgets import Found, kept_by, layer_shares, values_of


def made(task: str, loud: int) -> Found:
    """Layer `loud` needs entries all over the prompt, the others only its first ones."""
    torch.manual_seed(loud)
    needed = torch.zeros(4, 2, 400)
    needed[:, :, :8] = 1.0
    needed[loud] = torch.rand(2, 400)
    return Found(task, needed + 1e-3 * torch.rand(4, 2, 400), needed, torch.tensor([[loud, 0, 3]]))


@pytest.mark.parametrize("way", budgets.WAYS)
def test_every_way_keeps_as_much(way: str) -> None:
    prompts = [made("a", 2), made("b", 2)]
    shares = layer_shares(prompts[:1], 0.1)
    assert sum(shares) == 4 and max(shares) == shares[2]
    kept = kept_by(way, prompts[1], 0.1, shares)
    assert kept.float().mean() == pytest.approx(0.1, rel=0.03)
    if way in ("equal", "heads"):
        assert kept.sum(dim=(1, 2)).tolist() == [80] * 4
    if way != "heads":
        assert kept[0].sum(dim=1).unique().numel() == 1 or way == "free"
    equal = values_of(prompts[1], kept_by("equal", prompts[1], 0.1, shares))
    mass = values_of(prompts[1], kept)["mass"]
    assert mass > equal["mass"] if way in ("layers", "free") else way != "pyramid" or mass > 0


def test_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "budgets.json"
    budgets.main(
        [
            *("--model", str(LOOKUP), "--out", str(out), "--lengths", "300", "--after", "1"),
            *("--tasks", "notes", "notes_3", "--prompts", "4"),
        ]
    )
    found = json.loads(out.read_text())
    rows = {(row["rate"], row["budgets"]): row for row in found["rows"]}
    assert len(rows) == len(budgets.RATES) * len(budgets.WAYS)
    assert {each["task"] for each in found["prompts"]} == {"notes", "notes_3"}
    assert all(0 < row["mass"] <= 1 for row in rows.values())
    assert rows[0.2, "equal"]["mass"] >= rows[0.025, "equal"]["mass"]
