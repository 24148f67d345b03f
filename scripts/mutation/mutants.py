"""Small changes to a module, found in its syntax tree. Each changes one place inside a function, and still compiles.

Left alone: annotations, decorators, defaults, texts of errors and f-strings, calls of the log, and everything outside
of functions, which no test covers by itself.
"""

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_Node = TypeVar("_Node", bound=ast.AST)
_LOG_CALL = re.compile(r"(logger|log_event|logging)\b")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change.

    Attributes:
        path: Of the module, relative to the repository.
        line, column, end_line, end_column: What is replaced; columns in UTF-8 bytes, as `ast` counts.
        new: What stands there instead.
        kind: For people.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    new: str
    kind: str

    def applied(self, source: str) -> str:
        """Return the module with the change."""
        lines = source.encode().split(b"\n")
        head = b"\n".join([*lines[: self.line - 1], lines[self.line - 1][: self.column]])
        tail = b"\n".join([lines[self.end_line - 1][self.end_column :], *lines[self.end_line :]])
        return (head + self.new.encode() + tail).decode()


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return every mutant of a module."""
    finder = _Finder(path)
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str) -> None:
        self.found: list[Mutant] = []
        self._path, self._depth = path, 0

    def visit(self, node: ast.AST) -> None:
        """Collect the mutants of a node, then of its children."""
        call = node.value if isinstance(node, ast.Expr) else node
        if isinstance(node, ast.JoinedStr) or (isinstance(call, ast.Call) and _LOG_CALL.match(ast.unparse(call.func))):
            return
        if self._depth and isinstance(node, ast.expr | ast.stmt):
            for target, new, kind in _changes(node):
                self._add(target, new, kind)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._depth += 1
            for statement in node.body:
                self.visit(statement)
            self._depth -= 1
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
        elif not isinstance(node, ast.Raise):
            self.generic_visit(node)

    def _add(self, node: ast.expr | ast.stmt, new: str, kind: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        self.found.append(
            Mutant(
                path=self._path,
                line=node.lineno,
                column=node.col_offset,
                end_line=node.end_lineno,
                end_column=node.end_col_offset,
                new=new,
                kind=kind,
            )
        )


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yield what may be replaced in a node by which source text, and the kind of change."""
    match node:
        case ast.Compare():
            for number, operator in enumerate(node.ops):
                for other in _COMPARE[type(operator)]:
                    ops = [*node.ops[:number], other(), *node.ops[number + 1 :]]
                    yield node, _with(node, ops=ops), f"{type(operator).__name__} to {other.__name__}"
        case ast.BoolOp():
            yield node, _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And()), "and to or, or to and"
            for number in range(len(node.values)):
                rest = [*node.values[:number], *node.values[number + 1 :]]
                text = f"({ast.unparse(rest[0])})" if len(rest) == 1 else _with(node, values=rest)
                yield node, text, "one operand less"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"({ast.unparse(node.operand)})", "no not"
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            yield node, _with(node, op=_ARITHMETIC[type(node.op)]()), "other arithmetic"
        case ast.AugAssign() if type(node.op) in _ARITHMETIC:
            yield node, ast.unparse(_copied(node, op=_ARITHMETIC[type(node.op)]())), "other arithmetic"
        case ast.Constant(value=bool() as truth):
            yield node, str(not truth), "True to False, False to True"
        case ast.Constant(value=int() as number):
            yield node, str(number + 1), "one more"
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield node.test, f"(not ({ast.unparse(node.test)}))", "negated"
        case ast.Return() if node.value is not None and not isinstance(node.value, ast.Constant):
            yield node, "return None", "returns None"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield node, "pass", "no call"
        case ast.Raise() if node.exc is not None:
            yield node, "pass", "no raise"
        case ast.Break():
            yield node, "continue", "break to continue"
        case ast.Continue():
            yield node, "break", "continue to break"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _copied(node: _Node, **fields: object) -> _Node:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _with(node: ast.expr, **fields: object) -> str:
    return f"({ast.unparse(_copied(node, **fields))})"
