"""Against transformers' own models, on a CPU: tiny ones with random weights, as it saves them.

`save_pretrained` writes a folder, kda_jax loads it, and each KDA layer is fed what a hook caught as
that module's input in the whole model's forward.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_near, assert_same_bits

import kda_jax
from kda_contracts import cli

pytestmark = pytest.mark.peer_cpu
LIMIT = 5e-6  # both sides round their float32 sums in their own order
PROMPT, STEPS, SHORT, CUT = 66, 4, 9, 30  # tokens; a chunk of the prefill has 64
SLOTS, SLOT = 5, 3  # others than the first must stay as they are

# Small, and all different: what is cut, read or transposed along the wrong axis does not fit. The
# ranks of the last test need four heads.
SHARED = dict(
    vocab_size=61,
    intermediate_size=28,
    moe_intermediate_size=20,
    num_hidden_layers=5,
    kv_lora_rank=18,
    qk_nope_head_dim=10,
    v_head_dim=14,
    num_local_experts=3,
    num_experts_per_tok=2,
    pad_token_id=None,
    eos_token_id=None,
)
# family: (its module in transformers.models, config class, model class, the config's keywords)
FAMILIES = {
    "kimi": (
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        dict(hidden_size=56, num_attention_heads=2, num_key_value_heads=2, qk_rope_head_dim=6)
        | dict(linear_num_heads=4, linear_head_dim=16, linear_conv_kernel_dim=3),
    ),
    "ling": (
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        dict(hidden_size=40, num_attention_heads=4, num_key_value_heads=4, qk_rope_head_dim=6)
        | dict(head_dim=24, short_conv_kernel_size=5, layer_group_size=3, n_group=1, topk_group=1),
    ),
    "glm": (
        "glm5_next",
        "Glm5NextTextConfig",
        "Glm5NextTextModel",
        dict(hidden_size=48, num_attention_heads=2, num_key_value_heads=2, qk_rope_head_dim=0)
        | dict(linear_num_heads=8, linear_head_dim=12, linear_conv_kernel_dim=4, q_lora_rank=22)
        | dict(index_n_heads=2, index_head_dim=26, index_topk=16, index_kpool=16),
    ),
}
LISTED = ["full_attention", "linear_attention", "linear_attention"] * 2
VARIANTS = {
    "kimi": ("kimi", {}),
    "ling": ("ling", {}),
    "glm": ("glm", {}),
    "kimi, full attention elsewhere": ("kimi", dict(layer_types=LISTED[:5])),
    "ling, softplus gate": ("ling", dict(kda_safe_gate=False)),
    "glm, softplus gate": ("glm", dict(linear_lower_bound=None)),
}
PREFILL = jax.jit(kda_jax.kda_prefill, static_argnames=("config", "implementation"))
DECODE = jax.jit(kda_jax.kda_decode, static_argnames=("config", "implementation"))


@dataclass
class Saved:
    """A model, the folder that transformers wrote, and what went in and out of its KDA layers.

    `long` has a prompt and single tokens after it, `short` one prompt: {layer: [(x, y), ...]}.
    """

    model: Any
    folder: Path
    long: dict
    short: dict

    @property
    def kda(self):
        types = self.model.config.layer_types
        return [i for i, kind in enumerate(types) if kind == "linear_attention"]

    def module(self, layer):
        return stack(self.model)[layer].self_attn


@pytest.fixture(autouse=True)
def on_the_cpu():
    """A host with a GPU runs these on its CPU, too: there the sums are float32."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.24")  # the first with all three models
    for package in ("fla", "causal_conv1d"):
        if importlib.util.find_spec(package):
            pytest.skip(f"transformers would run the GPU kernels of {package}, not its own code")
    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request, torch, tmp_path_factory):
    return save(torch, tmp_path_factory.mktemp("saved"), *VARIANTS[request.param])


@pytest.fixture(scope="module", params=FAMILIES)
def default(request, torch, tmp_path_factory):
    """A model of each family, as its config's defaults have it."""
    return save(torch, tmp_path_factory.mktemp("default"), request.param, {})


def save(torch, folder, family, options):
    model = random_model(torch, family, options)
    model.save_pretrained(folder)
    tokens = torch.randint(0, SHARED["vocab_size"], (1, PROMPT + STEPS))
    pieces = [tokens[:, :PROMPT], *tokens[:, PROMPT:].split(1, dim=1)]
    long, short = caught(torch, model, pieces), caught(torch, model, [tokens[:, :SHORT].flip(1)])
    return Saved(model, folder, long, short)


def random_model(torch, family, options):
    """A model whose every weight matters: its own start has gates that hardly move, norms of 1."""
    name, config, model, sizes = FAMILIES[family]
    package = f"transformers.models.{name}"
    config = getattr(importlib.import_module(f"{package}.configuration_{name}"), config)
    model = getattr(importlib.import_module(f"{package}.modeling_{name}"), model)
    torch.manual_seed(7)
    model = model(config(**SHARED, **sizes, **options)).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("A_log"):
                x.copy_(torch.empty_like(x).uniform_(1, 16).log())
            elif name.endswith("dt_bias"):
                x.normal_(-2.0, 1.0)
            elif x.ndim == 1:  # a norm's weight, or a bias
                x.add_(0.25 * torch.randn_like(x))
            else:
                # Short queries and keys: the epsilon under their length counts.
                scale = 0.1 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                x.normal_(0.0, scale * x.shape[-1] ** -0.5)
    return model


def stack(model):
    return getattr(model, "model", model).layers


def caught(torch, model, pieces):
    """{layer: [(x, y), ...]}: what the KDA layers take and return, when the model runs the pieces
    one after another with its cache.
    """
    cache_class = importlib.import_module("transformers").DynamicCache
    kda = [i for i, x in enumerate(model.config.layer_types) if x == "linear_attention"]
    seen: dict = {layer: [] for layer in kda}

    def keep(layer):
        def hook(module, args, kwargs, y):
            x = args[0] if args else kwargs["hidden_states"]
            seen[layer].append((x[0].numpy().copy(), y[0].numpy().copy()))

        return hook

    hooks = [
        stack(model)[i].self_attn.register_forward_hook(keep(i), with_kwargs=True) for i in kda
    ]
    cache = cache_class(config=model.config)
    with torch.no_grad():
        for piece in pieces:
            model(input_ids=piece, cache=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return seen


def prefill(params, x, cache, slots, bounds, config):
    slots, bounds = jnp.asarray(slots, jnp.int32), jnp.asarray(bounds, jnp.int32)
    x = jnp.asarray(x)
    return PREFILL(params, x, cache, slots, bounds, config=config, implementation="xla")


def by_kda_jax(config, parts, pieces):
    """The outputs of one sequence that comes in pieces, summed over the ranks' parts."""
    total = np.zeros((sum(map(len, pieces)), config.D))
    for part in parts:
        cache = kda_jax.init_cache(config, SLOTS, ranks=len(parts), params=part)
        outputs = []
        for x in pieces:
            if len(x) == 1:
                slots = jnp.array([SLOT])
                options = dict(config=config, implementation="xla")
                y, cache = DECODE(part, jnp.asarray(x), cache, slots, **options)
            else:
                y, cache = prefill(part, x, cache, [SLOT], [0, len(x)], config)
            outputs.append(np.asarray(y))
        total += np.concatenate(outputs)
    return total


def joined(pairs):
    """The inputs piece by piece, and all outputs end to end."""
    return [x for x, _ in pairs], np.concatenate([y for _, y in pairs])


def weights_of(module):
    """A module's weights by KDAParams' names, as `x @ w` takes them."""
    gate, wide = module.forget_gate, module.qkv_dim
    q_conv, k_conv, v_conv = module.conv1d.weight[:, 0].split(wide)
    weights = dict(q_conv=q_conv, k_conv=k_conv, v_conv=v_conv, norm=module.o_norm.weight)
    weights |= {name: getattr(module, name).weight.T for name in ("q_proj", "k_proj", "v_proj")}
    weights |= {name: getattr(module, name).weight.T for name in ("b_proj", "o_proj")}
    # A_log and dt_bias are float32 when they are loaded, whatever they were.
    weights |= dict(A_log=gate.A_log.flatten().float(), dt_bias=gate.dt_bias.float())
    if hasattr(gate, "f_proj"):  # full gates
        return weights | dict(f_up=gate.f_proj.weight.T, g_up=module.g_proj.weight.T)
    weights |= dict(f_down=gate.f_a_proj.weight.T, f_up=gate.f_b_proj.weight.T)
    return weights | dict(g_down=module.g_a_proj.weight.T, g_up=module.g_b_proj.weight.T)


def assert_loads(folder, model):
    """All KDA layers of a folder have the bits of the model's modules, and no weight besides."""
    config, layers = kda_jax.load_layers(folder, progress=False)
    types = model.config.layer_types
    assert list(layers) == [i for i, kind in enumerate(types) if kind == "linear_attention"]
    for layer, params in layers.items():
        wanted = weights_of(stack(model)[layer].self_attn)
        got = {name: x for name, x in vars(params).items() if x is not None}
        assert got.keys() == wanted.keys()
        for name, x in wanted.items():
            assert got[name].dtype.name == str(x.dtype).removeprefix("torch.")
            # float32 holds every bfloat16, and NumPy has no bfloat16 of torch's.
            bits = x.detach().float().numpy()
            assert_same_bits(np.asarray(got[name]).astype(np.float32), bits)
    return config


def check(folder):
    """(exit code, the report) of the command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main(["check", str(folder), "--json"])
    return code, json.loads(printed.getvalue())


def test_the_command_finds_the_kda_layers_of_layer_types(saved):
    code, report = check(saved.folder)
    assert code == 0
    assert [layer["index"] for layer in report["layers"]] == saved.kda
    assert 0 < len(saved.kda) < len(saved.model.config.layer_types)


def test_the_config_and_the_weights_are_the_models_own(saved):
    config, c, bound = assert_loads(saved.folder, saved.model), saved.model.config, None
    if hasattr(c, "kda_safe_gate"):
        bound = c.kda_lower_bound if c.kda_safe_gate else None
    elif hasattr(c, "linear_lower_bound"):
        bound = c.linear_lower_bound
    K, full = c.linear_head_dim, hasattr(saved.module(saved.kda[0]), "g_proj")
    assert config == kda_jax.KDAConfig(
        D=c.hidden_size,
        H=c.linear_num_heads,
        HV=c.linear_num_heads,
        K=K,
        V=K,
        W=c.linear_conv_kernel_dim,
        lower_bound=bound,
        norm_eps=c.rms_norm_eps,
        gate_rank=None if full else K,
        forget_rank=None if full else K,
    )


def test_config_from_hf_reads_what_load_layer_does(saved):
    """`load_layer` sees by the tensors whether a gate is full; here the config has to tell."""
    config, _ = kda_jax.load_layer(saved.folder, saved.kda[0])
    assert kda_jax.config_from_hf(saved.model.config.to_dict()) == config


def test_prefill_and_decode_equal_the_modules_output(saved):
    config, layers = kda_jax.load_layers(saved.folder, progress=False)
    for layer, params in layers.items():
        pieces, wanted = joined(saved.long[layer])
        assert [len(x) for x in pieces] == [PROMPT] + [1] * STEPS
        got = by_kda_jax(config, [params], pieces)
        assert_near(got[:PROMPT], wanted[:PROMPT], LIMIT)
        assert_near(got[PROMPT:], wanted[PROMPT:], LIMIT)


def test_a_prompt_in_two_pieces_equals_the_modules_output(default):
    config, layers = kda_jax.load_layers(default.folder, progress=False)
    for layer, params in layers.items():
        x, wanted = default.long[layer][0]
        assert_near(by_kda_jax(config, [params], [x[:CUT], x[CUT:]]), wanted, LIMIT)


def test_two_sequences_of_one_batch_equal_a_forward_of_each(default):
    config, layers = kda_jax.load_layers(default.folder, progress=False)
    for layer, params in layers.items():
        (short, short_y), (long, long_y) = default.short[layer][0], default.long[layer][0]
        cache = kda_jax.init_cache(config, SLOTS, params=params)
        x, bounds = np.concatenate([short, long]), [0, SHORT, SHORT + PROMPT]
        y, _ = prefill(params, x, cache, [SLOT, 1], bounds, config)
        assert_near(y[:SHORT], short_y, LIMIT)
        assert_near(y[SHORT:], long_y, LIMIT)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_sum_over_the_ranks_equals_the_modules_output(default, ranks):
    for layer in default.kda:
        parts = [
            kda_jax.load_layer(default.folder, layer, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        pieces, wanted = joined(default.long[layer])
        got = by_kda_jax(parts[0][0], [params for _, params in parts], pieces)
        assert_near(got[:PROMPT], wanted[:PROMPT], LIMIT)
        assert_near(got[PROMPT:], wanted[PROMPT:], LIMIT)


def test_a_model_in_shards_has_the_same_weights(default, tmp_path):
    default.model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    layer = re.compile(rf"layers\.{default.kda[0]}\.(self_attn|attention)\.")
    assert len({file for name, file in index.items() if layer.search(name)}) > 1
    assert check(tmp_path)[0] == 0
    assert_loads(tmp_path, default.model)


def test_modules_own_names_have_the_same_weights(default, tmp_path):
    """`state_dict` has the forget gate in a module of its own, and one convolution of q, k and v;
    `save_pretrained` writes the released names.
    """
    save_file = importlib.import_module("safetensors.torch").save_file
    weights = default.model.state_dict()
    assert any(name.endswith("self_attn.conv1d.weight") for name in weights)
    assert any(name.endswith("self_attn.forget_gate.A_log") for name in weights)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((default.folder / "config.json").read_text())
    assert check(tmp_path)[0] == 0
    assert_loads(tmp_path, default.model)


def test_a_model_in_bfloat16_has_the_same_weights(torch, default, tmp_path):
    """transformers keeps some of them in float32, others in each model."""
    model = type(default.model).from_pretrained(default.folder, dtype=torch.bfloat16)
    assert default.module(default.kda[0]).q_proj.weight.dtype == torch.float32
    assert stack(model)[default.kda[0]].self_attn.q_proj.weight.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    assert check(tmp_path)[0] == 0
    assert_loads(tmp_path, model)


def swapped(x):
    """The first two in each other's place."""
    return x.at[jnp.array([0, 1])].set(x[jnp.array([1, 0])])


def weight(**changes):
    """A fault in the weights: each of them by a function of all of them."""
    return lambda config, params: (
        config,
        dataclasses.replace(params, **{name: new(params) for name, new in changes.items()}),
    )


def number(**changes):
    """A fault in the config."""
    return lambda config, params: (dataclasses.replace(config, **changes), params)


WRONG = {
    "two heads' decay rates swapped": weight(A_log=lambda p: swapped(p.A_log)),
    "two channels' biases swapped": weight(dt_bias=lambda p: swapped(p.dt_bias)),
    "convolutions of q and k swapped": weight(q_conv=lambda p: p.k_conv, k_conv=lambda p: p.q_conv),
    "taps the other way round": weight(v_conv=lambda p: p.v_conv[:, ::-1]),
    "gates swapped": weight(f_up=lambda p: p.g_up, g_up=lambda p: p.f_up),
    "a norm of ones": weight(norm=lambda p: jnp.ones_like(p.norm)),
    "another bound": number(lower_bound=-4.99),
    "the other gate": number(lower_bound=None),
    "another epsilon": number(norm_eps=1e-5),
    "beta doubled": number(allow_neg_eigval=True),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_weight_or_number_is_seen(ling, fault):
    """Each of them must stand out by much more than the limit."""
    layer = ling.kda[0]
    x, wanted = ling.short[layer][0]
    right = kda_jax.load_layer(ling.folder, layer)
    assert_near(token_by_token(*right, x), wanted, LIMIT)
    with pytest.raises(AssertionError):
        assert_near(token_by_token(*WRONG[fault](*right), x), wanted, 10 * LIMIT)


def token_by_token(config, params, x):
    return by_kda_jax(config, [params], [row[None] for row in x])


@pytest.fixture(scope="module")
def ling(torch, tmp_path_factory):
    return save(torch, tmp_path_factory.mktemp("ling"), "ling", {})
