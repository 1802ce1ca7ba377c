"""A converted checkpoint against its GGUF file: perplexity, weights and logits, and stock vLLM's.

    KVX_CPU=1 python -m benchmarks.checkpoint.check FOLDER MODEL.gguf --out NAME.json

transformers reads the GGUF file by its own loader, which shares no code with the conversion, and
its weights are rounded to bf16, as the converted ones are. vLLM runs the folder in float32 without
a policy and then under each of POLICIES; its greedy tokens are compared with transformers'.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json
from vllm_kvx.tools.engine import prepare_environment
from vllm_kvx.tools.tasks.filler import sentences

POLICIES = ("full", "snapkv:kv_rate=0.2,kv_floor=0", "fier-128:dense_below=0")
LENGTH, GENERATED = 640, 6


def transformers_side(
    folder: Path, gguf: Path
) -> tuple[dict[str, Any], list[int], list[list[Any]]]:
    """Measured figures, the prompt, and (token, logprob) of transformers' greedy continuation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(" ".join(sentences(0.3, 120)), return_tensors="pt").input_ids[:, :LENGTH]
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    mine = dict(ours.named_parameters())
    with torch.inference_mode():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.bfloat16())
        differ = [n for n, p in theirs.named_parameters() if not torch.equal(p, mine[n])]
        logits, other = ours(ids).logits[0], theirs(ids).logits[0]
        nats = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).item()
        continued, found = ids, list[list[Any]]()
        for _ in range(GENERATED):
            logprobs = ours(continued, logits_to_keep=1).logits[0, -1].log_softmax(-1)
            best = int(logprobs.argmax())
            found.append([best, float(logprobs[best])])
            continued = torch.cat([continued, torch.tensor([[best]])], 1)
    figures = {
        "tokens": ids.shape[1],
        "perplexity": round(math.exp(nats), 3),
        "tensors": len(mine),
        "tensors_that_differ": differ,
        "largest_logit_difference": (logits - other).abs().max().item(),
    }
    return figures, ids[0].tolist(), found


def vllm_side(folder: Path, prompt: list[int], wanted: list[list[Any]]) -> dict[str, Any]:
    """Stock vLLM's greedy tokens and logprobs of the prompt, and those under each policy."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    def run(llm: Any, extra: dict[str, str]) -> dict[str, Any]:
        params = SamplingParams(
            temperature=0.0, max_tokens=GENERATED, logprobs=0, extra_args=extra or None
        )
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params)
        choice = output.outputs[0]
        pairs = zip(choice.logprobs, choice.token_ids, strict=True)
        logprobs = [entry[token].logprob for entry, token in pairs]
        apart = [abs(a - b) for a, (_, b) in zip(logprobs, wanted, strict=True)]
        return {
            "tokens_equal": list(choice.token_ids) == [token for token, _ in wanted],
            "largest_logprob_difference": max(apart),
            "text": choice.text,
        }

    options: dict[str, Any] = {
        **{"enforce_eager": True, "dtype": "float32", "block_size": 32, "seed": 0},
        **{"max_model_len": 1024, "enable_prefix_caching": False},
    }
    llm = LLM(str(folder), **options)
    found = {"stock": run(llm, {})}
    llm.llm_engine.engine_core.shutdown()
    del llm
    first, *others = POLICIES
    config: dict[str, Any] = {"kv_policy": first, "kv_layout": others}
    llm = LLM(str(folder), additional_config=config, **options)
    for name in POLICIES:
        found[name] = run(llm, {"kv_policy": name})
    llm.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prepare_environment()
    figures, prompt, wanted = transformers_side(args.folder, args.gguf)
    print(figures, flush=True)
    figures["vllm"] = vllm_side(args.folder, prompt, wanted)
    head = about(
        "A converted checkpoint against transformers' own loading of its GGUF file and vLLM.",
        command_line("benchmarks.checkpoint.check", sys.argv[1:]),
        packages=("transformers",),
    )
    write_json(args.out, {"about": head, **figures})


if __name__ == "__main__":
    main()
