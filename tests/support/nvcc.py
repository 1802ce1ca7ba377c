"""A compiler that stands in for nvcc: what it is given, one after the other, is what it makes.

So a build of the CUDA operators takes no time, and the file still says what it was built from. It
fails on sources with an `#error`.
"""

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import sys
from pathlib import Path

given = sys.argv[1:]
if given == ["--version"]:
    print("Cuda compilation tools, release {version}, V{version}.1")
    sys.exit({code})
output = given.pop(given.index("-o") + 1)
files = [Path(name) for name in given if name.endswith((".cu", ".cpp", ".o"))]
content = b"".join(file.read_bytes() for file in files)
if b"#error" in content:
    sys.exit(files[0].name + "(1): error: #error directive")
Path(output).write_bytes(content)
"""


def make_nvcc(folder: Path, version: str = "13.0", code: int = 0) -> Path:
    """The compiler, as `bin/nvcc` in `folder`: a CUDA_HOME.

    version: of CUDA. code: what it ends with when it is asked for that.
    """
    program = folder / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(_PROGRAM.format(python=sys.executable, version=version, code=code))
    program.chmod(0o755)
    return program
