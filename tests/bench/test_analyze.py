"""What is read from a Prometheus server, of which there is a small stand-in."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench import analyze
from bench.analyze import SUBJECTS, Window, expressions, window_of
from bench.processes import BenchError, free_port
from bench.prometheus import duration_of, instant_of
from tests.bench.fake_prometheus import FakePrometheus, fake_prometheus

NOON = 1_798_718_400.0
"""2026-12-31T12:00:00Z."""


@pytest.fixture
def prometheus() -> Iterator[tuple[str, FakePrometheus]]:
    fake = FakePrometheus()
    with fake_prometheus(fake) as address:
        yield address, fake


def run(*arguments: str) -> Any:
    return analyze.main.main(list(arguments), standalone_mode=False)


def rows(shown: str) -> list[list[str]]:
    """The cells of each line of the tables."""
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


class TestTables:
    def test_what_it_prints(self, prometheus: tuple[str, FakePrometheus], capsys: pytest.CaptureFixture[str]) -> None:
        address, _ = prometheus
        assert run("--prometheus-url", address, "--end", "2026-12-31T12:00:00Z", "--last", "10m") == 0
        shown = capsys.readouterr().out
        assert f"2026-12-31 11:50:00 to 2026-12-31 12:00:00 UTC, as far as {address} knows" in shown
        for title in ("requests", "store methods", "collections"):
            assert title in shown
        assert rows(shown) == [
            ["/v1/agl/spans", "POST", "1,200", "2", "0", "0", "2", "20", "250"],
            ["/v1/agl/rollouts/{rollout_id}", "GET", "300", "0.5", "3", "1", "2", "20", "250"],
            ["add_span", "1,200", "2", "12", "1", "2", "20", "250"],
            ["spans", "sql", "add_spans", "60", "0.1", "0", "0", "2", "20", "250"],
        ]

    def test_what_it_asks(self, prometheus: tuple[str, FakePrometheus]) -> None:
        address, fake = prometheus
        assert run("--prometheus-url", f"{address}/", "--start", str(NOON - 90), "--end", str(NOON)) == 0

        def grown(series: str) -> str:
            scrapes = "sum by (job, instance) (count_over_time(lightning_sql_build_info[90000ms]))"
            late = f"count_over_time({series}[90000ms]) < on (job, instance) group_left () {scrapes}"
            return f"{series} unless {series} offset 90000ms and {late} or increase({series}[90000ms])"

        errors = 'agl_http_total{status!~"[123].."}'
        buckets = f"sum by (path, method, le) ({grown('agl_http_latency_bucket')})"
        assert [expression for expression, _ in fake.queries[:5]] == [
            f"sum by (path, method) ({grown('agl_http_total')})",
            f"sum by (path, method) ({grown(errors)})",
            *(f"histogram_quantile({quantile}, {buckets})" for quantile in (0.5, 0.95, 0.99)),
        ]
        assert len(fake.queries) == 5 * len(SUBJECTS)
        assert {asked for _, asked in fake.queries} == {NOON}

    def test_a_part_that_was_not_seen(self, capsys: pytest.CaptureFixture[str]) -> None:
        fake = FakePrometheus({"agl_store": [({"store_pubmeth": "add_span"}, 5.0, 0.0)]})
        with fake_prometheus(fake) as address:
            assert run("--prometheus-url", address) == 0
        shown = capsys.readouterr().out
        assert "requests: none" in shown
        assert "collections: none" in shown
        assert len(rows(shown)) == 1

    def test_every_label_is_one_of_the_metric(self) -> None:
        from lightning_sql.metrics import METRICS

        labels = {metric.name.replace(".", "_"): metric.labels for metric in METRICS}
        for subject in SUBJECTS:
            assert subject.counter in labels
            assert subject.histogram in labels
            assert {*subject.labels, "status"} <= set(labels[subject.counter])
            assert labels[subject.counter] == labels[subject.histogram]
            assert len(expressions(subject, Window(0, 1))) == 5


class TestTimes:
    @pytest.mark.parametrize(
        ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5d", 129_600), ("2h", 7200)]
    )
    def test_durations(self, text: str, seconds: float) -> None:
        assert duration_of(text) == seconds

    @pytest.mark.parametrize("text", ["", "10", "m", "-5m", "ten minutes", "5 m"])
    def test_what_is_no_duration(self, text: str) -> None:
        with pytest.raises(ValueError, match="is no duration"):
            duration_of(text)

    @pytest.mark.parametrize(
        "text",
        ["2026-12-31T12:00:00Z", "2026-12-31T13:00:00+01:00", "2026-12-31 12:00", "1798718400", "1798718400.0"],
    )
    def test_instants(self, text: str) -> None:
        assert instant_of(text) == NOON

    def test_now(self) -> None:
        before = time.time()
        assert before <= instant_of("now") <= time.time()

    def test_ten_minutes_are_what_is_looked_at_unless_more_is_said(self) -> None:
        before = time.time()
        window = window_of(None, None, None)
        assert before <= window.end <= time.time()
        assert window.seconds == pytest.approx(600)
        assert window_of("100", "160", None) == Window(100, 160)
        assert window_of(None, "160", "1m") == Window(100, 160)


class TestWhatCannotBe:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--start", "5", "--last", "5m"], "give either --start or --last, not both"),
            (["--start", "yesterday"], "'yesterday' is no time such as"),
            (["--last", "5"], "'5' is no duration such as 90s, 10m or 1h30m"),
            (["--last", "0s"], "'0s' is no time at all"),
            (["--start", "200", "--end", "100"], "the span of time must end after its start"),
            (["--prometheus-url", "localhost"], "--prometheus-url must be an address such as"),
        ],
    )
    def test_wrong_arguments(self, arguments: list[str], said: str) -> None:
        with pytest.raises(BenchError) as raised:
            run("--prometheus-url", "http://127.0.0.1:1", *arguments)
        assert str(raised.value).startswith(said)

    def test_nobody_answers(self) -> None:
        with pytest.raises(BenchError, match=r"^no Prometheus answers at http://127\.0\.0\.1:\d+: ") as raised:
            run("--prometheus-url", f"http://u:secret@127.0.0.1:{free_port()}")
        assert "secret" not in str(raised.value)

    def test_somebody_else_answers(self, prometheus: tuple[str, FakePrometheus]) -> None:
        with pytest.raises(BenchError, match=r"does not answer as Prometheus does: status 404$"):
            run("--prometheus-url", f"{prometheus[0]}/elsewhere")

    def test_an_expression_that_is_refused(
        self, prometheus: tuple[str, FakePrometheus], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(analyze, "expressions", lambda *_: ["up("] * 5)
        with pytest.raises(BenchError, match=r"^Prometheus refuses: parse error: up\($"):
            run("--prometheus-url", prometheus[0])

    def test_nothing_was_seen(self) -> None:
        with fake_prometheus(FakePrometheus({})) as address, pytest.raises(BenchError) as raised:
            run("--prometheus-url", address, "--start", "0", "--end", "60")
        assert str(raised.value) == (
            f"{address} has seen no call of a store, 1970-01-01 00:00:00 to 1970-01-01 00:01:00 UTC"
        )
