"""One call of an operator: taken from the caller, and as every implementation gets it."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kda_contracts import ContractError, Operand, check
from kda_jax import pools

# What public functions take. A pool is an array, or a jax.Ref that is updated in place.
Array = jax.Array | np.ndarray
Pool = Array | jax.Ref
Implementation = Literal["auto", "mosaic_gpu", "triton", "xla"]


@dataclass(frozen=True)
class Maths:
    """The static options of the recurrence.

    With `activated`, `a` is the log decay and `b` is beta, and the options of the gates mean
    nothing.
    """

    scale: float
    use_qk_l2norm: bool
    lower_bound: float | None = None
    softplus_beta: float = 1.0
    softplus_threshold: float = 20.0
    allow_neg_eigval: bool = False
    activated: bool = False


def maths_of(K, *, activated=False, **options) -> Maths:
    """The static options by their public names; what is None or absent has its default."""
    given = {name: x for name, x in options.items() if x is not None}
    return Maths(
        scale=float(given.get("scale", K**-0.5)),
        use_qk_l2norm=bool(given.get("use_qk_l2norm_in_kernel", False)),
        lower_bound=float(given["lower_bound"]) if "lower_bound" in given else None,
        softplus_beta=float(given.get("softplus_beta", 1.0)),
        softplus_threshold=float(given.get("softplus_threshold", 20.0)),
        allow_neg_eigval=bool(given.get("allow_neg_eigval", False)),
        activated=activated,
    )


@dataclass(frozen=True)
class Static:
    """What is static in a call: it becomes part of the program.

    `packed`: q, k and v are one flat row, passed three times, in which each has columns of its own.
    """

    op: str  # the start of the inner jit's name and of the kernel's
    sizes: Any  # kda_contracts.Sizes, T and N included, for a packed row too
    maths: Maths
    out_dtype: Any
    packed: bool = False
    update_state: bool = True
    intermediate: bool = False
    every: int | None = None  # tokens from one checkpoint to the next
    clears: bool = True  # whether tokens of no live sequence give zeros; else anything
    reads: bool = True  # whether `out` is asked for; else it may be None, and q anything

    @property
    def columns(self):
        """Where q, k and v begin in their rows."""
        keys = self.sizes.H * self.sizes.K
        return (0, keys, 2 * keys) if self.packed else (0, 0, 0)

    @property
    def empty(self):
        """Whether there is nothing to compute."""
        s = self.sizes
        return 0 in (s.B, s.T, s.N, s.S, s.V)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """The operands of a call, in one shape for all operators; None for one that is not there.

    q, k and v of a packed call are all the flat row, `[B, T, 2*H*K+HV*V]`.
    """

    q: Annotated[Any, "B T H K"] = None
    k: Annotated[Any, "B T H K"] = None
    v: Annotated[Any, "B T HV V"] = None
    a: Annotated[Any, "B T HV K"] = None
    b: Annotated[Any, "B T HV"] = None
    A_log: Annotated[Any, "HV"] = None
    dt_bias: Annotated[Any, "HV*K"] = None
    pool: Annotated[Any, "S HV V K"] = None  # an array or a Ref
    slots: Annotated[Any, "N"] = None
    sources: Annotated[Any, "N"] = None
    cu_seqlens: Annotated[Any, "N+1"] = None
    writes: Annotated[Any, "B T"] = None
    lengths: Annotated[Any, "N"] = None  # how many of a sequence's tokens are run; None: all
    checkpoints: Annotated[Any, "N M"] = None


INDICES = ("slots", "sources", "cu_seqlens", "writes", "lengths", "checkpoints")


def nothing(static, pool):
    """`(out, pool)` of a call in which there is nothing to compute."""
    s = static.sizes
    return jnp.zeros((s.B, s.T, s.HV, s.V), static.out_dtype), pools.unchanged(pool)


def _shape(name, static):
    """The shape of an operand in letters."""
    if static.packed and name in ("q", "k", "v"):
        return "B T 2*H*K+HV*V"
    return Operands.__annotations__[name].__metadata__[0]


def implementation(function, name):
    """`function(operands, *, static, **options)` as an inner jit of this name.

    One lowering serves all call sites, and tests and profilers find the name in the program. The
    operands may come in any shape that the contract lets pass; the function gets them in one.
    """

    def call(operands, *, static, **options):
        operands = _in_one_shape(operands, static)
        assert_operands(operands, static)
        return function(operands, static=static, **options)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, static_argnames=("static", "config"))


def _in_one_shape(operands, static):
    """The operands in the shapes of `Operands`; rates and biases that are None as zeros."""
    sizes, reshaped = static.sizes, {}
    for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias"):
        x = getattr(operands, name)
        shape = Operand(name, _shape(name, static), (), "").shape(vars(sizes))
        if x is None:
            x = jnp.zeros(shape, jnp.float32)
        reshaped[name] = x if x.shape == shape else x.reshape(shape)
    return dataclasses.replace(operands, **reshaped)


def assert_operands(operands, static):
    """What an implementation relies on after the contract: a failure here is our own mistake.

    Symbolic sizes are not compared, and neither is an operand that is None.
    """
    for name, array in vars(operands).items():
        if array is None:
            continue
        if name in INDICES:
            chex.assert_type(array, jnp.int32)
        shape = Operand(name, _shape(name, static), (), "").shape(vars(static.sizes))
        chex.assert_shape(array, tuple(size if isinstance(size, int) else None for size in shape))


def taken(contract, arrays, **options):
    """`(arrays, sizes)` of a public call, after its contract.

    A NumPy array comes back C-contiguous and of native byte order: how an operand lies in memory
    is JAX's business here.
    """
    arrays = without_layout(arrays)
    sizes = check(contract, **arrays, **options)
    _require_arrays(contract, arrays)
    return arrays, sizes


def without_layout(arrays):
    """NumPy arrays made C-contiguous and of native byte order."""
    return {
        name: np.asarray(x, dtype=x.dtype.newbyteorder("="), order="C")
        if isinstance(x, np.ndarray)
        else x
        for name, x in arrays.items()
    }


def _require_arrays(contract, arrays):
    """Raises for what has a shape and a dtype, as the contract wants, and still is no operand."""
    for name, x in arrays.items():
        is_pool = name == contract.pool
        if x is None or isinstance(x, (jax.Array, np.ndarray)) or (is_pool and pools.is_ref(x)):
            continue
        if isinstance(x, jax.ShapeDtypeStruct):
            hint = "it has a shape and no values; kda_jax.explain takes it"
        elif pools.is_ref(x):
            hint = "only the pool may be a jax.Ref: read the values first, with x[...]"
        elif is_pool and hasattr(x, "ref"):
            hint = "a view of a jax.Ref is not supported: pass the whole Ref"
        else:
            hint = "convert it first, e.g. with jnp.asarray or jax.dlpack.from_dlpack"
        raise ContractError(
            f"{contract.name}: `{name}` must be an array (got {type(x).__name__}): {hint}"
        )


def explicit_cut(x):
    """The PartitionSpec of an operand whose type shows a cut, by mesh axes of the type Explicit.

    None for one that is whole, or where the type shows nothing: an axis of the type Auto.
    """
    if not isinstance(x, (jax.Array, jax.Ref)):
        return None
    aval = jax.typeof(x)
    sharding = getattr(getattr(aval, "inner_aval", aval), "sharding", None)
    spec = getattr(sharding, "spec", ())
    return spec if any(spec) else None


def explicit_obstacle(name):
    """Why an operand cut so is not for a kernel, and not for a call with a Ref."""
    return (
        f"`{name}` is cut by Explicit mesh axes, where a kernel and a jax.Ref cannot run: "
        "wrap the call in jax.shard_map(..., check_vma=False); or let XLA run it "
        "(implementation='xla'), with an array for the pool or with a mesh of "
        "axis_types=(jax.sharding.AxisType.Auto,)"
    )


def is_cut(arrays):
    """Whether one of the operands is cut by Explicit mesh axes."""
    return any(explicit_cut(x) is not None for x in arrays.values())


def in_auto_axes(function, name, arrays, specs) -> Any:
    """`function(**arrays)` where `is_cut(arrays)`: the compiler cuts what is inside, as it likes.

    Args:
      function: returns an array, or a tuple of arrays.
      name: the operator's, for the error.
      specs: how each result is cut, a PartitionSpec or None for one that is whole.

    Raises:
      NotImplementedError: an operand is a Ref, which keeps the type that it was made with.
    """
    first = next(x for x, array in arrays.items() if explicit_cut(array) is not None)
    if any(map(pools.is_ref, arrays.values())):
        raise NotImplementedError(f"{name}: {explicit_obstacle(first)}")
    cut = arrays[first]
    # Outside jit the devices are told: a result may depend on no operand that has them.
    mesh = (jax.typeof(cut) if isinstance(cut, jax.core.Tracer) else cut).sharding.mesh
    shardings = tuple(NamedSharding(mesh, P() if spec is None else spec) for spec in specs)
    inside: Any = jax.sharding.auto_axes(
        lambda arrays: function(**arrays),
        axes=jax.typeof(cut).sharding.mesh.explicit_axes,
        out_sharding=shardings if len(shardings) > 1 else shardings[0],
    )
    return inside(arrays)


def result_cuts(contract, arrays, *further):
    """How each result of a contract is cut, and `further` ones, whose axes are text, behind them.

    As the operand of the same axes: the pool as the pool. Where there is none, each axis as the
    first operand that is cut in an axis of the same text; no mesh axis twice.
    """
    specs = []
    for axes in (*(result.axes for result in contract.results), *further):
        like = [operand.name for operand in contract.operands if operand.axes == axes]
        like = [name for name in like if arrays.get(name) is not None]
        specs.append(
            explicit_cut(arrays[like[0]]) if like else _cut_by_axis(axes, contract, arrays)
        )
    return tuple(specs)


def _cut_by_axis(axes, contract, arrays):
    cuts: dict[str, Any] = {}
    for operand in contract.operands:
        spec, named = explicit_cut(arrays.get(operand.name)), operand.axes.split()
        # An operand that may come in other shapes says nothing of its axes.
        if spec is None or operand.also or arrays[operand.name].ndim != len(named):
            continue
        for axis, cut in zip(named, spec, strict=False):
            if axis in axes.split() and axis not in cuts and cut and not _shared(cut, cuts):
                cuts[axis] = cut
    return P(*(cuts.get(axis) for axis in axes.split()))


def _shared(cut, cuts):
    """Whether one of the mesh axes of a cut is in another one already."""
    used = jax.tree.leaves(list(cuts.values()))
    return any(axis in used for axis in jax.tree.leaves(cut))
