"""The CPU mode's interpreter against the one that Triton brings, and where it is installed."""

import os
import subprocess
import sys

import pytest
import torch
from vllm.triton_utils import tl, triton

from vllm_kvx.compat import quick_interpreter
from vllm_kvx.compat.quick_interpreter import install, stock_interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")

SIZE = 16


@triton.jit
def _halves(x):
    return tl.where(x > 0, x / 2, x % 2)


@triton.jit
def _numbers(ints, floats, out_ints, out_floats, n, size: tl.constexpr):
    at = tl.arange(0, size)
    i, x = tl.load(ints + at, mask=at < n, other=3), tl.load(floats + at)
    # Sums and products of 32 bits that wrap around, and mixed operands on either side.
    i = i * i + (1 << 20) * at - tl.program_id(0)
    whole = (i >> 3) ^ (i & 0xFF) | (i % 7) + (-i // 5)
    narrow = i.to(tl.int8) + 1
    wide = (i.to(tl.int64) << 20) + narrow
    truth = (x > 0.5) & (i % 2 == 0) | (at == 3)
    y = 2 * x + i - (x * 3).to(tl.float16) + truth
    y = tl.where(truth, tl.exp(-y * y), 1 - tl.abs(y)) + _halves(x)
    y += (truth + 1) * 0.5 + (truth + (x > 0)) + (at.to(tl.uint8) * 37 + 1) + x.to(tl.bfloat16) / 3
    for step in tl.range(3):
        y += step * tl.sum(x, 0) - tl.max(tl.where(truth, x, float("-inf")), 0)
    tl.store(out_ints + at, whole + wide + tl.cumsum(truth.to(tl.int32), 0))
    tl.store(out_floats + at, y)


@triton.jit
def _blocks(floats, out, size: tl.constexpr):
    rows, columns = tl.arange(0, size), tl.arange(0, size)
    x = tl.load(floats + rows[:, None] % 2 * 7 + columns[None, :])
    y = tl.dot(x, tl.trans(x), input_precision="ieee") + columns[None, :] * 0.25
    best, index = tl.max(y, axis=1, return_indices=True)
    y = y - best[:, None] + index[None, :]
    place = out + rows[:, None] * size + columns[None, :]
    tl.store(place, y.to(tl.bfloat16).to(tl.float32), mask=(rows[:, None] < 9) | (y < 0))


def results() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ints = torch.randint(-(2**31), 2**31 - 1, (SIZE,), generator=generator, dtype=torch.int32)
    floats = torch.randn(2 * SIZE, generator=generator)
    found = [
        torch.zeros(SIZE, dtype=torch.int64),
        torch.zeros(SIZE, dtype=torch.float64),
        torch.full((SIZE, SIZE), torch.nan),
    ]
    for _ in range(2):
        _numbers[(2,)](ints, floats, *found[:2], SIZE - 3, SIZE)
        _blocks[(1,)](floats, found[2], SIZE)
    return found


def outside() -> dict[str, object]:
    """What the interpreter and the language have of themselves, by name."""
    from triton.runtime import interpreter

    core = interpreter.tl.core
    owners = {
        "interpreter": interpreter,
        "builder": interpreter.InterpreterBuilder,
        "handle": interpreter.TensorHandle,
        "semantic": interpreter.TritonSemantic,
        **{"tl": interpreter.tl, "core": core, "math": interpreter.tl.math},
        **{each: getattr(core, each) for each in ("tensor", "dtype", "block_type")},
    }
    return {
        f"{owner}.{name}": value
        for owner, holder in owners.items()
        for name, value in vars(holder).items()
        if callable(value)
    }


def test_results_are_the_same_bit_for_bit() -> None:
    quick = results()
    with stock_interpreter():
        stock = results()
    for each, other in zip(quick, stock, strict=True):
        assert torch.equal(each.view(torch.uint8), other.view(torch.uint8))
    assert not quick[2].isnan().all() and quick[2].isnan().any()


def test_the_language_is_given_back() -> None:
    with stock_interpreter():
        before = outside()
        assert before["interpreter._patch_lang"].__module__ == "triton.runtime.interpreter"
    results()
    quick = outside()
    with stock_interpreter():
        after = outside()
    assert after == before
    changed = {name for name, value in quick.items() if value is not before.get(name)}
    assert {"interpreter._patch_lang", "tensor.__init__", "builder.binary_op"} < changed
    # And it is quick again.
    assert outside()["interpreter._patch_lang"] is not before["interpreter._patch_lang"]


def test_it_is_installed_once() -> None:
    before = outside()
    install()
    assert outside() == before


def test_another_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with stock_interpreter():
        before = outside()
        monkeypatch.setattr(quick_interpreter, "TRITON", "3.4")
        install()
        assert outside() == before
        monkeypatch.undo()


SEEN = """
import sys
from vllm.platforms import current_platform

assert current_platform.device_type == "cpu"
from triton.runtime import interpreter
print(interpreter._patch_lang.__module__, "vllm_kvx.compat.quick_interpreter" in sys.modules)
"""


@pytest.mark.parametrize("mode", ["1", "0", None])
def test_processes_have_it_in_the_cpu_mode_alone(mode: str | None) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("KVX_CPU", "TRITON_INTERPRET")}
    env |= {"KVX_CPU": mode} if mode else {}
    done = subprocess.run([sys.executable, "-c", SEEN], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = (
        "vllm_kvx.compat.quick_interpreter True"
        if mode == "1"
        else "triton.runtime.interpreter False"
    )
    assert done.stdout.splitlines()[-1] == expected
