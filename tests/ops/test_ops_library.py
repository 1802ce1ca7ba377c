"""Where the CUDA operators lie, and which of them a server takes; no GPU, nothing is loaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.nvcc import make_nvcc

from vllm_kvx.errors import ToolError
from vllm_kvx.ops import build as build_ops
from vllm_kvx.ops import library
from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE, choose_backend

# Not even root can write there.
READ_ONLY = Path("/proc")


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders of the package and of the cache, empty; servers import no other package."""
    (tmp_path / "package").mkdir()
    put_package_into(tmp_path / "package", monkeypatch)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(build_ops, "imported_by_servers", lambda: None)


def put_package_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (library, build_ops):
        monkeypatch.setattr(module, "LIBRARY", folder / "_kvx_ops.so")


def write(path: Path, *architectures: str, key: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = library.record(key or library.key_of(), architectures)
    path.write_bytes(b"\x7fELF\0" + text.encode() + b"\0more")


def test_nothing_is_built(tmp_path: Path) -> None:
    assert library.found() == []
    assert library.missing() == (
        f"CUDA ops are not built in {tmp_path}/package or {tmp_path}/cache/ops/{library.key_of()}: "
        "run `vllm-kvx build-ops`"
    )


def test_the_packages_own_comes_first(tmp_path: Path) -> None:
    cached = tmp_path / "cache" / "ops" / library.key_of() / "80-90a.so"
    write(cached, "80", "90a")
    assert [each.path for each in library.found()] == [cached] and library.missing() == ""
    write(library.LIBRARY, "100")
    first, second = library.found()
    assert (first.path, first.architectures) == (library.LIBRARY, ("100",))
    assert (second.path, second.architectures) == (cached, ("80", "90a"))


@pytest.mark.parametrize("content", [b"", b"\x7fELF of an older vllm-kvx", None])
def test_a_stale_library_is_not_taken(content: bytes | None) -> None:
    if content is None:
        write(library.LIBRARY, "80", "90a", key="0123456789abcdef")
    else:
        library.LIBRARY.write_bytes(content)
    assert library.found() == []
    assert library.missing() == (
        f"{library.LIBRARY} is built from other sources than this vllm-kvx: run `vllm-kvx "
        "build-ops`"
    )


def test_the_key_is_of_every_source(tmp_path: Path) -> None:
    copy = shutil.copytree(library.SOURCES, tmp_path / "csrc")
    keys = [library.key_of(), library.key_of(copy)]
    assert keys[0] == keys[1]
    for i, file in enumerate(sorted(copy.iterdir())):
        other = shutil.copytree(copy, tmp_path / f"changed-{i}")
        (other / file.name).write_text(file.read_text() + "\n")
        keys.append(library.key_of(other))
    (shutil.copytree(copy, tmp_path / "backup") / "score.cu~").touch()
    assert library.key_of(tmp_path / "backup") == keys[0]
    (copy / "score.cu").rename(copy / "scores.cu")
    library.key_of.cache_clear()
    keys.append(library.key_of(copy))
    assert len(set(keys)) == len(keys) - 1


@pytest.mark.parametrize(
    ("architectures", "runs", "does_not"),
    [
        (("80",), [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        (("86",), [(8, 6), (8, 9)], [(8, 0)]),
        (("90a",), [(9, 0)], [(8, 0), (9, 1), (10, 0)]),
        (("100f",), [(10, 0), (10, 3)], [(12, 0)]),
        (("80", "90a"), [(8, 0), (9, 0)], [(12, 0)]),
    ],
)
def test_machine_code(architectures: tuple[str, ...], runs: list, does_not: list) -> None:
    built = library.Library(Path("ops.so"), "", architectures)
    assert all(built.runs_on(capability) for capability in runs)
    assert not any(built.runs_on(capability) for capability in does_not)


def test_another_gpu_names_its_architecture() -> None:
    built = [library.Library(Path("/there/ops.so"), "", ("80", "90a"))]
    assert library.not_for(built, (12, 0)) == (
        "no CUDA ops for compute capability 12.0 in /there/ops.so (80, 90a): "
        "run `vllm-kvx build-ops --arch 120`"
    )
    assert library.not_for(built, (9, 0)).endswith("--arch 90a`")


def test_a_user_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVX_CACHE_ROOT")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert library.found() == [] and "ops are not built in" in library.missing()
    put_package_into(READ_ONLY, monkeypatch)
    with pytest.raises(ToolError, match="nor a home directory can be written: set KVX_CACHE_ROOT"):
        build_ops.place(["80"])


# What a worker does with what is there.


@pytest.mark.parametrize("capability", [(8, 6), (9, 0), (12, 0)])
def test_ops_that_do_not_run_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int]
) -> None:
    """Triton's run, and the reason is in the log; the first file that fits is the one tried."""
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if cuda_ops.loaded() is not None:
        pytest.skip("this process has loaded the CUDA ops")
    gpu = torch.device("cuda")
    assert choose_backend(gpu) == ("triton", library.missing())
    other = tmp_path / "cache" / "ops" / library.key_of() / "90a.so"
    write(library.LIBRARY, "80")
    write(other, "90a")
    tried = {8: library.LIBRARY, 9: other}.get(capability[0])
    backend, reason = choose_backend(gpu)
    if tried is None:
        assert reason.endswith("run `vllm-kvx build-ops --arch 120`")
    else:
        assert reason.startswith(f"{tried} cannot be loaded: ")
    assert backend == "triton" and cuda_ops.loaded() is None
    monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
    with pytest.raises(ValueError, match=f"{BACKEND_VARIABLE}=cuda: "):
        choose_backend(gpu)


# Where a build goes to.


def built_by(*options: str, tmp_path: Path, said: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """What the command prints, and says on stderr besides how far it is."""
    if not (tmp_path / "cuda").exists():
        make_nvcc(tmp_path / "cuda")
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    code = build_ops.main(["--nvcc", str(nvcc), *options])
    captured = said.readouterr()
    assert code == 0, captured.err
    progress = ("Compiling ", "[", "Linking")
    lines = captured.err.splitlines(keepends=True)
    return Path(captured.out.strip()), "".join(x for x in lines if not x.startswith(progress))


def test_a_build_goes_into_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library.LIBRARY.touch()  # A stale one is replaced.
    path, err = built_by(tmp_path=tmp_path, said=capsys)
    assert path == library.LIBRARY and not err
    assert library.found() == [library.Library(path, library.key_of(), ("80", "90a"))]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_package_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_package_into(READ_ONLY, monkeypatch)
    path, _ = built_by("--arch", "9.0a", "--arch", "90a", tmp_path=tmp_path, said=capsys)
    folder = tmp_path / "cache" / "ops" / library.key_of()
    assert path == folder / "90a.so"
    # For another machine with the same home: both stay.
    other, _ = built_by("--arch", "80", tmp_path=tmp_path, said=capsys)
    assert [each.path for each in library.found()] == [other, path] == [folder / "80.so", path]


def test_neither_can_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_package_into(READ_ONLY, monkeypatch)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(READ_ONLY / "cache"))
    monkeypatch.setattr(build_ops, "build", lambda *_, **__: pytest.fail("it was compiled first"))
    assert build_ops.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"build_ops: error: neither {READ_ONLY} nor {READ_ONLY}/cache/ops/")
    assert "set KVX_CACHE_ROOT to a directory that can" in said


def test_servers_import_another_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a checkout after `pip install .`: the build goes where both look."""
    theirs = tmp_path / "site-packages" / "vllm_kvx" / "ops" / "_kvx_ops.so"
    key = library.key_of()
    monkeypatch.setattr(build_ops, "imported_by_servers", lambda: (theirs, key))
    path, err = built_by(tmp_path=tmp_path, said=capsys)
    assert path == tmp_path / "cache" / "ops" / key / "80-90a.so" and not err
    monkeypatch.setattr(build_ops, "imported_by_servers", lambda: (theirs, "0123456789abcdef"))
    path, err = built_by(tmp_path=tmp_path, said=capsys)
    assert path.parent.name == key and path in {each.path for each in library.found()}
    assert err == (
        f"Servers of this environment import another vllm-kvx, in {theirs.parents[1]}, of other "
        "sources: to build the CUDA ops for it, run `vllm-kvx build-ops`.\n"
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_a_real_compiler_keeps_the_record(tmp_path: Path) -> None:
    """Of a library with one empty operator; it can be loaded, and says what it is of."""
    sources, output = tmp_path / "csrc", tmp_path / "ops.so"
    sources.mkdir()
    (sources / "empty.cu").write_text("__global__ void nothing() {}\n")
    build_ops.build(["80", "90a"], sources=sources, output=output)
    built = library.read(output)
    assert built == library.Library(output, library.key_of(sources), ("80", "90a"))
    code = f"import ctypes; ctypes.CDLL({str(output)!r}, mode=0)"
    # A CPU build of torch has no library for CUDA.
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not loaded.returncode or "libtorch_cuda.so" in loaded.stderr
