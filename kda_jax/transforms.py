"""Identity functions with rules of their own for grad, vmap and meshes."""

import jax
import jax.numpy as jnp


def unfused(arrays):
    """The arrays unchanged, kept out of XLA's dynamic-slice fusion, at no cost.

    With a slice of a stacked pool in front of a kernel that updates it in place, and its write-back
    behind it, XLA (JAX 0.11.2, H200) fuses the three and returns wrong states without a word,
    unless both sides are kept apart (benchmarks/stacked_pools.py repeats it). The
    test of stacked pools fails where this is left out. A slice of any other operand, such as one
    layer's `dt_bias` of a stack, would put the kernel into such a fusion too.
    """
    return jax.lax.optimization_barrier(arrays)


def varying_axes(x):
    """The mesh axes over which an operand varies: under `shard_map` with `check_vma=True` alone."""
    aval = jax.typeof(x)
    axes = getattr(getattr(aval, "inner_aval", aval), "manual_axis_type", None)
    return frozenset(getattr(axes, "varying", None) or ())


def varying_as(x, *operands):
    """x unchanged, typed to meet the operands under `shard_map` with `check_vma=True`.

    It varies over every mesh axis over which one of them varies. The first carry of a loop needs
    it: a state that was made inside, such as `jnp.zeros`, varies over none. None among the operands
    is passed over.
    """
    axes = frozenset().union(*(varying_axes(y) for y in operands if y is not None))
    axes = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, axes, to="varying") if axes else x


@jax.custom_jvp
def inference_only(operands):
    """The operands unchanged; differentiating through them raises."""
    return operands


@inference_only.defjvp
def _refuse_derivative(primals, tangents):
    raise NotImplementedError(
        "kda_jax: the kernels are inference only and have no derivative; "
        "implementation='xla' differentiates"
    )


@jax.custom_batching.custom_vmap
def pool_as_mapped(pool, *operands):
    """The pool unchanged; under vmap, a pool of its own for each element that any operand has."""
    return pool


@pool_as_mapped.def_vmap
def _copy_unmapped_pool(axis_size, mapped, pool, *operands):
    if not mapped[0]:
        pool = jnp.broadcast_to(pool, (axis_size, *pool.shape))
    return pool_as_mapped(pool, *operands), True


@jax.custom_batching.custom_vmap
def ref_must_be_mapped(ref, slots, *operands):
    """The slots unchanged; raises under a vmap that maps an operand and leaves the Ref shared.

    Its elements would race.
    """
    return slots


@ref_must_be_mapped.def_vmap
def _refuse_shared_ref(axis_size, mapped, ref, slots, *operands):
    if not mapped[0]:
        raise NotImplementedError(
            "kda_jax: under vmap this Ref is not mapped, so that all elements would update it at "
            "once. Map the Ref too, pass an array instead, or make the mapped axis rows of one "
            "batch"
        )
    if not mapped[1]:
        slots = jnp.broadcast_to(slots, (axis_size, *slots.shape))
    return slots, True


def refuse_vmap_of_ref(ref, *operands):
    """Raises under any vmap: for a kernel without a batching rule, and so without one for a Ref."""
    _no_vmap(ref, *operands)


@jax.custom_batching.custom_vmap
def _no_vmap(ref, *operands):
    return operands[0]


@_no_vmap.def_vmap
def _refuse_vmap(axis_size, mapped, ref, *operands):
    raise NotImplementedError(
        "kda_jax: under vmap the Triton kernel takes no Ref; pass an array pool, or use "
        "implementation='xla'"
    )


def with_transforms_of(plain, kernel, keeping, gradients, named=lambda kept: kept):
    """`kernel` of arrays, with a derivative of its own and with `plain` under vmap.

    plain: the same in XLA. keeping: `(results, kept)`, the results again and what the derivative
    needs. gradients: `(kept, cotangents)` to those of all operands, None for integers. Under vmap
    the last two are a loop. named: gives what is kept the names that `jax.checkpoint` goes by.
    Forward mode is refused, by JAX.
    """
    batched = in_xla_under_vmap(plain, kernel)
    looped = loop_over_mapped(keeping)

    def forward(*operands):
        results, kept = looped(*operands)
        return results, named(kept)  # here, where jax.checkpoint sees it

    differentiable = jax.custom_vjp(lambda *operands: batched(*operands))
    differentiable.defvjp(forward, loop_over_mapped(gradients))
    return differentiable


def with_derivative_of(differentiable, function, floats, others):
    """`function` of arrays; where it is differentiated, `differentiable`, the same another way.

    Of the operands the first `floats` may have a derivative, the `others` have none. Forward mode
    is refused, by JAX.
    """

    def forward(*operands):
        first, rest = operands[:floats], operands[floats:]
        return jax.vjp(lambda *first: differentiable(*first, *rest), *first)

    def backward(pull, cotangents):
        return *pull(cotangents), *(None,) * others

    either = jax.custom_vjp(lambda *operands: function(*operands))
    either.defvjp(forward, backward)
    return either


def in_xla_under_vmap(plain, kernel):
    """`kernel` of arrays, and under vmap `plain`, the same in XLA."""
    batched = jax.custom_batching.custom_vmap(kernel)

    @batched.def_vmap
    def rule(axis_size, mapped, *operands):
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped)
        results = jax.vmap(plain, in_axes=axes, axis_size=axis_size)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return batched


def loop_over_mapped(function):
    """`function` of arrays; under vmap a loop, each element with a copy of what is not mapped."""
    looped = jax.custom_batching.custom_vmap(function)

    @looped.def_vmap
    def rule(axis_size, mapped, *operands):
        def each(x, is_mapped):
            return x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))

        results = jax.lax.map(lambda xs: looped(*xs), jax.tree.map(each, operands, tuple(mapped)))
        return results, jax.tree.map(lambda _: True, results)

    return looped
