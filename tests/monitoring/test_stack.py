"""How the programs for `make test-monitoring` are found; the rest of it needs them, and is no part of `make test`."""

from pathlib import Path

import pytest

from tests.monitoring.live import main
from tests.monitoring.stack import BINARIES_VARIABLE, MonitoringError, find_binaries

DEBIAN = ("prometheus", "promtool", "prometheus-node-exporter", "prometheus-postgres-exporter")
THEIR_OWN = ("prometheus", "promtool", "node_exporter", "postgres_exporter")


def programs(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch(mode=0o755)
    return folder


@pytest.mark.parametrize("names", [DEBIAN, THEIR_OWN])
def test_programs_are_found_by_either_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = programs(tmp_path / "bin", names)
    found = [str(folder / name) for name in names]
    assert list(find_binaries({"PATH": str(folder)}).paths.values()) == found
    assert list(find_binaries({"PATH": "", BINARIES_VARIABLE: str(folder)}).paths.values()) == found


def test_what_is_missing_is_said_and_how_to_get_it(tmp_path: Path) -> None:
    folder = programs(tmp_path / "bin", DEBIAN[:2])
    with pytest.raises(
        MonitoringError, match="node-exporter, postgres-exporter not found on PATH: on Debian, `apt-get"
    ):
        find_binaries({"PATH": str(folder)})
    with pytest.raises(MonitoringError, match=f"name the folder that holds them with {BINARIES_VARIABLE}"):
        find_binaries({"PATH": str(folder), BINARIES_VARIABLE: str(tmp_path)})


def test_the_command_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(BINARIES_VARIABLE, str(tmp_path))
    assert main([]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
