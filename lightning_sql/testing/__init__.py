"""What proves a backend: contract suites for pytest, a plain model of the store, a PostgreSQL to run them on.

The suites need pytest and pytest-asyncio, which are not dependencies of the library.
"""

from contextlib import suppress

with suppress(ModuleNotFoundError):
    import pytest

    # The suites' assertions explain themselves only when pytest rewrites them as it does those of test files.
    pytest.register_assert_rewrite(
        "lightning_sql.testing.contract",
        "lightning_sql.testing.samples",
    )
