"""The soak's figures are written when all parts are done."""

from collections.abc import Iterator

import pytest

from soak import report


@pytest.fixture(scope="session", autouse=True)
def figures() -> Iterator[None]:
    yield
    report.write()
