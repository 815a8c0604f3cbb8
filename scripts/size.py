"""Count code lines per package: physical lines that hold code, so no blanks, comments or docstrings."""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("molt_sdk", "trainer_backend", "agents", "examples", "benchmarks", "scripts", "tests")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Number of lines of ``source`` that hold code. A string that is a statement by itself counts as a docstring."""
    docstrings = {
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        first, last = token.start[0], token.end[0]
        documents = token.type == tokenize.STRING and any(a <= first and last <= b for a, b in docstrings)
        if token.type not in NO_CODE and not documents:
            lines.update(range(first, last + 1))
    return len(lines)


def sizes(package: Path) -> dict[Path, int]:
    """Code lines of every Python file under ``package``."""
    return {path: code_lines(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="one line per file as well")
    per_file = parser.parse_args().files
    print(f"{'package':<44}{'files':>7}{'code lines':>12}")
    for name in PACKAGES:
        files = sizes(ROOT / name)
        print(f"{name:<44}{len(files):>7}{sum(files.values()):>12,}")
        if per_file:
            for path, count in files.items():
                print(f"  {path.relative_to(ROOT)!s:<49}{count:>12,}")


if __name__ == "__main__":
    main()
