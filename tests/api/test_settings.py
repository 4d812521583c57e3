"""Settings: variables, flags that win, and what makes no sense."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from lightning_api.settings import Settings
from lightning_sql.errors import ConfigurationError
from lightning_sql.store.factory import displayed_url


def test_defaults() -> None:
    assert Settings.load({}) == Settings(
        database_url="sqlite:///lightning.db",
        host="127.0.0.1",
        port=4747,
        workers=1,
        partition="default",
        scan_debounce_seconds=10.0,
        claim_timeout_seconds=None,
        database_wait_seconds=40.0,
        cors_origins=(),
        token=None,
        log_level="info",
        body_limit=64 * 1024 * 1024,
        max_requests=2048,
        max_request_bytes=256 * 1024 * 1024,
        compress="auto",
        tracker="none",
        allow_public=False,
    )


def test_every_setting_is_a_variable_and_given_values_win() -> None:
    variables = {
        "LIGHTNING_SQL_DATABASE_URL": "memory://",
        "LIGHTNING_SQL_HOST": "::1",
        "LIGHTNING_SQL_PORT": "0",
        "LIGHTNING_SQL_WORKERS": "2",
        "LIGHTNING_SQL_PARTITION": "p",
        "LIGHTNING_SQL_SCAN_DEBOUNCE_SECONDS": "0",
        "LIGHTNING_SQL_CLAIM_TIMEOUT_SECONDS": "90",
        "LIGHTNING_SQL_DATABASE_WAIT_SECONDS": "20",
        "LIGHTNING_SQL_CORS_ORIGINS": "https://a, https://b *",
        "LIGHTNING_SQL_TOKEN": "t",
        "LIGHTNING_SQL_LOG_LEVEL": "WARNING",
        "LIGHTNING_SQL_BODY_LIMIT": "1",
        "LIGHTNING_SQL_MAX_REQUESTS": "2",
        "LIGHTNING_SQL_MAX_REQUEST_BYTES": "3",
        "LIGHTNING_SQL_COMPRESS": "ON",
        "LIGHTNING_SQL_TRACKER": "Prometheus",
        "LIGHTNING_SQL_ALLOW_PUBLIC": "yes",
    }
    expected = Settings(
        database_url="memory://",
        host="::1",
        port=0,
        workers=2,
        partition="p",
        scan_debounce_seconds=0.0,
        claim_timeout_seconds=90.0,
        database_wait_seconds=20.0,
        cors_origins=("https://a", "https://b", "*"),
        token="t",
        log_level="warning",
        body_limit=1,
        max_requests=2,
        max_request_bytes=3,
        compress="on",
        tracker="prometheus",
        allow_public=True,
    )
    assert len(variables) == len(Settings.__dataclass_fields__)
    assert Settings.load(variables) == expected
    given = Settings.load(variables, port=1, workers=None, scan_debounce_seconds=0.5, allow_public=False)
    assert (given.port, given.workers, given.scan_debounce_seconds, given.allow_public) == (1, 2, 0.5, False)
    assert Settings.load({"LIGHTNING_SQL_PORT": "9"}, port=0).port == 0


@pytest.mark.parametrize(
    "variables",
    [
        {"PORT": "x"},
        {"PORT": "70000"},
        {"PORT": "-1"},
        {"WORKERS": "0"},
        {"SCAN_DEBOUNCE_SECONDS": "-1"},
        {"CLAIM_TIMEOUT_SECONDS": "0"},
        {"CLAIM_TIMEOUT_SECONDS": "nan"},
        {"CLAIM_TIMEOUT_SECONDS": "never"},
        {"DATABASE_WAIT_SECONDS": "0"},
        {"DATABASE_WAIT_SECONDS": "inf"},
        {"SCAN_DEBOUNCE_SECONDS": "nan"},
        {"SCAN_DEBOUNCE_SECONDS": "inf"},
        {"BODY_LIMIT": "0"},
        {"MAX_REQUESTS": "0"},
        {"MAX_REQUEST_BYTES": "0"},
        {"COMPRESS": "sometimes"},
        {"TRACKER": "abacus"},
        {"TRACKER": "console", "WORKERS": "2"},
        {"ALLOW_PUBLIC": "perhaps"},
        {"TOKEN": ""},
        {"TOKEN": "two words"},
        {"TOKEN": "ümlaut"},
        {"LOG_LEVEL": "loud"},
        {"PARTITION": ""},
        {"HOST": ""},
    ],
)
def test_nonsense(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings.load({f"LIGHTNING_SQL_{name}": value for name, value in variables.items()})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_loopback_needs_no_token(host: str) -> None:
    Settings(host=host).checked_exposure()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "::ffff:10.0.0.1"])
def test_other_addresses_need_one(host: str) -> None:
    with pytest.raises(ConfigurationError, match="--allow-public"):
        Settings(host=host).checked_exposure()
    Settings(host=host, token="t").checked_exposure()
    Settings(host=host, allow_public=True).checked_exposure()


def test_they_are_frozen_and_keep_the_token_to_themselves() -> None:
    settings: Any = Settings(token="hush", database_url="postgresql://user:hush@db/name")
    with pytest.raises(FrozenInstanceError):
        settings.port = 1
    assert "hush" not in repr(settings)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:secret@db.example:5432/name?password=secret", "postgresql://db.example:5432/name"),
        ("postgresql://us%40er:sec@ret@db/name", "postgresql://db/name"),
        ("postgresql://user:sec%40ret%2F@db:1/name", "postgresql://db:1/name"),
        ("postgresql://user:se/cret@db/name", "postgresql://db/name"),
        ("postgresql://user:se?c#ret@db/name", "postgresql://db/name"),
        ("postgresql://user:secr@et/even@db/name", "postgresql://db/name"),
        ("postgresql+asyncpg://user:secret@[::1]:5432/name", "postgresql+asyncpg://[::1]:5432/name"),
        ("postgresql://user:secret@/name?host=secret", "postgresql:///name"),
        ("postgresql://user:secret@db:99999/name", "(malformed database URL)"),
        ("user:secret@db/name", "(malformed database URL)"),
        ("sqlite:///lightning.db", "sqlite:///lightning.db"),
        ("sqlite:////var/lib/lightning.db", "sqlite:////var/lib/lightning.db"),
        ("sqlite:////data/a@b.db?synchronous=NORMAL", "sqlite:////data/a@b.db"),
        ("memory://", "memory://"),
        ("postgresql://[secret", "postgresql://…"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert displayed_url(url) == shown
