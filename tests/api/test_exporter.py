"""How the exporter is started, and how it must not be; test_metric_workers.py has what it answers."""

from pathlib import Path
from typing import Any

import pytest

from lightning_api.exporter import Exporter, ExporterOptions, run_exporter
from lightning_api.metrics import DIRECTORY_VARIABLE
from lightning_sql.errors import ConfigurationError


@pytest.mark.parametrize(
    ("path", "options", "variables", "reason"),
    [
        (None, {}, {}, DIRECTORY_VARIABLE),
        ("", {}, {}, DIRECTORY_VARIABLE),
        ("/nowhere/at/all", {}, {}, "/nowhere/at/all is not a directory"),
        ("/dev/null", {}, {}, "/dev/null is not a directory"),
        ("/", {"metrics_path": "v1/prometheus"}, {}, "begin with /"),
        ("/", {"metrics_path": ""}, {}, "begin with /"),
        ("/", {"metrics_path": "/a//b"}, {}, "begin with /"),
        ("/", {"metrics_path": "//"}, {}, "begin with /"),
        ("/", {"metrics_path": "/a?b"}, {}, "begin with /"),
        ("/", {"metrics_path": "/a\nb"}, {}, "begin with /"),
        ("/", {"metrics_path": "/a%2Fb"}, {}, "begin with /"),
        ("/", {"metrics_path": "/health"}, {}, "another than /health"),
        ("/", {"metrics_path": "/health/"}, {}, "another than /health"),
        ("/", {"host": "no.such.host.invalid"}, {}, "no address"),
        ("/", {"host": ""}, {}, "host"),
        ("/", {"port": 70000}, {}, "port"),
        ("/", {"log_level": "loud"}, {}, "log level"),
        ("/", {}, {"LIGHTNING_SQL_LOG_LEVEL": "loud"}, "log level"),
        ("/", {"token": ""}, {}, "token"),
        ("/", {}, {"LIGHTNING_SQL_TOKEN": ""}, "token"),
    ],
)
def test_what_makes_no_sense(
    path: str | None,
    options: dict[str, Any],
    variables: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if path is None:
        monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(DIRECTORY_VARIABLE, path)
    given: dict[str, Any] = {"port": 0, **options}
    with pytest.raises(ConfigurationError) as caught:
        run_exporter(ExporterOptions(**given), variables)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/metrics/", "/v1/prometheus", "/healthy", "/health/all", "/a.b_c~d-e"]
)
def test_paths_that_can_be_served(path: str) -> None:
    Exporter(Path(), path, None)
