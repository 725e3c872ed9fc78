"""Imports go down only."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "xdm_ft"
# each layer may import itself and those behind it
LAYERS = [
    "run",
    "cli",
    "experiment",
    "recipe",
    "recipe_faults",
    "recipe_blocks",
    "recipe_text",
    "components",
    "report",
    "training",
    "evaluation",
    "features",
    "algorithms",
    "averaging",
    "sharpness",
    "xdomainmix",
    "encoders",
    "data",
    "atomic",
    "progress",
    "randomness",
    "tensors",
    "blocks",
    "interrupt",
    "errors",
]
NOT_TO_SHADOW = {
    "datasets",
    "wilds",
    "timm",
    "torch",
    "open_clip",
    "accelerate",
    "evaluate",
    "types",
    "logging",
    "random",
}


def layer_of(module: str) -> str:
    return module.removeprefix("xdm_ft").lstrip(".").split(".")[0]


def imports(path: Path) -> set[str]:
    """Layers of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "xdm_ft":
            modules = [f"xdm_ft.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules = [node.module or ""]
        else:
            continue
        found |= {layer_of(m) for m in modules if m.split(".")[0] == "xdm_ft"}
    return found - {"", "__version__"}


def test_every_import_goes_down():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 30
    for path in files:
        relative = path.relative_to(PACKAGE)
        own = relative.parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for imported in imports(path):
            assert LAYERS.index(own) <= LAYERS.index(imported), f"{relative} ({own}) imports {imported}"


def test_the_walk_sees_an_import_that_goes_up(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from xdm_ft.training import bank\n")
    assert imports(bad) == {"training"}


def test_every_part_of_the_package_has_a_layer():
    parts = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} == set(LAYERS)


def test_nothing_directly_inside_shadows_another_package():
    import sys

    parts = {p.name.removesuffix(".py") for p in PACKAGE.iterdir()} - {"__init__", "__pycache__"}
    assert not parts & (NOT_TO_SHADOW | set(sys.stdlib_module_names))


def test_tensors_imports_torch_only():
    tree = ast.parse((PACKAGE / "tensors.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "dataclasses", "typing", "torch"}
