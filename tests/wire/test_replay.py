"""What was recorded of the protocol's first server, replayed against this one."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXCHANGES = 215


@pytest.mark.parametrize(
    "backend",
    ["memory", pytest.param("sqlite", marks=pytest.mark.slow), pytest.param("postgres", marks=pytest.mark.slow)],
)
def test_every_exchange_matches(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = "memory://" if backend == "memory" else request.getfixturevalue(f"{backend}_url")
    serve = [sys.executable, "-m", "lightning_api", "serve", "--database-url", url, "--scan-debounce-seconds", "0"]
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "replay.py"),
            "--file",
            str(HERE / "exchanges.jsonl"),
            "--cmd",
            f"{shlex.join(serve)} --port {{port}}",
        ],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'api'}", "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    logs = "".join(log.read_text() for log in tmp_path.glob("replay.*/server.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith(f"{EXCHANGES} matched "), summary
    assert ", 0 mismatched, 0 skipped" in summary
    assert "Traceback" not in logs
