"""vLLM's own ``vllm run-batch``: each answer names the policy that it was given under."""

import asyncio
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import inside
from support.chat_templates import PLAIN
from support.nightly import nightly
from vllm import SamplingParams
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from benchmarks.common.server import CHECKPOINT, cpu_environment, vllm_command
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.layout import layout_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.server.answered import note_name, say_in_usage

LINES = {"server's": None, "in full": "full", "retrieves": "fier-64", "refused": "speed-3"}


def test_each_task_says_its_own_policy() -> None:
    """Lines of a file are answered in tasks side by side, and their usage is made in the end."""

    policy = parse_policy("speed-4")
    settings = KVSettings(policy, layout_of([policy], 8), 8, debug=False)

    def made(self: Any, params: SamplingParams) -> Any:
        return SimpleNamespace(params=params, sampling_params=params)

    say_in_usage()
    process_inputs = inside.naming(settings, note_name, made)

    async def answer(name: str | None) -> Any:
        params = SamplingParams(extra_args={"kv_policy": name} if name else None)
        process_inputs(params)
        await asyncio.sleep(0.001)
        return UsageInfo(prompt_tokens=1).model_dump().get("kv_policy")

    async def answers() -> list[Any]:
        return await asyncio.gather(*map(answer, (None, "full", "speed-4:anchors=2")))

    assert asyncio.run(answers()) == ["speed-4", "full", "speed-4:anchors=2"]
    assert "kv_policy" not in UsageInfo(prompt_tokens=1).model_dump()


@nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs vLLM's CPU build")
def test_the_file_names_policies(tmp_path: Path) -> None:
    batch, path, template = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "plain.jinja"))
    template.write_text(PLAIN)
    with batch.open("w") as file:
        for custom_id, policy in LINES.items():
            body: dict[str, Any] = {
                "model": "lookup",
                "messages": [{"role": "user", "content": "one two three " * 30}],
                "max_tokens": 3,
            }
            if policy is not None:
                body["vllm_xargs"] = {"kv_policy": policy}
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
            print(json.dumps({**line, "body": body}), file=file)
    command = [vllm_command(), "run-batch", "-i", str(batch), "-o", str(path)]
    command += ["--model", str(CHECKPOINT), "--served-model-name", "lookup"]
    command += ["--chat-template", str(template), "--kv-policy", "speed-4", "--kv-layout"]
    command += ["fier-64", "--max-model-len", "1024", "--dtype", "float32", "--block-size", "32"]
    done = subprocess.run(
        [*command, "--enforce-eager"], env=cpu_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}
    said = {
        name: (line["response"]["body"] or {}).get("usage", {}).get("kv_policy")
        for name, line in found.items()
    }
    expected = {"server's": "speed-4", "in full": "full", "retrieves": "fier-64", "refused": None}
    assert said == expected
    assert "speed-3" in found["refused"]["error"]["error"]["message"]
