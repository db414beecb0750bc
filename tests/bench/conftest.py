from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hymcache import _core


@pytest.fixture(autouse=True, scope="session")
def _children_use_this_build() -> Iterator[None]:
    # An editable install rebuilds the core when it is imported. The processes that these tests
    # start shall not do so in the middle of one: this process has it up to date already.
    build_dir = Path(_core.__file__).parents[3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKBUILD_EDITABLE_SKIP", str(build_dir))
        yield
