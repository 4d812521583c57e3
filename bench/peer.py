"""The environment of the upstream server and client: made once, from hash-locked files, and kept."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.processes import ROOT, BenchError

LOCKS: Final = (
    (ROOT / "bench" / "requirements.txt", ()),
    # Its other dependencies, 680 MB of them, are those of its trainer.
    (ROOT / "requirements-upstream.txt", ("--no-deps",)),
)


def peer_python(folder: Path) -> str:
    """The Python of the environment in a folder, made now unless it is there and up to date.

    Raises:
        BenchError: it cannot be made, for example because pip reaches no index.
    """
    python = folder / "bin" / "python"
    stamp = folder / "bench-lock"
    wanted = _fingerprint()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return str(python)
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        raise BenchError(f"{folder} is no virtual environment: name another folder with --peer-venv")
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], "the environment of the upstream server cannot be made")
    for lock, options in LOCKS:
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--require-hashes", *options, "--requirement", str(lock)]
        _run(command, f"pip cannot install {lock.name} for the upstream server (--no-peer measures without it)")
    stamp.write_text(wanted)
    return str(python)


def _fingerprint() -> str:
    parts = [sys.version.encode(), *(lock.read_bytes() for lock, _ in LOCKS)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _run(command: list[str], problem: str) -> None:
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise BenchError(f"{problem}: {reason}")
