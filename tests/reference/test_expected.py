"""What a reference calls certain."""

import math

import pytest
from support.expected import Policy, Read, expect
from support.prompts import prompt_of
from transformers import PreTrainedModel

from reference.after import After
from reference.fastkv import Keep
from reference.fier import Retrieve

HALF = Keep(kv_rate=0.5)


@pytest.mark.parametrize(
    "policy", [HALF, After(HALF, 3), Read(Retrieve(16), HALF), Read(Retrieve(16), After(HALF, 3))]
)
def test_nothing_is_certain_at_a_near_tie_of_retention(
    llama: PreTrainedModel, policy: Policy
) -> None:
    prompt, tokens = prompt_of(60), [5, 6, 7, 8, 9]
    surely = expect(llama, prompt, tokens, policy, near_tie=0.0)
    assert 0 < surely.slack < math.inf and surely.clear > 0
    assert expect(llama, prompt, tokens, policy, near_tie=2 * surely.slack).clear == 0
