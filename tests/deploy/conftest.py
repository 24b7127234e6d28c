"""One store of images for all that build some."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.deploy.images import Store, wheels


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """With the base image that is Debian with Python."""
    store = Store(tmp_path_factory.mktemp("images"), wheels(tmp_path_factory.mktemp("wheels")))
    store.make_base()
    yield store
    shutil.rmtree(store.directory, ignore_errors=True)
