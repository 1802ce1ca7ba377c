import os
import pytest
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.heads import add_mtp, build_head
from reference.models import build_model
from support import inside
from support.engine import running
from support.expected import FULL, Read
from support.parity import *
from support.prompts import prompts_of, VOCAB
POL = [FULL, Keep(kv_rate=0.2), Read(Retrieve(64)), Read(Retrieve(64), Keep(kv_rate=0.6))]
@pytest.mark.parametrize("kind", os.environ.get("KIND","eagle").split())
def test_it(tmp_path, kind, dense_ops):
    if kind == "mtp":
        base = build_model(tmp_path/"b", arch="qwen2", vocab=VOCAB)
        m = add_mtp(tmp_path/"m", base); d = None
        spec = {"method":"mtp","num_speculative_tokens":3}
    else:
        m = base = build_model(tmp_path/"m", arch="llama", vocab=VOCAB)
        d = build_head(tmp_path/"d", m, kind)
        spec = {"method":kind,"model":str(d),"num_speculative_tokens":3}
    prompts = prompts_of((97,128,65,90), seed=11)
    with running(m, "full", config=room_for(POL), speculative_config=spec, async_scheduling=False, max_model_len=256, enable_prefix_caching=True) as e:
        for g in e.scheduler.kv_cache_config.kv_cache_groups: print(type(g.kv_cache_spec).__name__, g.is_eagle_group, g.layer_names)
        inside.poison_free_blocks(e)
        a = ask(e, prompts, POL, max_tokens=12)
        b = ask(e, [[*p,7,8,9] for p in prompts], POL, max_tokens=4)
        print([x.cached for x in b])
        e.assert_idle()
        for x in a: print(x.tokens)
    assert_parity(base, [*a, *b], POL*2, most=1)
