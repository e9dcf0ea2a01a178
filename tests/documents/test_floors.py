"""Which file may import which: an import goes to a lower floor, never level or up."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The rooms of the house, by floor. tools/ and __main__ are one room and may import each other.
FLOORS = {
    "kda_jax": {
        11: "__main__ tools.__init__ tools.cli tools.demo tools.bench tools.timing tools.records "
        "tools.synthetic tools.oracle",
        10: "__init__",
        9: "sharding nnx",
        8: "layer",
        7: "decode update prefill",
        6: "dispatch",
        5: "decode_xla decode_mosaic_gpu decode_triton prefill_xla prefill_mosaic_gpu conv norm "
        "checkpoint",
        4: "decode_mosaic_gpu_kernel",
        3: "gates slots sequences layouts weights",
        2: "call",
        1: "pools",
        0: "transforms mosaic decode_triton_kernel",
    },
    "kda_contracts": {
        8: "__main__",
        7: "__init__",
        6: "cli",
        5: "checkpoint",
        4: "normalize",
        3: "judge",
        2: "kda bind options",
        1: "spec remedy safetensors_header",
        0: "arrays axes",
    },
}
FOLDERS = {"kda_jax": ROOT / "kda_jax", "kda_contracts": ROOT / "contracts" / "kda_contracts"}
ONE_ROOM = re.compile(r"(tools\.\w+|__main__)")


def floors(package):
    return {name: floor for floor, names in FLOORS[package].items() for name in names.split()}


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
    modules = {name: floors(name) for name in FLOORS}
    own = modules[package][module]
    for target_package, target in imports(source, modules):
        if target_package == "kda_contracts" and package == "kda_jax":
            if target != "__init__" and not ONE_ROOM.fullmatch(module):
                yield f"{module} reaches past kda_contracts' public names: {target}"
        elif target_package != package:
            yield f"{module} imports {target_package}"
        elif ONE_ROOM.fullmatch(module) and ONE_ROOM.fullmatch(target):
            continue
        elif modules[package][target] >= own:
            yield f"{module} (floor {own}) imports {target} (floor {modules[package][target]})"


@pytest.mark.parametrize("package", FLOORS)
def test_every_file_has_a_floor(package):
    folder = FOLDERS[package]
    files = {module_name(path, folder) for path in folder.rglob("*.py")}
    assert files == set(floors(package))


@pytest.mark.parametrize("package", FLOORS)
def test_an_import_goes_to_a_lower_floor(package):
    folder, found = FOLDERS[package], []
    for path in folder.rglob("*.py"):
        module = module_name(path, folder)
        found += faults(package, module, path.read_text())
    assert not found


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("conv", "from kda_jax import decode_xla"),  # level
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
            assert lines <= 350 or "One file" in reason, (
                f"{path.name} has {lines} lines and no reason"
            )


def long_functions(source):
    """`(name, lines)` of functions of more than 60 lines, without docstring, that give no reason."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        text = ast.get_docstring(node, clean=False) or ""
        first = node.body[1] if text and len(node.body) > 1 else node.body[0]
        lines = node.end_lineno - first.lineno + 1
        if lines > 60 and "One function" not in text:
            yield node.name, lines


def test_no_function_is_long_without_a_reason():
    """60 lines of code at the most; above that the docstring says why: "One function: ..."."""
    found = [
        (path.name, *fault)
        for folder in FOLDERS.values()
        for path in folder.rglob("*.py")
        for fault in long_functions(path.read_text())
    ]
    assert not found
