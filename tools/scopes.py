"""Which names mean what in some sources: enough to follow a value from where it is used to where it comes from."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

__all__ = ["Function", "Module", "Scope", "Sources"]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_CHANGES: Final = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "appendleft"})
"""Methods that put something into the thing that they belong to."""


@dataclass(eq=False)
class Scope:
    """A module, a class or a function, with the names that are bound in it."""

    module: Module
    node: ast.AST
    parent: Scope | None
    names: dict[str, list[tuple[ast.expr | None, int | None]]] = field(default_factory=dict)
    """From what a name is bound: an expression, and which of its elements: -1 is each of them."""
    parameters: dict[str, str] = field(default_factory=dict)
    """From parameters to their annotations."""
    changed: set[str] = field(default_factory=set)
    """Names of things that are changed at run time."""

    @property
    def is_import(self) -> bool:
        """Whether its code runs while a module is imported."""
        scope: Scope | None = self
        while scope is not None and not isinstance(scope.node, ast.FunctionDef | ast.AsyncFunctionDef):
            if isinstance(scope.node, ast.Lambda) and (scope.parent is None or not scope.parent.is_import):
                return False
            scope = scope.parent
        return scope is None

    @property
    def function(self) -> Scope | None:
        """The function around, or None."""
        scope: Scope | None = self
        while scope is not None and not isinstance(scope.node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope = scope.parent
        return scope

    @property
    def owner(self) -> Scope | None:
        """The class around, or None."""
        scope: Scope | None = self
        while scope is not None and not isinstance(scope.node, ast.ClassDef):
            scope = scope.parent
        return scope


@dataclass(eq=False)
class Module:
    """One file."""

    name: str
    path: str
    tree: ast.Module
    lines: list[str]
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """From a name to the module that it comes from, and its name there; `` when it is the module."""
    definitions: dict[str, ast.AST] = field(default_factory=dict)
    """Functions, classes, and methods as `Class.method`."""


class Sources:
    """All files together, and which names mean what in them."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.modules: dict[str, Module] = {}
        self.scopes: dict[int, Scope] = {}
        """The scope that each node stands in, and that each function or class makes."""
        self.inner: dict[int, Scope] = {}
        self.annotations: dict[str, set[str]] = {}
        """What functions, methods and attributes of a name give, wherever they are."""
        self._changes: list[tuple[Scope, str, list[ast.expr | None]]] = []
        for path, source in sources.items():
            self._add(path, source)
        for scope, name, values in self._changes:
            self._change(scope, name, values)

    def _add(self, path: str, source: str) -> None:
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".").removeprefix("api.")
        module = Module(name, path, ast.parse(source), source.splitlines())
        self.modules[name] = module
        self._bind(module.tree, Scope(module, module.tree, None))

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            self.scopes[id(child)] = scope
            match child:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
                    self._define(child, scope)
                    continue
                case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                    inner = Scope(scope.module, child, scope)
                    for generator in child.generators:
                        self._assign(inner, generator.target, generator.iter, -1)
                    self._bind(child, inner)
                    continue
                case ast.Import(names=aliases):
                    for alias in aliases:
                        target = alias.name if alias.asname else alias.name.partition(".")[0]
                        scope.module.imports[alias.asname or target] = (target, "")
                case ast.ImportFrom(module=source, names=aliases):
                    for alias in aliases:
                        scope.module.imports[alias.asname or alias.name] = (source or "", alias.name)
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._assign(scope, target, value, None)
                case ast.AnnAssign(target=target, annotation=annotation, value=value):
                    if isinstance(target, ast.Attribute):
                        self.annotations.setdefault(target.attr, set()).add(ast.unparse(annotation))
                    elif isinstance(scope.node, ast.ClassDef) and isinstance(target, ast.Name):
                        self.annotations.setdefault(target.id, set()).add(ast.unparse(annotation))
                    if value is not None:
                        self._assign(scope, target, value, None)
                case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                    self._assign(scope, target, value, None)
                case ast.For(target=target, iter=source) | ast.AsyncFor(target=target, iter=source):
                    self._assign(scope, target, source, -1)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method), args=args) if (
                    method in _CHANGES
                ):
                    self._changes.append((scope, name, [*args, *(keyword.value for keyword in child.keywords)]))
                case ast.withitem(context_expr=value, optional_vars=target) if target is not None:
                    self._assign(scope, target, None, None)
                case _:
                    pass
            self._bind(child, scope)

    def _define(self, node: Function | ast.Lambda | ast.ClassDef, scope: Scope) -> None:
        inner = self.inner[id(node)] = Scope(scope.module, node, scope)
        if not isinstance(node, ast.Lambda):
            prefix = f"{scope.node.name}." if isinstance(scope.node, ast.ClassDef) else ""
            scope.module.definitions.setdefault(prefix + node.name, node)
            for outside in node.decorator_list:
                self.scopes[id(outside)] = scope
                self._bind(outside, scope)
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                self.scopes[id(base)] = scope
        else:
            arguments = node.args
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                inner.parameters[argument.arg] = "" if argument.annotation is None else ast.unparse(argument.annotation)
            for argument in filter(None, (arguments.vararg, arguments.kwarg)):
                inner.parameters[argument.arg] = "str"
            if not isinstance(node, ast.Lambda):
                gives = "" if node.returns is None else ast.unparse(node.returns)
                self.annotations.setdefault(node.name, set()).add(gives)
        self._bind(node, inner)

    def _assign(self, scope: Scope, target: ast.expr, value: ast.expr | None, element: int | None) -> None:
        match target:
            case ast.Name(id=name):
                scope.names.setdefault(name, []).append((value, element))
            case ast.Subscript(value=ast.Name(id=name), slice=key):
                self._changes.append((scope, name, [key, value]))
            case ast.Tuple(elts=targets) if (sources := _element_by_element(value, element, len(targets))) is not None:
                for part, source in zip(targets, sources, strict=True):
                    self._assign(scope, part, source, -1)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for index, part in enumerate(targets):
                    inner = part.value if isinstance(part, ast.Starred) else part
                    alike = isinstance(value, ast.Tuple) and len(value.elts) == len(targets)
                    same = value.elts[index] if isinstance(value, ast.Tuple) and alike else None
                    self._assign(scope, inner, same or value, element if same is not None else -1)
            case _:
                pass

    def _change(self, scope: Scope, name: str, values: Iterable[ast.expr | None]) -> None:
        """What is put into something that a name stands for is as if the name were bound to it."""
        owner = scope
        while owner.parent is not None and name not in owner.names and name not in owner.parameters:
            owner = owner.parent
        if owner.parent is not None or not scope.is_import:
            owner.names.setdefault(name, []).extend((value, None) for value in values)
            owner.changed.add(name)

    def resolved(self, func: ast.expr) -> ast.AST | None:
        """The function or class of this project that is called, if that can be seen."""
        module = self.scopes[id(func)].module
        match func:
            case ast.Name(id=name):
                return self.defined(module, name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                owner = self.scopes[id(func)].owner
                return None if owner is None else module.definitions.get(f"{getattr(owner.node, 'name', '')}.{name}")
            case ast.Attribute(value=ast.Name(id=base), attr=name):
                source, original = module.imports.get(base, ("", ""))
                inside = self.modules.get(f"{source}.{original}".rstrip("."))
                if inside is not None:
                    return inside.definitions.get(name)
                kind = self.defined(module, base)
                if isinstance(kind, ast.ClassDef):
                    return self.scopes[id(kind)].module.definitions.get(f"{kind.name}.{name}")
                return self._method(func, base, name)
            case _:
                return None

    def defined(self, module: Module, name: str) -> ast.AST | None:
        """What a name stands for in a module, if a file of this project defines it."""
        if name in module.definitions:
            return module.definitions[name]
        source, original = module.imports.get(name, ("", ""))
        inside = self.modules.get(source)
        return None if inside is None or inside is module else self.defined(inside, original)

    def _method(self, func: ast.expr, base: str, name: str) -> ast.AST | None:
        """A method of a parameter whose class is one of this project."""
        scope: Scope | None = self.scopes[id(func)]
        while scope is not None and base not in scope.parameters:
            scope = scope.parent
        if scope is None:
            return None
        kind = self.defined(scope.module, scope.parameters[base])
        if not isinstance(kind, ast.ClassDef):
            return None
        return self.scopes[id(kind)].module.definitions.get(f"{kind.name}.{name}")


def _element_by_element(value: ast.expr | None, element: int | None, count: int) -> list[ast.expr | None] | None:
    """From what the columns come that rows of a literal have, or that `zip` and `enumerate` put together."""
    if element is None:
        return None
    match value:
        case ast.Tuple(elts=rows) | ast.List(elts=rows):
            tuples = [row.elts for row in rows if isinstance(row, ast.Tuple) and len(row.elts) == count]
            if len(tuples) < len(rows):
                return None
            return [ast.Tuple(elts=list(column), ctx=ast.Load()) for column in zip(*tuples, strict=True)]
        case ast.Call(func=ast.Name(id="zip"), args=args) if len(args) == count:
            return list(args)
        case ast.Call(func=ast.Name(id="enumerate"), args=[source, *_]) if count == 2:
            return [ast.Constant(0), source]
        case _:
            return None
