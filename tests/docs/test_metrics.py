"""The page about metrics lists them all, as they are."""

from lightning_sql.metrics import METRICS, Metric
from tests.commands import ROOT

PAGE = ROOT / "docs" / "metrics.md"
HEAD = "| metric | kind | labels | meaning |\n|---|---|---|---|\n"


def name_of(metric: Metric) -> str:
    """What Prometheus calls it."""
    name = metric.name.replace(".", "_")
    return name if metric.kind != "counter" or name.endswith("_total") else f"{name}_total"


def table() -> str:
    """The table, as it must stand on the page."""
    rows: list[str] = []
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        rows.append(f"| `{name_of(metric)}` | {metric.kind} | {labels} | {metric.help} |\n")
    return f"{HEAD}{''.join(rows)}\n"


def test_the_page_lists_every_metric() -> None:
    text = PAGE.read_text()
    begin = text.index(HEAD)
    assert text[begin : text.index("\n\n", begin) + 2] == table()


def test_the_names_are_those_of_a_scrape() -> None:
    from lightning_api.metrics import PrometheusRecorder

    recorder = PrometheusRecorder()
    for metric in METRICS:
        labels = tuple("x" for _ in metric.labels)
        match metric.kind:
            case "counter":
                recorder.count(metric, labels)
            case "histogram":
                recorder.observe(metric, labels, 1.0)
            case "gauge":
                recorder.set(metric, labels, 1.0)
    body, _ = recorder.exposition("")
    scraped = {line.partition(" ")[0].partition("{")[0] for line in body.decode().splitlines() if line[0] != "#"}
    expected = {
        f"{name_of(metric)}{suffix}"
        for metric in METRICS
        for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
    }
    assert scraped == expected
