"""How the package is built; pyproject.toml says what is in it.

KVX_BUILD_OPS=1 compiles the CUDA operators along, for GPUs of the default architectures, and
KVX_BUILD_OPS=80,90a for those named. They need nvcc, and torch in the environment of the build:

    KVX_BUILD_OPS=1 pip wheel --no-build-isolation --no-deps .

Such a wheel is of one platform. Without the variable it has no operators, and runs on all.
"""

import os
import shutil
import sys
from pathlib import Path

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

VARIABLE = "KVX_BUILD_OPS"
ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from vllm_kvx.config.environment import is_on  # noqa: E402
from vllm_kvx.errors import ToolError  # noqa: E402
from vllm_kvx.ops import LIBRARY  # noqa: E402
from vllm_kvx.ops.build import ARCHITECTURES, architecture, build  # noqa: E402


def architectures() -> list[str]:
    """What KVX_BUILD_OPS asks for; empty if it is off."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    if not is_on(VARIABLE):
        return []
    if value in ("1", "true", "yes", "on"):
        return list(ARCHITECTURES)
    return [architecture(name) for name in value.split(",")]


class Distribution(setuptools.Distribution):
    """Is of one platform where it has operators."""

    def has_ext_modules(self) -> bool:
        """Whether wheels get a platform's tag."""
        return bool(architectures())


class BuildPy(build_py):
    """Copies the package, and compiles the operators where they are asked for."""

    def run(self) -> None:
        """Leaves nothing of an earlier build, whose modules and libraries may be gone by now."""
        library = LIBRARY
        if not self.editable_mode:
            package = Path(self.build_lib) / "vllm_kvx"
            shutil.rmtree(package, ignore_errors=True)
            shutil.copytree(ROOT / "csrc", package / "csrc")
            library = package / LIBRARY.relative_to(ROOT / "vllm_kvx")
        super().run()
        if wanted := architectures():
            try:
                build(wanted, output=library)
            except ModuleNotFoundError as error:
                raise SystemExit(
                    f"{VARIABLE}: {error.name} is missing where the package is built: install "
                    "vLLM first, and give pip --no-build-isolation"
                ) from error
            except ToolError as error:
                raise SystemExit(f"{VARIABLE}: {error}") from error


class BdistWheel(bdist_wheel):
    """The operators are no Python extensions: any Python 3 loads them."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if architectures() else tag


setuptools.setup(distclass=Distribution, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
