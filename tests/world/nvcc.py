"""A compiler that stands in for nvcc: what it is given, one after the other, is what it makes.

So a build of the CUDA operators takes no time, and the file still says what it was built from.
"""

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import sys
from pathlib import Path

given = sys.argv[1:]
output = given.pop(given.index("-o") + 1)
files = [Path(name) for name in given if name.endswith((".cu", ".cpp", ".o"))]
Path(output).write_bytes(b"".join(file.read_bytes() for file in files))
"""


def make_nvcc(folder: Path) -> Path:
    """The compiler, as `bin/nvcc` in `folder`: a CUDA_HOME."""
    program = folder / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(_PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return program
