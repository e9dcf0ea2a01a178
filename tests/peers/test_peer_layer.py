"""Against FLA's own layer, KimiDeltaAttention, on a GPU where torch and FLA are installed."""

import dataclasses
import importlib
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ON_GPU, assert_near

import kda_jax

# FLA and what it imports warn of other devices and versions. What is ours or JAX's stays an error.
pytestmark = [
    pytest.mark.peer,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore", r"error:::(kda_jax|kda_contracts|jax|tests|test_peer)"),
]
B, D, STEPS = 2, 80, 16
SIZES = {"grouped": dict(H=2, HV=6, K=64, V=32), "equal": dict(H=3, HV=3, K=64, V=64)}
SLOTS = np.array([3, 1], np.int32)
# Prompt, limit: up to 64 tokens FLA is float32, with the GPU's approximate exp2 and log2; above
# that its products are TF32.
PATHS = {"recurrent": (60, 3e-5), "chunk": (100, 3e-3)}
PREFILL = jax.jit(kda_jax.kda_prefill, static_argnames="config", donate_argnames="cache")
DECODE = jax.jit(kda_jax.kda_decode, static_argnames="config", donate_argnames="cache")


@pytest.fixture
def fla_layer(monkeypatch):
    """FLA's layer class."""
    if not ON_GPU:
        pytest.skip("needs a GPU")
    pytest.importorskip("torch")
    pytest.importorskip("fla.modules")
    if (
        "fla.layers" not in sys.modules
    ):  # without transformers: the package's own import needs it, this layer does not
        if (spec := importlib.util.find_spec("fla.layers")) is None:
            pytest.skip("needs flash-linear-attention: fla-core alone has no layers")
        monkeypatch.setitem(sys.modules, "fla.layers", importlib.util.module_from_spec(spec))
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(autotuner, "run", run_first_config)
    return importlib.import_module("fla.layers.kda").KimiDeltaAttention


def run_first_config(self, *args, **kwargs):
    """Autotuner.run without the tuning, which takes minutes and would write to the disk."""
    return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())


class Cache(list):
    """What the layer asks of its cache: a list of the layers' states.

    FLA's own class needs transformers.
    """

    def update(self, layer_idx, offset, **state):
        self[layer_idx:] = [state]


def config_of(sizes, lower_bound):
    return kda_jax.KDAConfig(
        D=D, **sizes, lower_bound=lower_bound, norm_eps=1e-3, gate_rank=sizes["V"]
    )


def random_params(config, biased):
    """Weights as FLA's layer has them: a forget gate of rank V, and a bias in the output gate."""
    rng = np.random.default_rng(5)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))

    c = config
    return dataclasses.replace(
        kda_jax.init_params(c, jax.random.key(5), dtype=jnp.float32),
        f_down=normal(c.D, c.V) * c.D**-0.5,
        f_up=normal(c.V, c.HV * c.K) * c.V**-0.5,
        dt_bias=normal(c.HV * c.K) * 2.0
        - 4.0,  # channels that forget at once, and such as hold on for all tokens
        norm=normal(c.V) * 0.25 + 1.0,
        g_bias=normal(c.HV * c.V) if biased else None,
    )


def named_for_fla(params):
    """The weights by FLA's names; a torch Linear is [out, in]."""
    linear = dict(
        q_proj=params.q_proj, k_proj=params.k_proj, v_proj=params.v_proj, b_proj=params.b_proj
    )
    linear |= {
        "f_proj.0": params.f_down,
        "f_proj.1": params.f_up,
        "g_proj.0": params.g_down,
        "g_proj.1": params.g_up,
    }
    weights = {f"{name}.weight": x.T for name, x in (linear | dict(o_proj=params.o_proj)).items()}
    weights |= {f"{name}_conv1d.weight": getattr(params, f"{name}_conv")[:, None] for name in "qkv"}
    weights |= {"A_log": params.A_log, "dt_bias": params.dt_bias, "o_norm.weight": params.norm}
    bias = jnp.zeros(params.g_up.shape[1]) if params.g_bias is None else params.g_bias
    return weights | {"g_proj.1.bias": bias}


def by_fla(layer_class, weights, config, safe_gate, x, prompt):
    """`(outputs, convolution's inputs, states)` of FLA's layer: the prompt at once, then tokens."""
    import torch

    layer = layer_class(
        hidden_size=config.D,
        expand_v=config.V / config.K,
        head_dim=config.K,
        num_heads=config.H,
        num_v_heads=config.HV,
        safe_gate=safe_gate,
        lower_bound=config.lower_bound,
        layer_idx=0,
        norm_eps=config.norm_eps,
    )
    layer.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in weights.items()})
    layer = layer.cuda().eval()
    cache = Cache()
    pieces = torch.tensor_split(torch.from_numpy(x).cuda(), tuple(range(prompt, x.shape[1])), dim=1)
    with torch.no_grad():  # otherwise every call is taken in chunks
        outputs = [layer(piece, past_key_values=cache, use_cache=True)[0] for piece in pieces]
    windows = torch.cat(cache[0]["conv_state"], 1)[
        :, :, 1:
    ]  # FLA keeps W inputs, of which the first is not needed
    return [y.cpu().numpy() for y in (torch.cat(outputs, 1), windows, cache[0]["recurrent_state"])]


def by_kda_jax(params, config, x, prompt):
    """The same of ours, from other slots of a larger cache."""
    cache, slots = kda_jax.init_cache(config, 5, conv_dtype=jnp.float32), jnp.asarray(SLOTS)
    tokens, cu_seqlens = jnp.asarray(x[:, :prompt].reshape(-1, D)), jnp.arange(B + 1) * prompt
    y, cache = PREFILL(params, tokens, cache, slots, cu_seqlens, config=config)
    outputs = [y.reshape(B, prompt, D)]
    for token in range(prompt, x.shape[1]):
        y, cache = DECODE(params, jnp.asarray(x[:, token]), cache, slots, config=config)
        outputs.append(y[:, None])
    return jnp.concatenate(outputs, 1), cache.conv[SLOTS], cache.state[SLOTS]


def compare(layer_class, path, size, lower_bound, safe_gate, biased):
    prompt, limit = PATHS[path]
    config = config_of(SIZES[size], lower_bound)
    params = random_params(config, biased)
    x = np.random.default_rng(6).standard_normal((B, prompt + STEPS, D), dtype=np.float32)
    wanted = by_fla(layer_class, named_for_fla(params), config, safe_gate, x, prompt)
    for got, expected in zip(by_kda_jax(params, config, x, prompt), wanted, strict=True):
        assert_near(got, expected, limit)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("size", "lower_bound", "safe_gate"),
    [("grouped", None, False), ("equal", -5.0, False), ("grouped", -5.0, True)],
)
def test_the_layer_equals_flas(fla_layer, size, lower_bound, safe_gate, path):
    compare(fla_layer, path, size, lower_bound, safe_gate, biased=True)


def test_without_the_bias_as_the_released_models_are(fla_layer):
    compare(fla_layer, "recurrent", "equal", None, safe_gate=False, biased=False)
