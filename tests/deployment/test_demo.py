"""`bash deploy/demo.sh`, the first command that a newcomer types."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.nightly import nightly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="serves with vLLM's CPU build")

ROOT = Path(__file__).parents[2]
BLOCK = 32
LAYERS = 8
PROMPT = 1500
# What the demo allows itself.
MAX_MODEL_LEN = 4096
# Of the tests alone: whoever types the command has set nothing.
TESTS_ALONE = ("KVX_CPU", "TRITON_INTERPRET", "VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS")


def run(*arguments: str) -> tuple[str, dict[str, list[str]]]:
    """What the command prints, after which it ended well, and its table: cells by label."""
    # In another environment than the clone's own the script would make that one first.
    in_clone = Path(sys.prefix) == ROOT / ".venv"
    command = ["bash", str(ROOT / "deploy/demo.sh")] if in_clone else [sys.executable, "-m"]
    command += arguments if in_clone else ["deploy.demo", *arguments]
    env = {name: value for name, value in os.environ.items() if name not in TESTS_ALONE}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "Traceback" not in said and not done.stderr, said
    rows = (re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines())
    return done.stdout, {label: cells for label, *cells in rows if cells}


def run_and_count(*arguments: str) -> tuple[str, dict[str, list[str]]]:
    """As ``run``, once more where the machine was too busy to count blocks, which it then says."""
    for _ in range(3):
        said, table = run(*arguments)
        assert ("KV blocks held" in table) != ("This machine is too busy" in said), said
        if "KV blocks held" in table:
            break
    return said, table


def figures(cells: list[str]) -> tuple[float, float, float]:
    """Under the policy, in full, and the share that is said to be saved."""
    some, whole, *saved = (float(cell.rstrip("%").replace(",", "")) for cell in cells)
    return some, whole, saved[0] / 100 if saved else 0.0


def test_what_it_shows() -> None:
    said, table = run_and_count()
    assert "the answer is in line 53" in said and said.endswith("Both answers are right.\n")
    assert table["answer"] == ["pony.", "pony."] and table["right"] == ["yes", "yes"]

    # Two generated tokens are computed as well: the word and the full stop.
    layer_tokens, of_full, saved = figures(table["layer-tokens computed"])
    assert of_full == LAYERS * (PROMPT + 2)
    # Layer 3 drops its rows already: from there on the anchor, the tail and these two.
    assert layer_tokens == 3 * (PROMPT + 2) + 5 * 4
    assert saved == pytest.approx(1 - layer_tokens / of_full, abs=5e-4)

    # Two KV groups, of which one stores the prompt; both store what was generated when blocks were
    # counted, of which one answer may have a few tokens more.
    blocks, of_full, saved = figures(table["KV blocks held"])
    of_prompt = -(-PROMPT // BLOCK)
    assert 2 * of_prompt <= of_full <= 2 * MAX_MODEL_LEN // BLOCK
    assert of_prompt + 1 <= blocks <= of_full - of_prompt + 4
    assert saved == pytest.approx(1 - blocks / of_full, abs=5e-4)

    pool, of_stock, _ = figures(table["prompt tokens the KV pool holds"])
    assert 1.9 * of_stock < pool < 2 * of_stock
    assert min(figures(table["seconds to first token *"])[:2]) > 0


@nightly
def test_what_retrieval_reads() -> None:
    said, table = run_and_count("--policy", "fier-256", "--tokens", "1000")
    assert said.endswith("Both answers are right.\n")
    blocks, of_full, _ = figures(table["KV blocks held"])
    assert 0 < abs(blocks - of_full) + 1 <= 4
    read, held, saved = figures(table["KV entries that decode steps read"])
    # Two of eight layers read everything.
    assert saved == pytest.approx(1 - read / held, abs=5e-4) and 0.5 < saved < 0.75
