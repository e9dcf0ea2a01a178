"""What JAX's transformations may do with a kernel that updates a Ref: identities that a transformation sees."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def inference_only(operands):
    """The operands unchanged; differentiating through them raises."""
    return operands


@inference_only.defjvp
def _refuse_derivative(primals, tangents):
    raise NotImplementedError(
        "kda_jax.packed_decode: its kernels are inference only and have no derivative; "
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
    """The slots unchanged; raises under a vmap that maps an operand and leaves the Ref shared: its rows would race."""
    return slots


@ref_must_be_mapped.def_vmap
def _refuse_shared_ref(axis_size, mapped, ref, slots, *operands):
    if not mapped[0]:
        raise NotImplementedError(
            "kda_jax.packed_decode: under vmap this Ref is not mapped, so that all elements would update it at once. "
            "Map the Ref too, pass an array instead, or make the mapped axis rows of one batch"
        )
    if not mapped[1]:
        slots = jnp.broadcast_to(slots, (axis_size, *slots.shape))
    return slots, True
