"""Padded and out-of-range rows around the 4 GiB edge of a pool, for a memory checker on a GPU.

compute-sanitizer --tool memcheck python tests/helpers/memcheck.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import kda_jax
from kda_contracts import Sizes
from kda_jax.tools.synthetic import random_operands

EDGE = 2**32 // (32 * 128 * 128 * 4)  # the first slot beyond 4 GiB
SIZES = Sizes(B=8, H=32, HV=32, K=128, V=128, S=EDGE + 3)

x = {
    name: jnp.asarray(array)
    for name, array in random_operands(Sizes(**vars(SIZES) | {"S": 1})).items()
}
slots = [EDGE - 1, EDGE, EDGE + 2, EDGE + 3, -1, 2**31 - 1, -(2**31), 0]
x["ssm_state_indices"] = jnp.array(slots, jnp.int32)
del x["initial_state"]
# Sequences of 0 to 9 tokens, drafts for slots inside and outside the pool, a boundary behind the
# tokens.
TOKENS = 20
BOUNDS = jnp.array([0, 9, 9, 10, 16, 16, 17, 18, 30], jnp.int32)
DRAFTS = (
    (jnp.arange(TOKENS, dtype=jnp.int32) * 2 + EDGE - 60)
    .at[:2]
    .set(jnp.array([-1, EDGE + 5]))[None]
)
for implementation in ("mosaic_gpu", "triton"):
    for sources in (None, jnp.array([5, -1, EDGE + 1, 0, 1, 2, 3, EDGE + 9], jnp.int32)):
        if kda_jax.explain(
            **x, initial_state=jax.ShapeDtypeStruct((SIZES.S, 32, 128, 128), jnp.float32)
        ).reasons[implementation] not in (None, "mosaic_gpu comes first"):
            continue
        step = jax.jit(
            lambda pool, sources, name=implementation: kda_jax.packed_decode(
                **x, initial_state=pool, source_indices=sources, implementation=name
            ),
            donate_argnums=0,
        )
        out, pool = step(jnp.ones((SIZES.S, 32, 128, 128)), sources)
        assert np.asarray(out).any((1, 2, 3)).nonzero()[0].tolist() == [0, 1, 2, 7]
        assert bool((pool[1:-4] == 1).all())
        print(implementation, "sources" if sources is not None else "no sources", "ran", flush=True)
    normal = jax.random.normal(jax.random.key(0), (4, 1, TOKENS, 32, 128), jnp.bfloat16)
    verify = jax.jit(
        lambda pool, q, k, v, a, name=implementation: kda_jax.fused_sigmoid_gating_kda_update(
            x["A_log"],
            x["dt_bias"],
            *(q, k, v, a, a[..., 0]),
            pool,
            x["ssm_state_indices"],
            cu_seqlens=BOUNDS,
            intermediate_states=DRAFTS,
            implementation=name,
        ),
        donate_argnums=0,
    )
    jax.block_until_ready(verify(pool, *normal))
    print(implementation, "several tokens ran", flush=True)
