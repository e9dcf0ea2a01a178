"""The page docs/api.md, made from the docstrings: python docs/make_api.py writes it."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import kda_contracts
import kda_jax
from kda_jax import nnx, sharding

# "x: ...", "a, b: ..." or "`(y, cache)`: ..."
ENTRY = re.compile(r"(\*{0,2}\w+(, \*{0,2}\w+)*|`[^`]*`): ")
PAGE = Path(__file__).parent / "api.md"
HEAD = """\
# Every public name

Made from the docstrings by `python docs/make_api.py`.

"""
OPERATORS = (
    "packed_decode fused_sigmoid_gating_kda_update recurrent_kda chunk_kda "
    "recurrent_verify commit Drafts "
    "kda_log_decay kda_beta conv_decode conv_prefill gated_rms_norm"
)
LAYER = (
    "kda_apply kda_decode kda_prefill kda_verify kda_commit KDAConfig KDAParams KDACache "
    "KDADrafts init_params init_cache config_from_hf load_layer load_layers check_values"
)
EDGES = (
    "validate_slots validate_cu_seqlens pad_slots clear_slots copy_slots pack_qkv state_from_kv "
    "state_to_kv normalize_a normalize_A_log normalize_dt_bias"
)
CHOICE = "explain Explanation Implementation ContractError BadFileError"
MESH = "params_specs cache_specs specs split_packed join_packed local_slots place"
GROUPS = (
    ("Operators", kda_jax, OPERATORS),
    ("The layer", kda_jax, LAYER),
    ("Slots, sequences and other layouts", kda_jax, EDGES),
    ("What runs, and errors", kda_jax, CHOICE),
    (
        "Over a mesh: `kda_jax.sharding`",
        sharding,
        f"{MESH} make_decode make_prefill make_verify make_commit",
    ),
    ("Flax: `kda_jax.nnx`", nnx, "KDALayer"),
    ("Without JAX: `kda_contracts`", kda_contracts, "check check_checkpoint split_heads"),
)


def page():
    """The whole text of docs/api.md."""
    parts = [f"{HEAD}{inspect.cleandoc(kda_jax.__doc__)}\n"]
    for title, module, names in GROUPS:
        parts.append(f"## {title}\n")
        parts += [entry(module, name) for name in names.split()]
    return "\n".join(parts)


def entry(module, name):
    """One name: its signature or fields, and its docstring."""
    x = getattr(module, name)
    if not inspect.isfunction(x) and not inspect.isclass(x):
        return f"### {name}\n\n{fenced(f'{name} = {x}'.replace('typing.', ''), 'text')}"
    tree = ast.parse(textwrap.dedent(inspect.getsource(x))).body[0]
    shown = signature(tree) if inspect.isfunction(x) else fields(x, tree)
    return "\n".join([f"### {name}\n", *([fenced(shown, "text")] if shown else []), prose(x)])


def signature(tree):
    """A function's own text, a parameter a line."""
    parts = re.split(r", (?![^\[]*\])", ast.unparse(tree.args))
    parts = [re.sub(r"(?<=\w)=", " = ", x, count=1) if ":" in x else x for x in parts]
    returned = "" if tree.returns is None else f" -> {ast.unparse(tree.returns)}"
    short = f"{tree.name}({', '.join(parts)}){returned}"
    if len(short) <= 88:
        return short
    return "\n".join([f"{tree.name}(", *(f"    {part}," for part in parts), f"){returned}"])


def fields(x, tree):
    """The fields of a dataclass with their comments, or how a class is made."""
    lines = textwrap.dedent(inspect.getsource(x)).split("\n")
    rows = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    if rows:
        return textwrap.dedent("\n".join(lines[rows[0].lineno - 1 : rows[-1].end_lineno]))
    made = [node for node in tree.body if getattr(node, "name", "") == "__init__"]
    if not made:
        return ""
    made[0].name, made[0].args.args = x.__name__, made[0].args.args[1:]
    return signature(made[0])


def prose(x):
    """A docstring as Markdown: sections in bold, entries as lists, examples fenced."""
    text, out = inspect.cleandoc(x.__doc__), []
    for block in text.split("\n\n"):
        first = block.split("\n")[0]
        if block.startswith(">>>"):
            out.append(fenced(block, "pycon"))
        elif re.fullmatch(r"[A-Z]\w+:", first):
            rest = textwrap.dedent(block.removeprefix(first + "\n"))
            out.append(f"**{first.removesuffix(':')}**\n\n{escaped(listed(rest))}\n")
        else:
            out.append(f"{block if block.startswith('    ') else escaped(block)}\n")
    return "\n".join(out)


def listed(text):
    """The entries of a section as a list; a section of plain sentences as it is."""
    if not ENTRY.match(text):
        return text
    lines = text.split("\n")
    return "\n".join(f"- {x}" if ENTRY.match(x) else f"  {x.strip()}" for x in lines)


def escaped(text):
    """The text without Markdown's own meaning of stars; what is in backticks is left alone."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(x if x.startswith("`") else x.replace("*", r"\*") for x in parts)


def fenced(text, kind):
    return f"```{kind}\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page())
