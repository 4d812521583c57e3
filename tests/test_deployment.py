"""The lint of what is deployed: it passes what is here, and finds what must not be."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_sql.metrics import METRICS
from tests.commands import ROOT
from tools.deployment import check
from tools.deployment.command_line import CommandError, parse
from tools.deployment.compose import check_compose
from tools.deployment.composition import compositions
from tools.deployment.dashboard import DASHBOARDS, Query, check_dashboards
from tools.deployment.dockerfile import check_dockerfile, copied_files
from tools.deployment.findings import Finding
from tools.deployment.prometheus import check_prometheus
from tools.deployment.promql import QueryError, known_metrics, labels_of
from tools.deployment.schemas import WORKFLOWS, check_schemas
from tools.deployment.workflows import check_workflows, commands_of

SQLITE = "docker/compose.sqlite.yaml"
POSTGRES = "docker/compose.postgres.yaml"
SAVED = "docker/compose.grafana.yaml"
DOCKERFILE = "docker/Dockerfile"
SCRAPES = "docker/prometheus/prometheus.yml"
RULES = "docker/prometheus/rules.yml"
DASHBOARD = "docker/grafana/dashboards/lightning-sql.json"
DATASOURCE = "docker/grafana/provisioning/datasources/prometheus.yaml"
PROVIDER = "docker/grafana/provisioning/dashboards/lightning-sql.yaml"
TESTS = ".github/workflows/tests.yml"

Check = Callable[[Path], Iterator[Finding]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the checks look at, as it is here, to be changed."""
    for folder in ("docker", ".github"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    files = [".dockerignore", "Makefile", "LICENSE", "README.md", "pyproject.toml", "docs/deployment.md"]
    files += ["requirements.txt", "requirements-build.txt", "tests/monitoring/alerts.yml"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for package in ("lightning_sql", "api", "migrations"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "module.py").touch()
    return tmp_path


def change(checkout: Path, name: str, old: str, new: str) -> None:
    text = (checkout / name).read_text()
    assert old in text, f"{name} has changed: {old} is not in it any more"
    (checkout / name).write_text(text.replace(old, new, 1))


def messages(findings: Iterator[Finding] | list[Finding]) -> list[str]:
    return [str(finding) for finding in findings]


def test_this_checkout_has_no_fault() -> None:
    assert messages(check(ROOT)) == []


def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.deployment"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "deployment: no faults\n", "")


def test_the_changed_copy_has_no_fault_before_it_is_changed(checkout: Path) -> None:
    assert messages(check(checkout)) == []


@pytest.mark.parametrize(
    ("check_it", "name", "old", "new", "found"),
    [
        # the image
        (check_dockerfile, DOCKERFILE, "python:${PYTHON_VERSION}-slim AS", "python AS", "python has no version"),
        (check_dockerfile, DOCKERFILE, "python:$", "registry.example:5000/python:$", "names a registry"),
        (check_dockerfile, DOCKERFILE, "USER 10001:10001", "USER root", "not 'root'"),
        (check_dockerfile, DOCKERFILE, "USER 10001:10001\n", "", "not ''"),
        (check_dockerfile, DOCKERFILE, "COPY api api", "COPY apis api", "there is no apis to copy"),
        (check_dockerfile, ".dockerignore", "!api\n", "", "api is copied, but .dockerignore leaves it out"),
        (check_dockerfile, ".dockerignore", "*\n", "", "lets .env into the build"),
        (check_dockerfile, DOCKERFILE, "--from=build", "--from=builder", "nothing is built as builder"),
        (check_dockerfile, DOCKERFILE, '"--require-hashes", "-r", "requirements.txt"', '"-r", "x"', "no hash is known"),
        (check_dockerfile, DOCKERFILE, '["lightning-sql"]', "lightning-sql", "in its JSON form"),
        (check_dockerfile, DOCKERFILE, 'CMD ["serve"]', 'CMD ["server"]', "there is no lightning-sql server"),
        (check_dockerfile, DOCKERFILE, "SQL_HOST=0.0.0.0", "SQL_PORT=many", "LIGHTNING_SQL_PORT must be a whole"),
        (check_dockerfile, DOCKERFILE, "EXPOSE 4747 4748", "EXPOSE 4747", "the port 4748 is not exposed"),
        (check_dockerfile, DOCKERFILE, "127.0.0.1:4747", "127.0.0.1:80", "asks another port than 4747"),
        (check_dockerfile, DOCKERFILE, '["python", "-c", "import', '["curl", "-c", "import', "does not have"),
        (check_dockerfile, DOCKERFILE, "VOLUME", "ADD https://example.org/x /x\nVOLUME", "ADD names a host"),
        # Compose
        (check_compose, SQLITE, "docker/Dockerfile", "docker/Containerfile", "there is no docker/Containerfile"),
        (check_compose, SQLITE, '["serve"]', '["serve", "--prot", "1"]', "lightning-sql serve: No such option"),
        (check_compose, SQLITE, '["serve"]', '["serve", "--port", "80"]', "it listens on 80, but 4747 is published"),
        (check_compose, SQLITE, "      LIGHTNING_SQL_TOKEN:\n", "", "0.0.0.0 can be reached by others"),
        (check_compose, SQLITE, "LIGHTNING_SQL_TRACKER:", "LIGHTNING_SQL_TRACER:", "SQL_TRACER is no setting"),
        (check_compose, SQLITE, ":-none}", ":-grafana}", "the tracker must be one of"),
        (check_compose, SQLITE, "- data:/data", "- data:/store", "gone with the container"),
        (check_compose, SQLITE, "volumes:\n  data:", "volumes:\n  date:", "the volume data is not declared"),
        (check_compose, SQLITE, "volumes:\n  data:", "volumes:\n  data:\n  more:", "the volume more is used by nobody"),
        (check_compose, SQLITE, "127.0.0.1:4747}:", "4747}:", "is not on 127.0.0.1 unless told otherwise"),
        (check_compose, SQLITE, "http://127.0.0.1:4747/readyz", "http://127.0.0.1:80/", "which is not its own"),
        (check_compose, SQLITE, "    restart: unless-stopped\n", "", "it is not restarted"),
        (check_compose, SQLITE, "${LIGHTNING_SQL_WORKERS:-1}", "${LIGHTNING_SQL_WORKERS}", "has no default"),
        (check_compose, SQLITE, "${LIGHTNING_SQL_WORKERS:-1}", "${MANY:-1}", "MANY is not explained in"),
        (check_compose, POSTGRES, "${POSTGRES_PASSWORD:?choose a password for the database}", "x", "PGPASSWORD is wr"),
        (check_compose, POSTGRES, "TOKEN: ${LIGHTNING_SQL_TOKEN:?choose the", "TOKEN: ${X:-", "TOKEN is written down"),
        (check_compose, POSTGRES, "lightning@postgres:5432", "lightning:x@postgres:5432", "there is a password in"),
        (check_compose, POSTGRES, "environment: GRAFANA_PASSWORD", "file: ./password", "not from a file"),
        (check_compose, POSTGRES, "[lightning_sql_token]", "[token]", "the secret token is not declared"),
        (check_compose, POSTGRES, "secrets: [grafana_", "read_only: true\n    secrets: [grafana_", "that is read-only"),
        (check_compose, POSTGRES, "/run/secrets/grafana_password", "/run/secrets/grafana", "is no secret of it"),
        (check_compose, POSTGRES, "image: postgres:17", "image: postgres:latest", "has no version"),
        (check_compose, POSTGRES, "prom/prometheus:", "quay.example/prom/prometheus:", "names a registry"),
        (check_compose, POSTGRES, "/postgres-exporter/queries.yaml", "/postgres-exporter/query.yaml", "there is no"),
        (check_compose, POSTGRES, "=/etc/postgres-exporter/", "=/etc/postgres/", "lies in no volume"),
        (check_compose, POSTGRES, "prometheus/prometheus.yml", "prometheus/prom.yml", "there is no prometheus/prom"),
        (check_compose, POSTGRES, "./grafana/provisioning", "./grafana/provision", "there is no ./grafana/provision"),
        (check_compose, POSTGRES, "DIR: /metrics", "DIR: /shared", "/shared lies in no volume"),
        (check_compose, POSTGRES, "dashboards/lightning-sql.json", "dashboards/home.json", "there is no grafana/dash"),
        (check_compose, POSTGRES, "      postgres:\n       ", "      database:\n       ", "it depends on database"),
        (check_compose, POSTGRES, '"4748", "--metrics-path"', '"4749", "--metrics-path"', "it listens on 4749"),
        (check_compose, SAVED, "saved.yml", "safe.yml", "there is no prometheus/safe.yml"),
        # Prometheus
        (check_prometheus, SCRAPES, "exporter:4748", "exporter:4747", "exporter does not listen on 4747"),
        (check_prometheus, SCRAPES, "exporter:4748", "exports:4748", "has no service exports"),
        (check_prometheus, SCRAPES, "node-exporter:9100", "server:4747", "nothing asks node-exporter"),
        (check_prometheus, SCRAPES, "/v1/prometheus/\n", "/metrics\n", "server serves its metrics at /v1/prometheus/"),
        (check_prometheus, SCRAPES, "/v1/prometheus\n", "/metrics\n", "exporter serves its metrics at /v1/prometheus"),
        (check_prometheus, SCRAPES, "credentials_file:", "credentials:", "exporter asks for a token"),
        (check_prometheus, SCRAPES, "secrets/lightning_sql_token", "secrets/token", "no secret of the service prom"),
        (check_prometheus, SCRAPES, "job_name: node", "job_name: postgres", "there are two jobs postgres"),
        (check_prometheus, SCRAPES, "[rules.yml]", "[rule.yml]", "there is no rule.yml"),
        (check_prometheus, POSTGRES, "TRACKER: prometheus", "TRACKER: console", "server has no metrics"),
        (check_prometheus, RULES, "absent(", "absent((", "unclosed left parenthesis"),
        (check_prometheus, RULES, "lightning_sql_queue_depth[", "lightning_sql_queue_length[", "nobody exports"),
        (check_prometheus, RULES, 'status=~"5.."', 'code=~"5.."', "agl_http_total has no label code"),
        (check_prometheus, RULES, "$labels.mountpoint", "$labels.mount", "shows mount, which the result does not"),
        (check_prometheus, RULES, "alert: DiskNearlyFull", "alert: DiskFull", "DiskFull is not tried in"),
        (check_prometheus, RULES, "alert: DiskNearlyFull", "alert: DiskFull", "DiskFull is not explained in"),
        (check_prometheus, RULES, "alert: PostgresDown", "alert: PostgresDeadlocks", "two alerts PostgresDeadlocks"),
        (check_prometheus, RULES, "severity: critical", "severity: bad", "is neither critical nor a warning"),
        # Grafana
        (check_dashboards, DASHBOARD, "lightning_sql_queue_depth{", "lightning_sql_queue{", "nobody exports"),
        (check_dashboards, DASHBOARD, "{{status}} {{mode}}", "{{status}} {{path}}", "the legend shows path"),
        (check_dashboards, DASHBOARD, "sum by (status, mode)", "sum by (status)", "the legend shows mode"),
        (check_dashboards, DASHBOARD, "sum by (le)", "sum", "keep the label le"),
        (check_dashboards, DASHBOARD, "rate(lightning_sql_spans_", "avg_over_time(lightning_sql_spans_", "only ever"),
        (check_dashboards, DASHBOARD, '"x": 0', '"x": 30', "it stands beside the page"),
        (check_dashboards, DASHBOARD, '"id": 2', '"id": 1', "two panels have the id 1"),
        (check_dashboards, DASHBOARD, '"name": "job"', '"name": "jobs"', "the variable job is not declared"),
        (check_dashboards, DASHBOARD, "queue_depth, job)", "queue_depth, mode)", "asks for the label mode"),
        (check_dashboards, DASHBOARD, "{", "", "cannot be read"),
        (check_dashboards, DATASOURCE, ":9090", ":9091", "is no service of docker/compose.grafana.yaml"),
        (check_dashboards, PROVIDER, "lib/grafana-dashboards", "lib/dashboards", "no dashboard is at /var/lib/dash"),
        # workflows
        (check_workflows, TESTS, "make lint", "ruff check .", "not by make"),
        (check_workflows, TESTS, "make lint", "make check", "the Makefile has no check"),
        (check_workflows, TESTS, "make lint", "make lint > log", "its output goes where nobody sees it"),
        (check_workflows, TESTS, "make lint", "make lint X=${{ matrix.x }}", "matrix.x is not in the matrix"),
        (check_workflows, TESTS, "checkout@v4", "checkout@main", "checkout@main has no version"),
        (check_workflows, TESTS, "contents: read", "contents: write", "it may do more than read"),
        (check_workflows, TESTS, "    timeout-minutes: 60\n", "", "it may run for hours"),
        # the specifications
        (check_schemas, SQLITE, "    restart:", "    restarts:", "restarts"),
        (check_schemas, SQLITE, "services:", "services: [", "Failed to parse"),
        (check_schemas, POSTGRES, "condition: service_healthy", "condition: healthy", "'healthy'}} is not valid"),
        (check_schemas, TESTS, "runs-on: ubuntu-24.04", "runs: on", "under any of the given schemas"),
    ],
)  # fmt: skip
def test_a_fault_is_found(checkout: Path, check_it: Check, name: str, old: str, new: str, found: str) -> None:
    change(checkout, name, old, new)
    assert any(found in message for message in messages(check_it(checkout))), messages(check_it(checkout))


def test_a_file_that_is_missing_is_found(checkout: Path) -> None:
    (checkout / DASHBOARD).unlink()
    (checkout / TESTS).unlink()
    (checkout / ".github/workflows/benchmark.yml").unlink()
    assert messages(check_dashboards(checkout))[0] == f"{DASHBOARDS}: there are no dashboards"
    assert messages(check_schemas(checkout)) == [f"{WORKFLOWS}: there are no such files"]


def test_panels_that_overlap_are_found(checkout: Path) -> None:
    dashboard = json.loads((ROOT / DASHBOARD).read_text())
    dashboard["panels"][2]["gridPos"] = dashboard["panels"][1]["gridPos"]
    (checkout / DASHBOARD).write_text(json.dumps(dashboard))
    assert [message.split(": ")[1] for message in messages(check_dashboards(checkout))] == [
        "Queued and Oldest in the queue overlap"
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "lightning-sql needs a subcommand"),
        (["migrate"], "lightning-sql migrate needs a subcommand"),
        (["migrate", "sideways"], "there is no lightning-sql migrate sideways"),
        (["serve", "--port", "many"], "lightning-sql serve: '…' is not a valid integer"),
        (["serve", "now"], "lightning-sql serve: Got unexpected extra argument"),
    ],
)
def test_what_the_command_would_not_take(arguments: list[str], problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        parse(arguments)


def test_what_the_command_takes() -> None:
    name, parameters = parse(["migrate", "up", "0001"])
    assert (name, parameters["revision"]) == ("migrate up", "0001")
    name, parameters = parse(["serve", "--port", "80", "--allow-public"])
    assert (name, parameters["port"], parameters["allow_public"]) == ("serve", 80, True)


def test_every_metric_of_ours_can_be_asked_for() -> None:
    known = known_metrics(ROOT)
    for metric in METRICS:
        name = metric.name.replace(".", "_")
        series = {"gauge": [name], "counter": [f"{name.removesuffix('_total')}_total"]}.get(
            metric.kind, [f"{name}_bucket", f"{name}_sum", f"{name}_count"]
        )
        assert set(metric.labels) <= min(known[one].labels for one in series)


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("lightning_sql_queue_depth", {"job", "instance"}),
        ("sum(lightning_sql_queue_depth)", set()),
        ("sum without (instance) (lightning_sql_pool_connections)", {"job", "state"}),
        ("topk(3, lightning_sql_pool_connections)", {"job", "instance", "state"}),
        ("2 * sum by (job) (rate(agl_http_total[1m]))", {"job"}),
        ("histogram_quantile(0.9, sum by (le, path) (rate(agl_http_latency_bucket[1m])))", {"path"}),
        ("time() - lightning_sql_sampled_time_seconds", {"job", "instance"}),
        ("lightning_sql_queue_depth > 0 and on (job) up == 0", {"job", "instance"}),
    ],
)
def test_the_labels_of_a_result(expression: str, labels: set[str]) -> None:
    assert labels_of(expression, known_metrics(ROOT)) == labels


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(lightning_sql_queue_depth[1m])", "lightning_sql_queue_depth goes up and down"),
        ("lightning_sql_spans_total", "lightning_sql_spans_total only ever grows"),
        ("lightning_sql_pool_connections / on (mode) lightning_sql_queue_depth", "both sides has no label mode"),
        ("sum by (state) (lightning_sql_queue_depth)", "what is summed up has no label state"),
        ("rate(agl_http_total)", "expected type matrix"),
    ],
)
def test_an_expression_that_cannot_give_what_is_expected(expression: str, problem: str) -> None:
    with pytest.raises(QueryError, match=problem):
        labels_of(expression, known_metrics(ROOT))


def test_variables_are_put_into_an_expression() -> None:
    query = Query("panel", 'rate(up{job="$job",x="${database:raw}"}[$__rate_interval])', "")
    assert query.with_variables({"job": "a", "database": "b"}) == 'rate(up{job="a",x="b"}[1m])'


@pytest.mark.slow
def test_the_wheel_is_built_from_what_the_image_gets(tmp_path: Path) -> None:
    """The Dockerfile copies all that the build needs, and nothing that is not under version control comes along."""
    files = copied_files(ROOT)
    assert {"pyproject.toml", "migrations/env.py", "requirements.txt"} <= files.keys()
    assert not [name for name in files if name.startswith(("tests", "docs", ".")) or "__pycache__" in name]
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheels")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "wheels").glob("lightning_sql-*.whl"))) == 1


@pytest.mark.slow
def test_every_step_of_the_workflows_is_a_target_that_make_takes(tmp_path: Path) -> None:
    """With each combination of the matrix, as make itself expands it."""
    for file in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("requirements*")):
        shutil.copy(file, tmp_path)
    asked: set[str] = set()
    for path in ROOT.glob(WORKFLOWS):
        jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
        asked |= {command for job in jobs.values() for command in commands_of(job)}
    assert len(asked) > 50
    variables = {"PATH": "/usr/bin:/bin", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    script = "\n".join(command.replace("make ", "make --dry-run --always-make ", 1) for command in sorted(asked))
    done = subprocess.run(
        ["sh", "-e"], input=script, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for option in ("--preset heavy-traces", "--concurrency 2048", "bench.micro dequeue-update-attempt"):
        assert option in done.stdout
    assert "--concurrency  " not in done.stdout


def test_the_variables_of_a_compose_file_are_seen() -> None:
    files = {file.path: file for file in compositions(ROOT, [])}
    assert "SAVED_PROMETHEUS_USER" in files[SAVED].variables
    assert "LIGHTNING_SQL_ALLOW_PUBLIC" in files[SQLITE].variables
    assert files[POSTGRES].services["server"].environment["LIGHTNING_SQL_WORKERS"] == "2"
    assert files[POSTGRES].services["exporter"].ports == {4748}
