"""What a server says at start about from which length on it retrieves."""

import logging

import pytest
import torch

from vllm_kvx.ops.retrieval.backends import Backends
from vllm_kvx.ops.retrieval.costs import Begins, StepCosts, costs
from vllm_kvx.ops.retrieval.crossover import NEVER
from vllm_kvx.policy.layout import RetrievalLayout
from vllm_kvx.policy.methods.baselines.quest import Quest
from vllm_kvx.policy.methods.fier import FIER
from vllm_kvx.worker.decode.announce import announce, figures, logger


def said(
    monkeypatch: pytest.MonkeyPatch,
    policy: FIER,
    crossover: int,
    backend: str = "cuda",
    reason: str = "it is built",
) -> tuple[str, str]:
    """The line and the warning, empty if there is none, of a server of 32,768 tokens."""
    lines = {"info": "", "warning": ""}
    for level in lines:
        monkeypatch.setattr(
            logger, level, lambda text, *args, level=level: lines.update({level: text % args})
        )
    ops = Backends.of(backend, reason, torch.bfloat16, 128, 4, "max")
    machine = StepCosts(costs(backend, "max" if crossover < NEVER else "softmax", 8, 512))
    begins = Begins.of(policy.floor(crossover), policy.floor(0), policy.budget, machine, 64)
    announce(policy, begins, ops, 32768)
    assert logger.level in (logging.NOTSET, logging.INFO)
    return lines["info"], lines["warning"]


def test_length_and_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    line, warning = said(monkeypatch, FIER(2048), 16384)
    assert line == (
        "Retrieval: fier-2048 reads parts of contexts from 16384 tokens on, from 3419 in steps of "
        "64 such requests, and shorter ones whole (dense_below=auto); ops: cuda (it is built)"
    )
    assert not warning
    line, warning = said(monkeypatch, FIER(256, dense_below=0), NEVER)
    assert "from 257 tokens on" in line and "(dense_below=0)" in line and not warning
    assert not said(monkeypatch, FIER(64), 32768)[1]


def test_a_server_that_never_retrieves(monkeypatch: pytest.MonkeyPatch) -> None:
    line, warning = said(monkeypatch, FIER(512, dense_below=65536), 16384)
    assert "from 65536 tokens on, and shorter" in line and "max_model_len is 32768" in warning
    assert "retrieves from 65536 tokens on. To retrieve" in warning and "=<tokens>" in warning
    line, warning = said(monkeypatch, FIER(512), NEVER, "triton")
    assert "of no length" in line and "at no length; CUDA ops pay earlier" in warning
    # Not the ops' doing.
    warning = said(monkeypatch, FIER(512, dense_below=40000), 16384, "triton")[1]
    assert "from 40000 tokens on. To retrieve" in warning


def test_a_server_that_retrieves_in_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No single request reaches the length that pays for it, many at once do."""
    line, warning = said(monkeypatch, FIER(512), 65536)
    assert "from 65536 tokens on, from " in line and " in steps of 64 such requests" in line
    assert not warning


def test_ops_that_could_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose CUDA ops are not built serves, and a warning names the command."""
    reason = "CUDA ops are not built in /there: run `vllm-kvx build-ops`"
    line, warning = said(monkeypatch, FIER(2048), 16384, "triton", reason)
    assert not line and warning.endswith(f"ops: triton ({reason})")
    line, warning = said(monkeypatch, FIER(2048), 16384, "triton", "KVX_RETRIEVAL_OPS is set")
    assert line.endswith("ops: triton (KVX_RETRIEVAL_OPS is set)") and not warning


def test_servers_whose_own_policy_does_not_retrieve() -> None:
    """The layout answers for its policies: the largest budget waits for the longest contexts."""
    assert RetrievalLayout.of(FIER(200, 64, "sum", 9)).largest == FIER(200, 64, "sum")
    assert RetrievalLayout.of(Quest(128, 16)).largest == Quest(128, 16)


def test_lengths_in_json() -> None:
    ops = Backends.of("cuda", "it is built", torch.bfloat16, 128, 4, "max")
    begins = Begins.of(NEVER, 7, 7, StepCosts(costs("cuda", "max", 8, 512)), 64)
    found = figures(FIER(64), begins, ops, NEVER)
    assert found["auto"] is None and found["policy"] == "fier-64"
    assert found["dense_below_one"] is None
    found = figures(FIER(64), Begins(9000, 65, 64, 8000), ops, 16384)
    lengths = [found[f"dense_below{name}"] for name in ("", "_batch", "_one")]
    assert lengths == [9000, 65, 8000]


def test_a_server_that_retrieves_in_steps_of_one_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: warnings.append(text % args))
    ops = Backends.of("cuda", "it is built", torch.bfloat16, 128, 4, "max")
    for longest, warned in ((12288, 0), (12287, 1)):
        announce(FIER(2048), Begins(16384, 16384, 8, 12288), ops, longest)
        assert len(warnings) == warned
