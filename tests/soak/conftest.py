"""The soak's figures are written when all parts are done."""

import os
import sys
from collections.abc import Iterator

import pytest

from soak.report import add_failure, write

# oneDNN keeps the code it compiles for each shape of a product, 1,024 of them: 100 MB that fill for
# hundreds of requests and would hide a leak. It reads this once, with the first product.
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "32"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        add_failure(report.nodeid)


@pytest.fixture(scope="session", autouse=True)
def figures(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    # A process of pytest-xdist knows what the first one was called with.
    of_worker = getattr(request.config, "workerinput", {})
    write(of_worker.get("mainargv", sys.argv))
