import time, sys
from .conftest import *
from reference import fastkv
def torch_ops(monkeypatch):
    from vllm_kvx.ops import saliency, select
    from vllm_kvx.worker import taps
    def window_saliency(q, paged, bt, nk, w, off, mk, tk, scale, key_scale=1.0):
        return saliency.window_saliency_reference(q, paged, bt, nk, w, off, scale, key_scale)
    monkeypatch.setattr(taps, "window_saliency", window_saliency)
    def select_kept(scores, nk, w, caps, off, oo, total):
        return torch.cat(select.select_kept_reference(scores, nk, w, caps, off), dim=1).int()
    monkeypatch.setattr(taps, "select_kept", select_kept)
def quick(monkeypatch):
    from triton.runtime import interpreter
    stock = interpreter._patch_lang
    active=[False]
    def patch(fn):
        if active[0]:
            return interpreter._LangPatchScope()
        active[0]=True
        scope=stock(fn)
        r=scope.restore
        def restore():
            active[0]=False
            r()
        scope.restore=restore
        return scope
    monkeypatch.setattr(interpreter, "_patch_lang", patch)
def test_it(tiny, monkeypatch):
    model = tiny()
    with running(model, "fastkv:tsp_layer=3", max_num_seqs=32) as engine:
        engine.generate(prompts_of((300,)))
        for i in range(2):
            for lens, mt in (((20,)*8, 1), ((20,)*8, 5), ((300,), 1),((300,), 5)):
                t=time.process_time(); w=time.time()
                a=engine.generate(prompts_of(lens), max_tokens=mt)
                print(i, lens, mt, "cpu", time.process_time()-t, "wall", time.time()-w)
            quick(monkeypatch)
