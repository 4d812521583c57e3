"""A process may fork while its SQLite files are in use: nothing is lost, and no lock stays behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.database.forking import PROGRAMS

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("name", PROGRAMS)
def test_forks(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.database.forking", name, str(tmp_path / "forked.db")]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}"},
    )
    assert (ended.stdout, ended.stderr) == ("ok\n", "")
