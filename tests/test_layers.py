"""Imports go down only."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from xdm_ft.recipe.components import FOLDERS, names

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "xdm_ft"
# each layer may import itself and those behind it
LAYERS = [
    "run",
    "__main__",
    "cli",
    "report",
    "audit",
    "new_site",
    "export",
    "experiment",
    "results",
    "recipe",
    "analysis",
    "training",
    "protocol",
    "evaluation",
    "features",
    "algorithms",
    "heads",
    "averaging",
    "sharpness",
    "xdomainmix",
    "cut",
    "encoders",
    "blocks",
    "model_sources",
    "data",
    "image_files",
    "augmentations",
    "images",
    "core",
    "storage",
    "runtime",
    "version",
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


def layer_of(module):
    return module.removeprefix("xdm_ft").lstrip(".").split(".")[0]


def imports(path):
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
    return found - {""}


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


def modules_of(package):
    """Dotted name → file, of every module of the package."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_circle(package):
    """Modules that import each other in a loop, imports inside functions and for types included; none: []."""
    modules = modules_of(package)
    graph = {name: imported_modules(path, modules) - {name} for name, path in modules.items()}
    free = set(graph)
    while leaves := {name for name in free if not graph[name] & free}:
        free -= leaves
    return sorted(free)


def imported_modules(path, modules):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules.keys()


def test_modules_are_few():
    """A file is one subject: a helper of one neighbour stands in its neighbour. Components do not count."""
    components = sum(len(names(folder)) for folder in FOLDERS.values())
    assert 100 < len(modules_of(PACKAGE)) - components <= 196


def test_no_modules_import_each_other():
    assert import_circle(PACKAGE) == []


def test_every_module_can_be_imported():
    """The type checker takes a module that is missing for a library without types."""
    scripts = {"xdm_ft.run", "xdm_ft.__main__"}  # imported, the first would take the place of the function `xdm_ft.run`
    for name in sorted(modules_of(PACKAGE).keys() - scripts):
        importlib.import_module(name)


def private_imports_across_rooms(package):
    """ "file: module" of imports of a private module or name (`_x`) of another folder of the package."""
    private = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top, *parts = name.split(".")
                hidden = any(part.startswith("_") and not part.endswith("__") for part in parts)
                if top == package.name and parts and parts[0] != room and hidden:
                    private.append(f"{path.relative_to(package)}: {name}")
    return private


def test_what_is_private_to_a_room_stays_there():
    assert private_imports_across_rooms(PACKAGE) == []


def test_the_search_for_private_imports_finds_one(tmp_path):
    room = tmp_path / "house/kitchen"
    room.mkdir(parents=True)
    (room / "a.py").write_text("from house.kitchen import _oven\nfrom house.cellar import _wine, wood\n")
    (room / "b.py").write_text("import house.cellar._wine\nfrom house import __version__\n")
    wine = "house.cellar._wine"
    assert private_imports_across_rooms(tmp_path / "house") == [f"kitchen/a.py: {wine}", f"kitchen/b.py: {wine}"]


@pytest.mark.slow
def test_few_frames_lie_between_a_run_and_a_loss():
    done = subprocess.run([sys.executable, "tools/count_frames.py"], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    counts = [int(line.split()[-2]) for line in done.stdout.splitlines() if line.endswith(" frames")]
    assert len(counts) == 2 and max(counts) <= 12, done.stdout


def test_the_search_for_circles_finds_one(tmp_path):
    package = tmp_path / "house"
    package.mkdir()
    (package / "a.py").write_text("from house.b import x\n")
    (package / "b.py").write_text("def f():\n    from house import a\n")
    (package / "c.py").write_text("import house.a\n")
    assert {"house.a", "house.b"} <= set(import_circle(package))
    (package / "b.py").write_text("")
    assert import_circle(package) == []


def test_the_walk_sees_an_import_that_goes_up(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from xdm_ft.training import bank\n")
    assert imports(bad) == {"training"}


def test_every_part_of_the_package_has_a_layer():
    parts = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} == set(LAYERS)


def test_nothing_directly_inside_shadows_another_package():
    parts = {p.name.removesuffix(".py") for p in PACKAGE.iterdir()} - {"__init__", "__pycache__"}
    assert not parts & (NOT_TO_SHADOW | set(sys.stdlib_module_names))


def test_only_the_command_line_and_reports_import_reports():
    importing = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if "report" in imports(path)}
    assert importing <= {"cli", "report"}


def public_types(package):
    """{name of a class or of another type: modules that define it}"""
    found = {}
    for module, path in modules_of(package).items():
        for node in ast.parse(path.read_text()).body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            names = [node.name] if isinstance(node, ast.ClassDef) else [getattr(of, "id", "") for of in targets]
            for name in names:
                if name[:1].isupper() and not name.isupper():
                    found.setdefault(name, []).append(module)
    return found


def test_no_public_type_has_two_meanings(tmp_path):
    assert {name: modules for name, modules in public_types(PACKAGE).items() if len(modules) > 1} == {}
    (tmp_path / "a.py").write_text("class Part:\n    pass\n")
    (tmp_path / "b.py").write_text("Part = dict[str, int]\nPARTS = 3\n")
    assert len(public_types(tmp_path)["Part"]) == 2
