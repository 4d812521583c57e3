"""Proves that no value gets into the text of a statement: `python -m tools.sql_texts`, a part of `make lint`.

The rule: **a text of SQL is made of constants.** Values are bound, never written into it.

1. What goes to the database as a text (the first argument of `execute`, `exec_driver_sql`, `fetch`, `text`,
   `literal_column` and the like) and every string that is put together and reads like SQL (an f-string, `+`, `%`,
   `format`, `join`) may only be made of literals, of constants (names in capitals, fields of a named tuple), and of
   what functions make of these. A statement of SQLAlchemy is no text.
2. A function that puts its parameters into such a text may only be called with such arguments, or while a module is
   imported, when no value can be there yet; and it may not be handed on at run time.
3. `word()` lets a single word in that is known at run time only: letters, digits and underscores. It refuses
   everything else.

Where a text comes out of a compiler of SQLAlchemy's, a comment `# sql: why` on its line or above it says so; a test
lists these places. What a function gives that is annotated without `str` and `Any` is no text: pyright sees to that.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from tools.scopes import Function, Scope, Sources

__all__ = ["ROOTS", "Finding", "check", "main"]

ROOTS: Final = ("lightning_sql", "api", "migrations")
EXEMPT: Final = ("lightning_sql/testing",)
"""Where tests make and drop databases of their own."""

METHODS: Final = frozenset(
    {"execute", "executemany", "executescript", "exec_driver_sql"}
    | {"fetch", "fetchrow", "fetchval"}
    | {"scalar", "scalars"}
)
"""Methods whose first argument goes to the database."""
CLIENTS: Final = ("sqlalchemy", "alembic", "sqlite3", "asyncpg", "aiosqlite", "lightning_sql.database")
"""Only modules that import one of these can have a way to the database; in others `execute` means something else."""
FUNCTIONS: Final = frozenset({"text", "literal_column", "DDL"})
"""SQLAlchemy's functions that make a part of a statement of a text."""
ALLOWED_WORD: Final = "word"

SQL: Final = re.compile(
    r"\b(SELECT|INSERT|UPDATE|DELETE|FROM|WHERE|VALUES|SET|JOIN|ORDER BY|GROUP BY|LIMIT|OFFSET|RETURNING|UNION|WITH|"
    r"CASE|WHEN|CAST|AND|OR|NOT|IN|LIKE|BETWEEN|EXISTS|NULL|PRAGMA|ANALYZE|VACUUM|LOCK|CREATE|ALTER|DROP|TRUNCATE|"
    r"COPY|GRANT|BEGIN|COMMIT|NOTIFY|LISTEN)\b"
)
CONSTANT: Final = re.compile(r"_*[A-Z][A-Z0-9_]*|_fields")
FLUENT: Final = frozenset({"select_from", "where", "values", "returning", "order_by", "limit", "offset", "correlate"})
"""Methods of statements that make another statement, also where a class of this project has one of that name."""
CLAUSES: Final = re.compile(
    r"\b(Executable|Select|CompoundSelect|Insert|Update|Delete|UpsertStatement|FromClause|Table|Subquery|CTE|"
    r"ColumnElement|Column|TextClause|ClauseElement)\b"
)
TEXTUAL: Final = re.compile(r"\b(str|Any|object|LiteralString)\b")
STATEMENTS: Final = re.compile(r"\b(Select|CompoundSelect|Insert|Update|Delete|ColumnElement|Result)\[[^\]]*\]")
EXCUSE: Final = re.compile(r"#\s*sql:\s*\S")

_STRING_METHODS: Final = frozenset({"join", "format", "format_map", "replace", "strip", "lower", "upper"})
_SAME_METHODS: Final = _STRING_METHODS | {"items", "keys", "values", "get", "index"}
_SAME_FUNCTIONS: Final = frozenset(
    {"list", "tuple", "set", "frozenset", "dict", "str", "repr", "cast"}
    | {"sorted", "reversed", "zip", "enumerate", "min", "max"}
)

Parts: TypeAlias = frozenset[str] | None
"""Which parameters a text of constants is made of besides; None where anything may be in it."""

NOTHING: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, order=True)
class Finding:
    """A text that may have a value in it."""

    path: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}"


class Checker(Sources):
    """All files together, and what is wrong in them."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        super().__init__(sources)
        self.duties: dict[int, set[str]] = {}
        """Parameters of functions that get into a text."""
        self.findings: set[Finding] = set()
        self.excuses: list[tuple[str, str]] = []
        """Where, and in which function, a text was said to be right."""
        self._evaluating: set[int] = set()

    # What a text is made of

    def parts(self, node: ast.expr | None) -> Parts:
        """Which parameters besides constants a value is made of; None where it may be made of anything."""
        match node:
            case ast.Constant():
                return NOTHING
            case ast.Name():
                return self._name(node)
            case ast.JoinedStr(values=values):
                return self._all(values)
            case ast.FormattedValue(value=value, format_spec=spec):
                return self._all([value, *([] if spec is None else [spec])])
            case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values):
                return self._all(values)
            case ast.Dict(keys=keys, values=values):
                return self._all([*(key for key in keys if key is not None), *values])
            case ast.Starred(value=value) | ast.Subscript(value=value) | ast.NamedExpr(value=value):
                return self.parts(value)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self._all(side for side in (left, right) if not _is_length(side))
            case ast.BinOp(left=left, right=right):
                return self._all([left, right])
            case ast.BoolOp(values=values):
                return self._all(values)
            case ast.IfExp(body=body, orelse=orelse):
                return self._all([body, orelse])
            case ast.ListComp(elt=element) | ast.SetComp(elt=element) | ast.GeneratorExp(elt=element):
                return self.parts(element)
            case ast.DictComp(key=key, value=value):
                return self._all([key, value])
            case ast.Attribute(value=value, attr=name):
                is_constant = CONSTANT.fullmatch(name) is not None and isinstance(value, ast.Name | ast.Attribute)
                return NOTHING if is_constant else self._attribute(node, value, name)
            case ast.Call():
                return self._call(node)
            case _:
                return None

    def _all(self, nodes: Iterable[ast.expr]) -> Parts:
        found: set[str] = set()
        for node in nodes:
            parts = self.parts(node)
            if parts is None:
                return None
            found |= parts
        return frozenset(found)

    def _name(self, node: ast.Name) -> Parts:
        scope: Scope | None = self.scopes[id(node)]
        while scope is not None:
            if not (isinstance(scope.node, ast.ClassDef) and scope is not self.scopes[id(node)]):
                bound = scope.names.get(node.id, [])
                if scope.parent is None:
                    is_constant = CONSTANT.fullmatch(node.id) and node.id not in scope.changed
                    return NOTHING if is_constant else None
                if bound or node.id in scope.parameters:
                    return self._bound(node.id, scope, bound)
            scope = scope.parent
        return None

    def _bound(self, name: str, scope: Scope, bound: Sequence[tuple[ast.expr | None, int | None]]) -> Parts:
        if isinstance(scope.node, ast.Lambda) and name in scope.parameters:
            return NOTHING if scope.is_import else None
        found = {name} if name in scope.parameters else set[str]()
        for value, _element in bound:
            if id(value) in self._evaluating:
                continue
            self._evaluating.add(id(value))
            parts = self.parts(value)
            self._evaluating.discard(id(value))
            if parts is None:
                return None
            found |= parts
        return frozenset(found)

    def _attribute(self, node: ast.Attribute, value: ast.expr, name: str) -> Parts:
        """An attribute of this very object is what its class was given; else it may be anything."""
        owner = self.scopes[id(node)].owner
        if owner is None or not (isinstance(value, ast.Name) and value.id == "self"):
            return None
        made = owner.module.definitions.get(f"{getattr(owner.node, 'name', '')}.__init__")
        stored = [
            assigned.value
            for assigned in ast.walk(owner.node)
            if isinstance(assigned, ast.Assign)
            for target in assigned.targets
            if isinstance(target, ast.Attribute) and target.attr == name
        ]
        if made is None or not stored:
            return None
        for source in stored:
            parts = self.parts(source)
            function = self.scopes[id(source)].function
            if parts is None or function is None or function.node is not made:
                return None
            self._owe(function, parts, node)
        return NOTHING

    def _call(self, node: ast.Call) -> Parts:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        callee = self.resolved(node.func)
        if isinstance(callee, ast.FunctionDef) and callee.name == ALLOWED_WORD:
            return NOTHING
        if isinstance(callee, ast.FunctionDef):
            return self._given_back(callee, node)
        if isinstance(callee, ast.ClassDef):
            return self._all(arguments)
        match node.func:
            case ast.Name(id=name) if name in _SAME_FUNCTIONS:
                return self._all(node.args[1:] if name == "cast" else arguments)
            case ast.Name():  # a parameter that is a function
                return self._all([node.func, *arguments])
            case ast.Attribute(value=value, attr=name) if name in _SAME_METHODS or name == "fromkeys":
                return self._all([*([] if name == "fromkeys" else [value]), *arguments])
            case _:
                return None

    def _given_back(self, function: ast.FunctionDef, call: ast.Call) -> Parts:
        if id(function) in self._evaluating:
            return NOTHING
        self._evaluating.add(id(function))
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        inside = self.inner[id(function)]
        parts = self._all(node for node in returned if node is not None and self.scopes[id(node)].function is inside)
        self._evaluating.discard(id(function))
        return None if parts is None else self._all(self._passed(function, call, parts))

    def _passed(self, function: Function, call: ast.Call, names: Iterable[str]) -> Iterator[ast.expr]:
        """What a call gives for parameters of a function."""
        arguments = function.args
        positional = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
        is_method = isinstance(self.scopes[id(function)].node, ast.ClassDef) and positional[:1] == ["self"]
        given = positional[1:] if is_method else positional
        for name in names:
            starred = [argument for argument in call.args if isinstance(argument, ast.Starred)]
            if name in given and starred:
                yield from starred  # whichever of them it is
            elif name in given and given.index(name) < len(call.args):
                yield call.args[given.index(name)]
            elif arguments.vararg is not None and name == arguments.vararg.arg:
                yield from call.args[len(given) :]
            else:
                yield from (keyword.value for keyword in call.keywords if keyword.arg in (name, None))

    # What is no text

    def is_statement(self, node: ast.expr) -> bool:
        """Whether something is certainly no text: a statement, or what a function gives that gives no texts."""
        match node:
            case ast.Await(value=value):
                return self.is_statement(value)
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_statement(body) and self.is_statement(orelse)
            case ast.Name(id=name):
                return self._is_statement_name(name, self.scopes[id(node)])
            case ast.Call(func=func, args=args):
                if isinstance(func, ast.Name) and func.id == "cast":
                    return not _may_be_text(ast.unparse(args[0]))
                return self._makes_statements(func)
            case ast.Attribute(attr=name):
                return self._gives_statements(name)
            case ast.BinOp(left=left, right=right):
                return self.is_statement(left) and self.is_statement(right)
            case _:
                return False

    def _makes_statements(self, func: ast.expr) -> bool:
        match func:
            case ast.Name(id=name):
                source = self.scopes[id(func)].module.imports.get(name, ("", ""))[0]
                return source.partition(".")[0] in ("sqlalchemy", "alembic") or self._gives_statements(name)
            case ast.Attribute(attr=name) if name in self.annotations and name not in FLUENT:
                return self._gives_statements(name)
            case ast.Attribute(value=value):
                return self._is_clause(value)
            case _:
                return False

    def _is_clause(self, node: ast.expr) -> bool:
        """Whether something is a part of a statement, so that what its methods make is one, too."""
        match node:
            case ast.Name(id=name):
                source = self.scopes[id(node)].module.imports.get(name, ("", ""))[0]
                if source.partition(".")[0] in ("sqlalchemy", "alembic") or CONSTANT.fullmatch(name):
                    return True
                return self._is_statement_name(name, self.scopes[id(node)], CLAUSES)
            case ast.Call(func=func):
                return self._makes_statements(func)
            case ast.Attribute(value=value, attr=name):
                kinds = self.annotations.get(name, set())
                return all(map(CLAUSES.search, kinds)) if kinds else self._is_clause(value)
            case _:
                return False

    def _gives_statements(self, name: str) -> bool:
        kinds = self.annotations.get(name, set())
        return bool(kinds) and not any(_may_be_text(kind) for kind in kinds)

    def _is_statement_name(self, name: str, scope: Scope | None, wanted: re.Pattern[str] | None = None) -> bool:
        while scope is not None:
            bound = scope.names.get(name, [])
            if name in scope.parameters:
                kind = scope.parameters[name]
                return not _may_be_text(kind) if wanted is None else wanted.search(kind) is not None
            if bound:
                sources = [value for value, _ in bound if value is not None and id(value) not in self._evaluating]
                self._evaluating.update(map(id, sources))
                found = all(self.is_statement(value) for value in sources)
                self._evaluating.difference_update(map(id, sources))
                return found
            scope = scope.parent
        return False

    # The check

    def check(self) -> list[Finding]:
        """All findings, in order."""
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call) and node.args and self._goes_to_the_database(node.func):
                    self._demand(node.args[0], node, "this text goes to the database")
                elif isinstance(node, ast.expr) and _reads_like_sql(node):
                    self._demand(node, node, "this reads like SQL")
        self._settle()
        return sorted(self.findings)

    def _goes_to_the_database(self, func: ast.expr) -> bool:
        match func:
            case ast.Attribute(value=value, attr=name):
                imports = self.scopes[id(func)].module.imports
                source = imports.get(getattr(value, "id", ""), ("", ""))[0]
                if name in METHODS:
                    return any(found.startswith(CLIENTS) for found, _ in imports.values())
                return name in FUNCTIONS and source.startswith(("sqlalchemy", "alembic"))
            case ast.Name(id=name):
                source = self.scopes[id(func)].module.imports.get(name, ("", ""))
                return source[0].startswith("sqlalchemy") and source[1] in FUNCTIONS
            case _:
                return False

    def _demand(self, text: ast.expr, where: ast.expr, what: str) -> None:
        scope = self.scopes[id(where)]
        if scope.is_import and not isinstance(scope.node, ast.Lambda):
            return
        if self.is_statement(text):
            return
        parts = self.parts(text)
        if parts is None:
            if self._is_excused(where):
                return
            self._find(where, f"{what}, and something in it is no constant")
        else:
            self._owe(scope.function, parts, where)

    def _is_excused(self, node: ast.expr) -> bool:
        scope = self.scopes[id(node)]
        here, above = scope.module.lines[node.lineno - 1], scope.module.lines[node.lineno - 2].strip()
        excused = EXCUSE.search(here) is not None or (above.startswith("#") and EXCUSE.match(above) is not None)
        if excused and scope.function is not None:
            self.excuses.append((scope.module.path, getattr(scope.function.node, "name", "")))
        return excused

    def _find(self, node: ast.AST, problem: str) -> None:
        path = self.scopes[id(node)].module.path
        self.findings.add(Finding(path, getattr(node, "lineno", 0), problem))

    def _owe(self, scope: Scope | None, names: Iterable[str], where: ast.AST) -> None:
        """Whoever calls the function that has these parameters must give it constants for them."""
        while scope is not None:
            mine = scope.parameters.keys() & set(names)
            if mine and isinstance(scope.node, ast.FunctionDef | ast.AsyncFunctionDef):
                outer = self.scopes[id(scope.node)].node
                if not isinstance(outer, ast.ClassDef) and scope.module.definitions[scope.node.name] is not scope.node:
                    self._find(where, "two functions of this name make it unclear who puts what into this text")
                self.duties.setdefault(id(scope.node), set()).update(mine)
            scope = scope.parent

    def _settle(self) -> None:
        """Look at the callers of functions that put their parameters into texts, and at their callers."""
        before = -1
        while before != (before := sum(map(len, self.duties.values()))):
            for module in self.modules.values():
                called: set[int] = set()
                handed: set[int] = set()
                for node in ast.walk(module.tree):
                    if isinstance(node, ast.Call):
                        called.add(id(node.func))
                        if getattr(node.func, "id", "") not in ("isinstance", "cast"):
                            handed.update(map(id, node.args))
                        self._settle_call(node)
                for node in ast.walk(module.tree):
                    if isinstance(node, ast.Name | ast.Attribute) and id(node) not in called:
                        self._settle_reference(node, id(node) in handed)

    def _owing(self, node: ast.AST | None) -> Function | None:
        if isinstance(node, ast.ClassDef):
            node = self.scopes[id(node)].module.definitions.get(f"{node.name}.__init__")
        owes = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and self.duties.get(id(node))
        return node if owes and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def _candidates(self, func: ast.expr) -> list[Function]:
        """The functions with duties that may be meant by a name."""
        resolved = self._owing(self.resolved(func))
        if resolved is not None:
            return [resolved]
        if not isinstance(func, ast.Attribute) or self.resolved(func) is not None:
            return []
        # A method of an object of which nothing is known: any of that name whose class this module knows of.
        module = self.scopes[id(func)].module
        found: list[Function] = []
        for other in self.modules.values():
            for name, node in other.definitions.items():
                owner, _, method = name.rpartition(".")
                known = owner and (other is module or self.defined(module, owner) is other.definitions.get(owner))
                if known and method == func.attr and (owing := self._owing(node)) is not None:
                    found.append(owing)
        return found

    def _settle_call(self, call: ast.Call) -> None:
        scope = self.scopes[id(call)]
        for function in self._candidates(call.func):
            for argument in self._passed(function, call, sorted(self.duties[id(function)])):
                if scope.is_import and not isinstance(scope.node, ast.Lambda):
                    continue
                if self.is_statement(argument):
                    continue
                parts = self.parts(argument)
                if parts is None:
                    if not self._is_excused(call):
                        self._find(call, f"{function.name}() puts this into a text of SQL, and it is no constant")
                else:
                    self._owe(scope.function, parts, call)

    def _settle_reference(self, node: ast.Name | ast.Attribute, is_handed: bool) -> None:
        scope = self.scopes[id(node)]
        meant = self.resolved(node)
        # The name of a class is mostly a type.
        if scope.is_import or not isinstance(node.ctx, ast.Load) or (isinstance(meant, ast.ClassDef) and not is_handed):
            return
        function = self._owing(meant)
        if function is not None and not self._is_excused(node):
            self._find(node, f"{function.name}() makes texts of SQL and is handed on at run time")


def _may_be_text(annotation: str) -> bool:
    """Whether something of a type, or a part of it, may be a text; without an annotation it may."""
    return not annotation or TEXTUAL.search(STATEMENTS.sub("", annotation)) is not None


def _is_length(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _reads_like_sql(node: ast.expr) -> bool:
    match node:
        case ast.JoinedStr(values=values) if any(isinstance(value, ast.FormattedValue) for value in values):
            return any(isinstance(value, ast.Constant) and SQL.search(str(value.value)) for value in values)
        case ast.BinOp(op=ast.Add() | ast.Mod()):
            sides = (node.left, node.right)
            return any(isinstance(side, ast.Constant) and SQL.search(str(side.value)) for side in sides)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr=name)):
            return name in _STRING_METHODS and SQL.search(text) is not None
        case _:
            return False


def sources_of(root: Path, folders: Sequence[str] = ROOTS) -> dict[str, str]:
    """The sources below folders, by their paths from the root."""
    files = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    named = {path.relative_to(root).as_posix(): path.read_text() for path in files}
    return {path: source for path, source in named.items() if not path.startswith(EXEMPT)}


def check(sources: Mapping[str, str]) -> list[Finding]:
    """What is wrong in some sources, by their paths."""
    return Checker(sources).check()


def main(root: Path) -> int:
    """Check a checkout."""
    sources = sources_of(root)
    findings = check(sources)
    for finding in findings:
        print(finding)
    print(f"{len(sources)} files: {len(findings) or 'no'} texts of SQL that may have a value in them")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
