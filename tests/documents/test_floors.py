"""Which file may import which: an import goes to a lower floor, never level or up."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import draw_map  # noqa: E402  it lies in docs

FOLDERS = {package: ROOT / folder for package, folder in draw_map.FOLDERS.items()}
ONE_ROOM = re.compile(r"(tools\.\w+|__main__)")


def floors(package):
    return {
        name: floor
        for floor, (_, _, names) in draw_map.FLOORS[package].items()
        for name in names.split()
    }


def module_name(path, folder):
    return ".".join(path.relative_to(folder).with_suffix("").parts)


def imports(source, modules):
    """`(package, module)` of each import of ours, those inside functions included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    for name in found:
        package, _, rest = name.partition(".")
        if package not in modules:
            continue
        parts = rest.split(".") if rest else []
        known = next(
            (
                x
                for n in (len(parts), len(parts) - 1)
                if (x := ".".join(parts[:n])) in modules[package]
            ),
            "__init__",
        )
        yield package, known


def faults(package, module, source):
    """What is wrong with the imports of one file."""
    modules = {name: floors(name) for name in FOLDERS}
    own = modules[package][module]
    for target_package, target in imports(source, modules):
        if target_package == "kda_contracts" and package == "kda_jax":
            if target != "__init__" and not ONE_ROOM.fullmatch(module):
                yield f"{module} reaches past kda_contracts' public names: {target}"
        elif (package, module, target_package) == ("kda_contracts", "cli", "kda_jax"):
            continue  # the script kda-jax starts there, so that a check needs no JAX
        elif target_package != package:
            yield f"{module} imports {target_package}"
        elif ONE_ROOM.fullmatch(module) and ONE_ROOM.fullmatch(target):
            continue
        elif modules[package][target] >= own:
            yield f"{module} (floor {own}) imports {target} (floor {modules[package][target]})"


@pytest.mark.parametrize("package", FOLDERS)
def test_every_file_has_a_floor(package):
    folder = FOLDERS[package]
    files = {module_name(path, folder) for path in folder.rglob("*.py")}
    assert files == set(floors(package))


@pytest.mark.parametrize("package", FOLDERS)
def test_an_import_goes_to_a_lower_floor(package):
    folder, found = FOLDERS[package], []
    for path in folder.rglob("*.py"):
        module = module_name(path, folder)
        found += faults(package, module, path.read_text())
    assert not found


def test_the_picture_is_the_table():
    assert (ROOT / "docs" / "map.svg").read_text() == draw_map.picture(), "run docs/draw_map.py"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("norm", "from kda_jax import decode_xla"),  # level
        ("pools", "from kda_jax.call import Static"),  # up
        ("layer", "from kda_jax.tools import oracle"),
        ("layer", "import kda_jax.tools.oracle"),
        ("dispatch", "def f():\n    from kda_jax import layer"),
        ("decode", "import kda_jax"),
        ("decode", "from kda_contracts.judge import Sizes"),
    ],
)
def test_a_wrong_import_is_seen(module, line):
    assert list(faults("kda_jax", module, line))


def test_no_file_is_long_without_a_reason():
    """500 lines at the most; above 350 the docstring says why."""
    for folder in FOLDERS.values():
        for path in folder.rglob("*.py"):
            source = path.read_text()
            lines = len(source.splitlines())
            assert lines <= 500, f"{path.name} has {lines} lines"
            reason = ast.get_docstring(ast.parse(source)) or ""
            assert lines <= 350 or "Over 350 lines" in reason, (
                f"{path.name} has {lines} lines and no reason"
            )


def long_functions(source):
    """`(name, lines)` of functions over 60 lines, docstring apart, that give no reason."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        text = ast.get_docstring(node, clean=False) or ""
        first = node.body[1] if text and len(node.body) > 1 else node.body[0]
        lines = node.end_lineno - first.lineno + 1
        if lines > 60 and "Over 60 lines" not in text:
            yield node.name, lines


def test_no_function_is_long_without_a_reason():
    """60 lines of code at the most; above that the docstring says why."""
    found = [
        (path.name, *fault)
        for folder in FOLDERS.values()
        for path in folder.rglob("*.py")
        for fault in long_functions(path.read_text())
    ]
    assert not found
