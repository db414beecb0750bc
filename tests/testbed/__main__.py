"""`python -m tests.testbed`: two guests and a shell in each (`make testbed`)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.testbed.guest_image import GuestImage, cache_folder
from tests.testbed.host_packages import reason_not_to_run
from tests.testbed.profile import PROFILES
from tests.testbed.shell import Shell, terminal_size
from tests.testbed.testbed import Testbed


def main(
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}.")] = "rxe",
) -> None:
    """Boots two guests on this machine's files, read-only, with a shell in each."""
    reason = reason_not_to_run(cache_folder())
    if profile not in PROFILES:
        reason = f"no profile {profile!r}: take one of {', '.join(PROFILES)}"
    if reason is not None:
        sys.exit(f"testbed: {reason}")
    image = GuestImage.cached(cache_folder())
    with (
        tempfile.TemporaryDirectory(prefix="hymcache-testbed-") as folder,
        Testbed(PROFILES[profile], Path(folder) / "guests", image) as testbed,
    ):
        typer.echo(f"testbed: two guests with profile {profile} boot ...")
        testbed.start(terminal_size())
        first, second = testbed.guests
        typer.echo(
            f"testbed: {first.name} has {first.address}, {second.name} has {second.address}; "
            f"files for both: {testbed.folder}\n"
            "testbed: Ctrl-] shows the other guest, Ctrl-\\ ends both"
        )
        Shell(testbed).run()
    typer.echo("\ntestbed: ended")


typer.run(main)
