"""vLLM's program around a decoder's compiled pieces, cut at attention."""

import operator
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from vllm.compilation.codegen import compile_execution_fn, generate_execution_code

from vllm_kvx.models.stitching import Cut, Stitching, UnknownForm

# As vLLM 0.32 writes it for a Llama of two layers, with shorter names of weights.
SOURCE = """\
import torch
import operator

def __vllm_inlined_submods__1(key_2, s72, value, name_0, query_2, output_4):
    unified_kv_cache_update = torch.ops.vllm.unified_kv_cache_update(key_2, value, name_0)
    unified_attention_with_output = torch.ops.vllm.unified_attention_with_output(query_2, key_2, \
value, output_4, name_0, kv_cache_dummy_dep=unified_kv_cache_update)
    return ()

def __vllm_inlined_submods__3(key_5, s72, value_1, name_1, query_5, output_12):
    unified_kv_cache_update = torch.ops.vllm.unified_kv_cache_update(key_5, value_1, name_1)
    unified_attention_with_output = torch.ops.vllm.unified_attention_with_output(query_5, key_5, \
value_1, output_12, name_1, kv_cache_dummy_dep=unified_kv_cache_update)
    return ()

def execution_fn(s72, l_ids_, embed, norm_0, qkv_0, cos_sin, s80, l_positions_, name_0, o_0, \
mlp_0, norm_1, qkv_1, name_1, o_1, mlp_1, norm, *, __vllm_submods__):
    submod_0 = __vllm_submods__[0](l_ids_, s72, embed, norm_0, qkv_0, l_positions_, cos_sin)
    del l_ids_, embed, norm_0, qkv_0
    getitem = submod_0[0]
    getitem_1 = submod_0[1]
    getitem_2 = submod_0[2]
    getitem_3 = submod_0[3]
    getitem_4 = submod_0[4]
    del submod_0
    submod_1 = __vllm_inlined_submods__1(getitem, s72, getitem_1, name_0, getitem_2, getitem_3)
    del getitem, getitem_1, getitem_2, name_0
    submod_2 = __vllm_submods__[2](getitem_3, s72, o_0, getitem_4, mlp_0, norm_1, qkv_1, \
l_positions_, cos_sin)
    del getitem_3, getitem_4, mlp_0, norm_1, o_0, qkv_1
    getitem_5 = submod_2[0]
    getitem_6 = submod_2[1]
    getitem_7 = submod_2[2]
    getitem_8 = submod_2[3]
    getitem_9 = submod_2[4]
    del submod_2
    submod_3 = __vllm_inlined_submods__3(getitem_5, s72, getitem_6, name_1, getitem_7, getitem_8)
    del getitem_5, getitem_6, getitem_7, name_1
    submod_4 = __vllm_submods__[4](getitem_8, s72, o_1, getitem_9, mlp_1, norm)
    del getitem_8, getitem_9, mlp_1, norm, o_1, s72
    getitem_10 = submod_4[0]
    return (getitem_10,)
"""


class Piece:
    """A compiled piece that writes down what it is called with."""

    def __init__(self, number: int, outputs: int, calls: list[Any]) -> None:
        self.number, self.outputs, self.calls = number, outputs, calls

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        self.calls.append((self.number, args))
        return tuple(f"{self.number}.{place}" for place in range(self.outputs))


def test_cuts() -> None:
    program = Stitching(SOURCE)
    assert [each.live for each in program.cuts] == [
        ("getitem_2", "getitem", "getitem_1", "getitem_3", "getitem_4"),
        ("getitem_7", "getitem_5", "getitem_6", "getitem_8", "getitem_9"),
    ]
    assert isinstance(program.cuts[0], Cut) and program.parameters[0] == "s72"


def scope_and_pieces(source: str) -> tuple[dict[str, Any], list[Any], list[Any]]:
    calls: list[Any] = []
    pieces = [Piece(0, 5, calls), None, Piece(2, 5, calls), None, Piece(4, 1, calls)]
    scope: dict[str, Any] = {}
    exec(source, scope)
    for number in (1, 3):
        scope[f"__vllm_inlined_submods__{number}"] = Piece(number, 0, calls)
    return scope, pieces, calls


def test_parts_call_what_the_program_calls() -> None:
    program = Stitching(SOURCE)
    given = tuple(program.parameters)
    scope, pieces, calls = scope_and_pieces(SOURCE)
    assert scope["execution_fn"](*given, __vllm_submods__=pieces) == ("4.0",)
    whole = list(calls)
    for edges in ([0, 2], [0, 1, 2]):
        calls.clear()
        live: dict[str, Any] = {}
        for first, last in pairwise(edges):
            out = program.part(first, last).function(scope)(given, live, pieces)
            assert not live, "what lives at a cut is taken from there"
            live = out
        assert out == ("4.0",) and calls == whole


def test_a_part_frees_what_the_program_frees() -> None:
    class Query:
        pass

    query, program = Query(), Stitching(SOURCE)
    seen, is_there = list[bool](), weakref.ref(query)
    cut = program.cuts[1]
    live: dict[str, Any] = dict.fromkeys(cut.live, 0) | {cut.query: query}
    del query

    def last_piece(*_: Any) -> tuple[int]:
        seen.append(is_there() is not None)
        return (1,)

    scope, pieces, _ = scope_and_pieces(SOURCE)
    scope["__vllm_inlined_submods__3"] = lambda *_: ()
    pieces[4] = last_piece
    assert program.part(1, 2).function(scope)(tuple(program.parameters), live, pieces) == (1,)
    assert seen == [False]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("def execution_fn", "def run", "no function execution_fn"),
        ("return (getitem_10,)", "return (getitem_10, submod_4)", "does not return one tensor"),
        ("return (getitem_10,)", "return getitem_10", "does not return one tensor"),
        ("getitem_9, mlp_1, norm)", "getitem_9, mlp_1, norm, getitem_2)", "live beside it"),
        ("getitem_9, mlp_1, norm)", "mlp_1, norm)", "live beside it"),
    ],
)
def test_other_forms_are_refused(old: str, new: str, reason: str) -> None:
    assert old in SOURCE
    with pytest.raises(UnknownForm, match=reason):
        Stitching(SOURCE.replace(old, new))


@pytest.mark.parametrize("kept", ["attention", "no attention"])
def test_attention_inside_of_pieces_has_no_cut(kept: str) -> None:
    """As Inductor's own partition has it."""
    name = "unified_attention_with_output"
    source = SOURCE if kept == "attention" else SOURCE.replace(name, "another_op")
    assert len(Stitching(source).cuts) == (2 if kept == "attention" else 0)


def test_source_of_vllms_own_generator() -> None:
    """vLLM writes a program for a graph that is split as its own are."""
    attention = torch.fx.Graph()
    query, key, *_ = map(attention.placeholder, ("query", "key", "value", "output"))
    attention.call_function(torch.ops.aten.add.Tensor, (query, key))
    attention.output(())

    root = torch.nn.Module()
    root.submod_0 = torch.nn.Identity()  # In the place of a compiled piece.
    root.submod_1 = torch.fx.GraphModule(torch.nn.Module(), attention)
    root.submod_2 = torch.nn.Identity()
    graph = torch.fx.Graph()
    rows = graph.placeholder("rows")
    first = graph.call_module("submod_0", (rows,))
    parts = [graph.call_function(operator.getitem, (first, place)) for place in range(5)]
    graph.call_module("submod_1", tuple(parts[:4]))
    last = graph.call_module("submod_2", (parts[3], parts[4]))
    graph.output((last,))
    split = torch.fx.GraphModule(root, graph)
    source, submods, consts = generate_execution_code(split)
    # The op's place is what a cut is found by.
    call = "torch.ops.vllm.unified_attention_with_output(query, key, value, output, 'name')"
    lines = source.split("\n")
    at = next(i for i, line in enumerate(lines) if "aten" in line)
    lines[at] = f"    {call}"
    program = Stitching("\n".join(lines))
    assert [cut.live for cut in program.cuts] == [
        ("getitem", "getitem_1", "getitem_2", "getitem_3", "getitem_4")
    ]
    function = compile_execution_fn("\n".join(lines), {}, submods, consts)
    assert function.keywords["__vllm_submods__"] == [None, None, None]
