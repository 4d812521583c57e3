"""The lint that keeps values out of the texts of statements: it passes what is here, and finds what must not be."""

import subprocess
import sys
from textwrap import dedent
from typing import Any

import pytest

from lightning_sql.database.dialects.words import word
from tests.commands import ROOT
from tools.sql_texts import Checker, check, sources_of

HEAD = "from sqlalchemy import text, literal_column, select\nimport sqlalchemy as sa\nTABLE = 't'\n"


def problems(source: str, **others: str) -> list[int]:
    """The lines of a module, counted from 1, in which something is found."""
    files = {f"{name}.py": dedent(other) for name, other in others.items()}
    return [finding.line - HEAD.count("\n") for finding in check({"m.py": HEAD + dedent(source), **files})]


def test_this_project_has_no_value_in_a_text() -> None:
    checker = Checker(sources_of(ROOT))
    assert checker.check() == []
    # Each of these was looked at: the text comes from SQLAlchemy's compiler, or from a statement made at import.
    assert set(checker.excuses) == {
        ("lightning_sql/database/dialects/postgresql_hot.py", "run"),
        ("lightning_sql/database/dialects/sqlite_thread.py", "fetch_text"),
    }


def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.sql_texts"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no texts of SQL that may have a value" in done.stdout


@pytest.mark.parametrize(
    "expression",
    [
        "f\"SELECT * FROM t WHERE a = '{value}'\"",
        "f'SELECT * FROM t WHERE a = {value!r:>10}'",
        "'SELECT * FROM t WHERE a = ' + value",
        "'SELECT * FROM t WHERE a = %s' % value",
        "'SELECT * FROM t WHERE a = %s' % (TABLE, value)",
        "'SELECT * FROM t WHERE a = {}'.format(value)",
        "'SELECT * FROM t WHERE a = {a}'.format(a=value)",
        "'SELECT * FROM t WHERE a = {a}'.format_map({'a': value})",
        "'SELECT * FROM t WHERE a = ?'.replace('?', value)",
        "' AND '.join([value])",
        "' AND '.join(f'{name} = 1' for name in [TABLE, value])",
        "'SELECT ' + ', '.join(['a', value])",
        "f'SELECT {TABLE}' if value else f'SELECT {value}'",
        "value",
        "str(value)",
        "value.strip()",
        "value % ()",
        "value + TABLE",
        "{'a': value}['a']",
        "(TABLE, value)[0]",
        "value or TABLE",
        "TABLE * value",
        "open('f').read()",
        "other(value)",
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        "cursor.execute({})",
        "cursor.executemany({}, [])",
        "connection.exec_driver_sql({})",
        "driver.fetch({}, 1)",
        "connection.execute(text({}))",
        "select(literal_column({}))",
        "sa.text({})",
        "built = {}; cursor.execute(built)",
        "built = ''; built += {}; cursor.execute(built)",
        "parts = []; parts.append({}); cursor.execute(' '.join(parts))",
        "parts = dict(); parts['a'] = {}; cursor.execute(parts['a'])",
        "for part in [{}]: cursor.execute(part)",
        "(lambda: cursor.execute({}))()",
    ],
)
def test_values_in_texts(expression: str, use: str) -> None:
    function = f"""
    def run(cursor: Cursor, connection: Connection, driver: Driver, request: Request) -> None:
        value = request.body()
        {use.replace("{}", expression)}
    """
    assert 4 in problems(function)


@pytest.mark.parametrize(
    "expression",
    [
        "'SELECT 1'",
        "f'SELECT * FROM {TABLE}'",
        "'SELECT * FROM ' + TABLE",
        "'SELECT * FROM %s' % TABLE",
        "'SELECT * FROM {}'.format(TABLE)",
        "'SELECT ' + ', '.join(f'{name} = ?' for name in (TABLE, 'a'))",
        "f\"VALUES ({', '.join('?' * len(request.values))})\"",
        "f'SELECT {TABLE}' if value else f'SELECT {TABLE}'",
        "TABLE if value else 'SELECT 2'",
        "columns(TABLE)",
        "select(TABLE).where(t.c.a == value)",
        "select(TABLE).where(t.c.a == value).order_by(t.c.a).limit(value)",
        "sa.select(TABLE)",
        "f'ANALYZE {word(value)}'",
    ],
)
def test_texts_of_constants(expression: str) -> None:
    function = f"""
    def columns(name: str) -> str:
        return f"SELECT {{name}}"
    def word(name: str) -> str:
        return name
    def run(cursor: Cursor, request: Request) -> None:
        value = request.body()
        cursor.execute({expression})
        built = {expression}
        cursor.execute(built)
    """
    assert problems(function) == []


def test_who_calls_a_function_that_makes_texts() -> None:
    source = """
    def where(name: str, value: object) -> str:
        return f"WHERE {name} = ?"
    def found(cursor: Cursor, name: str, value: object) -> None:
        cursor.execute("SELECT 1 " + where(name, value), [value])
    ALWAYS = where("a", 1)
    def right(cursor: Cursor, request: Request) -> None:
        found(cursor, "a", request.value)
        found(cursor, value=request.value, name=TABLE)
    def wrong(cursor: Cursor, request: Request) -> None:
        found(cursor, request.value, 1)
        found(cursor, value=1, name=request.value)
        found(cursor, **request.values)
        found(*request.all)
    def wrong_too(cursor: Cursor, name: str) -> None:
        found(cursor, name, 1)
    def handed_on(pool: Pool) -> None:
        pool.run(found)
        wrong_too(pool.cursor, pool.name)
    """
    assert problems(source) == [11, 12, 13, 14, 18, 19]


def test_who_calls_it_from_another_module() -> None:
    source = """
    from other import found as look
    import other
    def wrong(cursor: Cursor, request: Request) -> None:
        look(cursor, request.value)
        other.found(cursor, request.value)
        other.Finder(request.value)
        look(cursor, "a")
        other.Finder("a")
    """
    other = """
    import sqlite3
    def found(cursor: Cursor, name: str) -> None:
        cursor.execute(f"SELECT {name}")
    class Finder:
        def __init__(self, sql: str) -> None:
            self._sql = sql
        def find(self, cursor: Cursor) -> None:
            cursor.execute(self._sql)
    """
    assert problems(source, other=other) == [5, 6, 7]


def test_methods_that_make_texts() -> None:
    source = """
    class Writer:
        def column(self, name: str) -> str:
            return f"CAST(:{name} AS text)"
        def chosen(self, request: Request) -> str:
            return f"SELECT {self.column(request.name)}"
    def write(writer: Writer, request: Request) -> str:
        return f"SELECT {writer.column(TABLE)}, {writer.column(request.name)}"
    def handed_on(writer: Writer, request: Request) -> object:
        return request.pool.run(Writer.column)
    """
    assert problems(source) == [6, 6, 8, 8, 10]


def test_constants_that_change_are_none() -> None:
    source = """
    KINDS = {"a": "b"}
    def learn(request: Request) -> None:
        KINDS["c"] = request.value
    def run(cursor: Cursor) -> None:
        cursor.execute(f"SELECT {KINDS['c']}")
    lower = "a"
    def also(cursor: Cursor) -> None:
        cursor.execute(f"SELECT {lower}")
    """
    assert sorted(set(problems(source))) == [6, 9]


def test_what_happens_at_import_has_no_values() -> None:
    source = """
    import os
    NAMES = [name for name in ("a", "b")]
    STATEMENT = text("SELECT " + ", ".join(f"{name} AS {name}" for name in NAMES))
    class Table:
        SQL = f"SELECT {NAMES[0]}"
    """
    assert problems(source) == []


def test_an_excuse_needs_a_reason() -> None:
    function = "def run(cursor: Cursor, request: Request) -> None:\n    cursor.execute(request.sql)  # sql:{}\n"
    assert problems(function.format("")) == [2]
    assert problems(function.format(" compiled")) == []


def test_execute_means_something_else_where_no_database_is() -> None:
    source = "def run(pool: Pool, request: Request) -> None:\n    pool.execute(request.job)\n"
    assert check({"m.py": source}) == []
    assert len(check({"m.py": f"import asyncpg\n{source}"})) == 1


@pytest.mark.parametrize("name", ["a", "A_1", "_x", "0", "-12", "65536"])
def test_words(name: str) -> None:
    assert word(name) == name


@pytest.mark.parametrize("name", ["", "a b", "a;", "a'", 'a"', "a-b", "1a", "a\n", "é", "--", "a.b", "(a)", "٣"])
def test_what_is_no_word(name: Any) -> None:
    with pytest.raises(ValueError, match="not a word"):
        word(name)
