"""Prints statistics of the house: lines, modules, names, comments, functions, tests.

python tools/house.py [CHECKOUT]
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def private_imports_across_rooms(package: Path) -> list[str]:
    """Returns "file: names" of imports from another room that name a private module (`_x`) or a private name."""
    imports = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            private = [name for name in names if re.match(rf"{package.name}\.(?!{room}\b).*\b_(?!_)", name)]
            imports += [f"{path.relative_to(package)}: {', '.join(private)}"] if private else []
    return imports


def code_lines(source: str, tree: ast.Module) -> int:
    """Returns the lines that are neither empty, a comment, nor a docstring."""
    lines = {number for number, line in enumerate(source.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node, clean=False):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def used_once(functions: list[Function], source: str) -> int:
    """Returns the number of private functions and methods whose name stands in the source once outside its `def`."""
    words = Counter(re.findall(r"\b_\w+", source))
    private = Counter(node.name for node in functions if node.name.startswith("_") and not node.name.endswith("__"))
    return sum(count for name, count in private.items() if words[name] - count == 1)


def main(root: Path) -> None:
    package = root / "xdm_ft"
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)
    median, nearly_all = (lengths[len(lengths) * percent // 100] for percent in (50, 95))
    repeated = Counter(path.name for path in sources if path.name != "__init__.py")
    tokens = [token for source in sources.values() for token in tokenize.generate_tokens(io.StringIO(source).readline)]
    comments = sum(token.type == tokenize.COMMENT for token in tokens)
    code = sum(code_lines(source, trees[path]) for path, source in sources.items())
    tests = sorted((root / "tests").rglob("*.py"))
    text = "".join(sources.values())
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "--collect-only", "-m", "not slow and not soak and not gpu"]
    collected = subprocess.run(command, cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True).stdout
    print(
        f"{text.count(chr(10))} lines in {len(sources)} modules",
        f"{len(functions)} functions: median {median} lines, 95% of them at most {nearly_all}",
        f"{used_once(functions, text)} private functions with one call site",
        f"{100 * comments / code:.1f} comment lines per 100 of {code} lines of code",
        f"{len(private_imports_across_rooms(package))} imports of private modules across rooms",
        f"{sum(count >= 2 for count in repeated.values())} file names that occur at least twice",
        f"{sum(path.read_text().count(chr(10)) for path in tests)} lines of tests in {len(tests)} files",
        f"quick tests: {collected.strip().splitlines()[-1]}",
        sep="\n",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
