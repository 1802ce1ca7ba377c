"""FlashAttention over packed sequences, forward and backward, against the reference of tuning."""

import pytest
import torch
from support.models import LOOKUP

from benchmarks.tuning.step_times import job
from vllm_kvx.tools.tune_speed.packed_attention import Segments, attend, attend_reference
from vllm_kvx.tools.tune_speed.student import Student
from vllm_kvx.tools.tune_speed.visibility import Batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("lengths", [(1,), (7, 1, 300, 2, 128), (4096, 129)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (8, 2, 128)])
def test_as_the_reference(lengths, heads, kv_heads, dim):
    rng = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(sum(lengths), count, dim, generator=rng).cuda().bfloat16().requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    wide = [each.detach().float().requires_grad_() for each in rows]
    segments = Segments.of(lengths, "cuda")
    found = attend(*rows, segments, dim**-0.5)
    expected = attend_reference(*wide, segments, dim**-0.5)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
    weight = torch.randn(found.shape, generator=rng).cuda()
    mine = torch.autograd.grad((found * weight).sum(), rows)
    theirs = torch.autograd.grad((expected * weight).sum(), wide)
    for one, other in zip(mine, theirs, strict=True):
        # Of a sequence of one row queries and keys have no gradient.
        assert (one.float() - other).norm() < 0.02 * other.norm() + 1e-3


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_student_learns_as_on_the_cpu(method, checkpointing):
    """Loss and gradients of a step, but for bfloat16, several turns among its examples."""
    settings = job(str(LOOKUP), "cuda", cutoff=3, method=method, hidden_loss=0.5, rank=4, alpha=8)
    rng = torch.Generator().manual_seed(0)

    def some(count):
        return torch.randint(3, 500, (count,), generator=rng).tolist()

    batch = Batch.of(
        [(some(90), some(7)), (some(1), some(1)), (some(60), some(4))], [[(20, 6)], [], []]
    )
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        student = Student(settings, torch.device(device))
        student.trained.train()
        if checkpointing:
            student.trained.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.no_grad():
            for name, weight in student.trained.named_parameters():
                # An adapter's second factor begins with zeros, where the first learns nothing.
                if "lora_" in name:
                    weight.copy_(0.02 * torch.randn(weight.shape, generator=rng.manual_seed(1)))
        here = batch.to(device)
        with student.computing():
            teacher = student.teacher_states(here)
            loss = student.trained(**vars(here), teacher=teacher)
        loss.backward()
        learned = [p.grad.float().cpu() for p in student.trained.parameters() if p.grad is not None]
        found.append((loss.item(), torch.cat([each.flatten() for each in learned])))
    (loss, gradient), (narrow_loss, narrow) = found
    assert narrow_loss == pytest.approx(loss, rel=0.05)
    assert torch.cosine_similarity(gradient, narrow, dim=0) > 0.98
