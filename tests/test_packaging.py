"""What wheels and the source distribution hold, and that CUDA ops end up where servers look.

Everything is built from a copy of the checkout, and installed into environments of its own. nvcc is
one that stands in.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from support.nightly import nightly
from support.nvcc import make_nvcc

import vllm_kvx
from vllm_kvx.ops import library

ROOT = Path(__file__).parents[1]
NEEDED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
OPS = "vllm_kvx/ops/_kvx_ops.so"
BUILD = (
    "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])({!r}))"
)
FIND = "from vllm_kvx.ops import library; print(*[each.path for each in library.found()])"


def run(*command: object, cwd: Path, **environment: str) -> str:
    """What the command prints, after which it ended well; this package is not in its path."""
    drop = ("PYTHONPATH", "KVX_BUILD_OPS", "KVX_CACHE_ROOT")
    env = {name: value for name, value in os.environ.items() if name not in drop} | environment
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def build(tree: Path, to: Path, kind: str, **environment: str) -> Path:
    """A wheel or sdist of `tree`."""
    out = run(sys.executable, "-c", BUILD.format(str(to)), f"build_{kind}", cwd=tree, **environment)
    return to / out.splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, with what earlier builds left."""
    tree = tmp_path_factory.mktemp("checkout")
    for name in NEEDED:
        shutil.copy(ROOT / name, tree)
    no_more = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("csrc", "vllm_kvx"):
        shutil.copytree(ROOT / name, tree / name, ignore=no_more)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_none.py").touch()
    for left in (tree / OPS, tree / "build/lib" / OPS, tree / "build/lib/vllm_kvx/gone.py"):
        left.parent.mkdir(parents=True, exist_ok=True)
        left.touch()
    return tree


@pytest.fixture(scope="module")
def cuda_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("cuda")
    make_nvcc(home)
    return home


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(
    checkout: Path, sdist: Path, cuda_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Built after one with ops, which must leave nothing to this."""
    compiled = tmp_path_factory.mktemp("compiled")
    build(checkout, compiled, "wheel", KVX_BUILD_OPS="1", CUDA_HOME=str(cuda_home))
    return build(checkout, tmp_path_factory.mktemp("wheel"), "wheel")


def names_in(archive: Path) -> set[str]:
    """Files of a wheel or sdist, the latter's without its folder."""
    if archive.suffix == ".whl":
        return set(zipfile.ZipFile(archive).namelist())
    with tarfile.open(archive) as tar:
        return {file.name.partition("/")[2] for file in tar.getmembers() if file.isfile()}


def tracked() -> set[str]:
    """All that is the package's, by the files there are."""
    files = (path for path in (ROOT / "vllm_kvx").rglob("*") if path.is_file())
    kept = (path for path in files if path.suffix not in (".so", ".pyc"))
    return {str(path.relative_to(ROOT)) for path in kept}


def sources() -> set[str]:
    """Where a checkout and an sdist have the CUDA ops' sources; a wheel has them in the package."""
    return {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()}


def header(wheel: Path, name: str) -> "dict[str, list[str]]":
    (file,) = (each for each in names_in(wheel) if each.endswith(f".dist-info/{name}"))
    parsed = HeaderParser().parsestr(zipfile.ZipFile(wheel).read(file).decode())
    return {key: parsed.get_all(key, []) for key in parsed}


def test_the_sdist_has_all_that_a_build_needs(sdist: Path) -> None:
    names = names_in(sdist)
    assert names >= tracked() | sources() | set(NEEDED)
    assert not {name for name in names if name.endswith(".so") or name.startswith("tests")}
    assert {Path(name).suffix for name in names if "csrc/" in name} == {".cu", ".cuh", ".cpp", ".h"}


def test_the_wheel_is_pure(wheel: Path) -> None:
    assert wheel.name == f"vllm_kvx-{vllm_kvx.__version__}-py3-none-any.whl"
    names = names_in(wheel)
    shipped = tracked() | {f"vllm_kvx/{name}" for name in sources()}
    assert {name for name in names if ".dist-info/" not in name} == shipped
    data = {"vllm_kvx/py.typed", "vllm_kvx/compat/vllm_signatures.json"}
    assert data | {"vllm_kvx/csrc/binding.cpp"} < names
    assert header(wheel, "WHEEL")["Root-Is-Purelib"] == ["true"]


def test_the_metadata(wheel: Path) -> None:
    said = header(wheel, "METADATA")
    assert said["Version"] == [vllm_kvx.__version__]
    assert "Typing :: Typed" in said["Classifier"] and said["License-Expression"] == ["Apache-2.0"]
    assert any("matplotlib" in each and "tools" in each for each in said["Requires-Dist"])


def test_the_sdist_makes_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    again = build(tree, tmp_path, "wheel")
    assert again.name == wheel.name and names_in(again) == names_in(wheel)


def test_a_wheel_with_ops_is_of_one_platform(
    checkout: Path, cuda_home: Path, tmp_path: Path
) -> None:
    settings = {"KVX_BUILD_OPS": "8.0,90a", "CUDA_HOME": str(cuda_home)}
    compiled = build(checkout, tmp_path, "wheel", **settings)
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert compiled.name == f"vllm_kvx-{vllm_kvx.__version__}-py3-none-{platform}.whl"
    assert header(compiled, "WHEEL")["Root-Is-Purelib"] == ["false"]
    assert {name for name in names_in(compiled) if name.endswith(".so")} == {OPS}
    path = Path(zipfile.ZipFile(compiled).extract(OPS, tmp_path))
    assert library.read(path) == library.Library(path, library.key_of(), ("80", "90a"))
    assert not (checkout / OPS).read_bytes(), "the checkout's own was touched"


def test_ops_that_cannot_be_compiled_stop_the_build(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="KVX_BUILD_OPS: nvcc is missing"):
        build(checkout, tmp_path, "wheel", KVX_BUILD_OPS="1", CUDA_HOME=str(tmp_path))
    with pytest.raises(AssertionError, match="must be a compute capability such as 90a"):
        build(checkout, tmp_path, "wheel", KVX_BUILD_OPS="hopper")
    assert not list(tmp_path.glob("*.whl"))


class Environment:
    """A virtual environment that sees the packages of this one, but for vllm-kvx."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.bin, self.cache = folder / "bin", folder / "cache"
        site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.package = site / "vllm_kvx"

    def pip(self, *arguments: object) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python", "-q", *arguments)
        run(*pip, cwd=self.bin, PIP_DISABLE_PIP_VERSION_CHECK="1")

    def install(self, *what: object) -> None:
        self.pip("install", "--no-deps", "--no-index", "--no-build-isolation", *what)

    def run(self, program: str, *arguments: object, cwd: Path | None = None, **env: str) -> str:
        env = {"KVX_CACHE_ROOT": str(self.cache)} | env
        return run(self.bin / program, *arguments, cwd=cwd or self.bin, **env)

    def found(self) -> list[Path]:
        """The libraries that a server of this environment finds."""
        return [Path(path) for path in self.run("python", "-P", "-c", FIND).split()]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def test_ops_of_an_installed_wheel(wheel: Path, environment: Environment, cuda_home: Path) -> None:
    environment.install(wheel)
    assert environment.run("vllm-kvx", "--version") == f"vllm-kvx {vllm_kvx.__version__}"
    assert environment.found() == []
    built = environment.run("vllm-kvx", "build-ops", CUDA_HOME=str(cuda_home))
    assert environment.found() == [Path(built)] == [environment.package / "ops" / "_kvx_ops.so"]
    environment.run("vllm-kvx", "build-ops", CUDA_HOME=str(cuda_home))
    environment.pip("uninstall", "--yes", "vllm-kvx")
    assert not environment.package.exists(), "nothing is left of what was built"


@nightly
def test_ops_that_are_built_in_a_checkout_beside(
    wheel: Path, checkout: Path, environment: Environment, cuda_home: Path, tmp_path: Path
) -> None:
    """`pip install .` and then `python -m` in the checkout: servers import what was installed."""
    environment.install(wheel)
    command = ("python", "-m", "vllm_kvx.ops.build")
    built = Path(environment.run(*command, cwd=checkout, CUDA_HOME=str(cuda_home)))
    assert environment.found() == [built] and built.is_relative_to(environment.cache)
    changed = tmp_path / "changed"
    shutil.copytree(checkout, changed)
    (changed / "csrc/score.cu").write_text("// Another.\n")
    other = Path(environment.run(*command, cwd=changed, CUDA_HOME=str(cuda_home)))
    assert environment.found() == [built] != [other]


@nightly
def test_ops_of_an_editable_install(
    checkout: Path, environment: Environment, cuda_home: Path, tmp_path: Path
) -> None:
    tree = shutil.copytree(checkout, tmp_path / "editable")
    environment.install("--editable", tree)
    assert environment.run("vllm-kvx", "--version") == f"vllm-kvx {vllm_kvx.__version__}"
    for command in (("vllm-kvx", "build-ops"), ("python", "-m", "vllm_kvx.ops.build")):
        (tree / OPS).unlink()
        built = environment.run(*command, cwd=tree, CUDA_HOME=str(cuda_home))
        assert environment.found() == [Path(built)] == [tree / OPS]
