"""config.json in every form that is written: read into the same numbers, or refused by its key."""

import json

import pytest

from kda_contracts import BadFileError, layer_numbers
from kda_contracts.model_config import (
    BOUNDS,
    DOUBLED,
    EPSILONS,
    FIXED,
    MAX_LAYERS,
    MAX_SIZE,
    SAFE,
    SIZES,
    read_model_config,
)
from kda_jax import KDAConfig, config_from_hf

pytestmark = pytest.mark.slow  # it hangs on no JAX version

LA = dict(num_heads=4, head_dim=16, short_conv_kernel_size=3)
SIZE = dict(hidden_size=32, rms_norm_eps=1e-5, num_hidden_layers=8)
FLAT = dict(linear_num_heads=4, linear_head_dim=16, linear_conv_kernel_dim=3) | SIZE
LING = dict(
    model_type="bailing_hybrid", num_attention_heads=4, head_dim=16, short_conv_kernel_size=3,
    kda_safe_gate=True, kda_lower_bound=-5, layer_group_size=4, no_kda_lora=True,
)  # fmt: skip
LING |= SIZE | dict(rms_norm_eps=1e-6)
FLA = dict(model_type="kda", hidden_size=32, num_heads=4, head_dim=16, conv_size=3, norm_eps=1e-6)
FLA |= dict(allow_neg_eigval=False, use_short_conv=True, safe_gate=False, lower_bound=None)
BASE = KDAConfig(D=32, H=4, HV=4, K=16, V=16, W=3, gate_rank=16)


def released(**more):
    return SIZE | dict(model_type="kimi_linear", linear_attn_config=LA | more)


def glm(**more):
    return FLAT | dict(model_type="glm5_next_text") | more


def changed(**fields):
    return KDAConfig(**vars(BASE) | fields)


BOUNDED = changed(lower_bound=-5.0)
LARGE = dict(lower_bound=-5.0, norm_eps=1e-6, gate_rank=None, forget_rank=None)
# what is written -> what it means
FORMS = {
    "Kimi-Linear as released": (released(), BASE),
    "Kimi-Linear, flat": (FLAT | dict(model_type="kimi_linear"), BASE),
    "Kimi-Linear, both": (released() | FLAT, BASE),
    "without a number of taps": (
        {k: x for k, x in FLAT.items() if k != "linear_conv_kernel_dim"}, changed(W=4),
    ),
    "Kimi-K3": (
        dict(text_config=released(gate_lower_bound=-5.0, use_full_rank_gate=True)
             | dict(hidden_act="situ"), model_type="kimi_k3"),
        changed(lower_bound=-5.0, gate_rank=None),
    ),
    "GLM-5.3": (
        dict(text_config=released(gate_lower_bound=-5.0, safe_gate=True)
             | dict(model_type="glm5_next_text"), model_type="glm5_next"), BOUNDED,
    ),
    "GLM-5.3, a bound beside safe_gate false": (
        released(gate_lower_bound=-5.0, safe_gate=False) | dict(model_type="glm5_next_text"),
        BOUNDED,
    ),
    "GLM-5.3, flat": (glm(linear_lower_bound=-5.0), BOUNDED),
    "GLM-5.3, flat, inside": (dict(text_config=glm(linear_lower_bound=-5.0)), BOUNDED),
    "GLM-5.3 with the softplus gate": (glm(linear_lower_bound=None), BASE),
    "GLM-5.3 of an early draft": (released(lower_bound=-5.0), BOUNDED),
    "Ling-3.0": (LING, changed(**LARGE)),
    "Ling-3.0, flat": (
        LING | FLAT | dict(head_dim=8, rms_norm_eps=1e-6), changed(**LARGE),
    ),
    "Ling-3.0 of low ranks": (
        LING | dict(no_kda_lora=False), changed(lower_bound=-5.0, norm_eps=1e-6),
    ),
    "Ling-3.0 with the softplus gate": (
        LING | dict(kda_safe_gate=False), changed(**LARGE | dict(lower_bound=None)),
    ),
    "FLA": (FLA, changed(norm_eps=1e-6)),
    "FLA, doubled": (
        FLA | dict(allow_neg_eigval=True), changed(norm_eps=1e-6, allow_neg_eigval=True),
    ),
    "FLA, biased": (FLA | dict(conv_bias=True), changed(norm_eps=1e-6, conv_bias=True)),
    "FLA, bounded": (
        FLA | dict(safe_gate=True, lower_bound=-3.0), changed(norm_eps=1e-6, lower_bound=-3.0),
    ),
    "FLA, a bound alone": (FLA | dict(lower_bound=-3.0), changed(norm_eps=1e-6, lower_bound=-3.0)),
    "FLA, wider values": (
        FLA | dict(num_v_heads=8, expand_v=0.5),
        KDAConfig(D=32, H=4, HV=8, K=16, V=8, W=3, norm_eps=1e-6, gate_rank=8, forget_rank=8),
    ),
    "two keys of one number": (
        released(gate_lower_bound=-5) | dict(linear_lower_bound=-5.0), changed(lower_bound=-5.0),
    ),
    "no text": (released() | dict(text_config={}), BASE),
    "FLA, null": (FLA | dict(expand_v=None, num_v_heads=None), changed(norm_eps=1e-6)),
    "heads under a second name": (released(num_kv_heads=None, num_v_heads=4), BASE),
    "Solar's keys": (
        released() | dict(kda_gate_lower_bound=-5.0, kda_allow_neg_eigval=True),
        changed(lower_bound=-5.0, allow_neg_eigval=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_is_read(form):
    config, wanted = FORMS[form]
    config = json.loads(json.dumps(config))
    assert config_from_hf(config) == wanted
    silent = dict.fromkeys((*SAFE, "conv_bias", "allow_neg_eigval", "use_short_conv"))
    assert config_from_hf({x: y for x, y in silent.items() if x not in config} | config) == wanted


# what is written -> the key and what is said of it
REFUSED = {
    "a safe gate without its bound": (FLA | dict(safe_gate=True), "`safe_gate` is true, and no"),
    "Ling's": (LING | dict(kda_lower_bound=None), "`kda_safe_gate` needs a `kda_lower_bound`"),
    "GLM's silence": (glm(), "no `gate_lower_bound`"),
    "no convolution": (
        FLA | dict(use_short_conv=False), "`use_short_conv` must be true (got false)",
    ),
    "another activation": (glm(hidden_act="gelu"), "`hidden_act` must be silu"),
    "Ling's activation": (LING | dict(hidden_act="gelu"), "`hidden_act` must be silu"),
    "another output gate": (
        released() | dict(kda_output_gate_act="silu"), "`kda_output_gate_act` must be 'sigmoid'",
    ),
    "no normed keys": (
        released() | dict(kda_use_qk_l2norm_in_kernel=False), "`kda_use_qk_l2norm_in_kernel` must",
    ),
    "an unknown key of the table": (
        released(decay_power=2), "`linear_attn_config.decay_power` is 2: what it changes",
    ),
    "an unknown key of KDA": (released() | dict(kda_mixture="x"), "`kda_mixture` is 'x': what it"),
    "fewer value heads": (released(num_v_heads=2), "`linear_attn_config.num_v_heads` is 2"),
    "two numbers of heads": (
        released() | dict(linear_num_heads=8),
        "`linear_attn_config.num_heads` is 4, but `linear_num_heads` is 8",
    ),
    "a flat key in the table": (
        released(kda_lower_bound=-5.0), "`linear_attn_config.kda_lower_bound` is -5.0: what it",
    ),
    "a flat flag in the table": (
        released(kda_allow_neg_eigval=True), "`linear_attn_config.kda_allow_neg_eigval` is true:",
    ),
    "a list of the table outside": (released() | dict(kda_layers=[7]), "`kda_layers` is [7]: what"),
    "a bound and none": (
        released(gate_lower_bound=None) | dict(lower_bound=-5.0),
        "`lower_bound` is -5.0, but `linear_attn_config.gate_lower_bound` is null",
    ),
    "a base that is none": (
        released(kda_layers=[1], kda_layer_index_base=2), "must be 0 or 1 (got 2)",
    ),
    "a width of values that is not whole": (
        FLA | dict(expand_v=0.3), "`head_dim * expand_v` must be a whole number",
    ),
    "two bounds": (
        released(gate_lower_bound=-5.0) | dict(linear_lower_bound=-4.0),
        "`linear_attn_config.gate_lower_bound` is -5.0, but `linear_lower_bound` is -4.0",
    ),
    "a flag that is a number": (
        FLA | dict(allow_neg_eigval=1), "`allow_neg_eigval` must be true or",
    ),
    "a bias that is a word": (FLA | dict(conv_bias="no"), "`conv_bias` must be true or false"),
    "a positive bound": (released(gate_lower_bound=5.0), "must be null or a finite number below 0"),
    "another model": (dict(model_type="llama", **SIZE), "this is no KDA model's config"),
    "a list": ([1], "the JSON must be an object (got list)"),
    "no width": ({k: x for k, x in FLAT.items() if k != "hidden_size"}, "`hidden_size` must be a"),
    "layers that are no list": (released(kda_layers=3), "must be a list of layer numbers (got 3)"),
    "a layer that is no number": (released(kda_layers=[1, "2"]), "(got '2')"),
    "a layer below 0": (released(kda_layers=[1, -1]), "(got -1)"),
    "too many layers": (released(kda_layers=[1] * 10_001), "has 10001 entries, more than 10000"),
    "FLA's hybrid of nothing": (
        FLA | dict(num_hidden_layers=4, attn=dict(num_heads=2)), "`attn.layers` must be a list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_its_key(case):
    config, message = REFUSED[case]
    for read in (layer_numbers, config_from_hf):
        with pytest.raises(BadFileError) as caught:
            read(config)
        assert str(caught.value).startswith("config.json: ")
        assert message in str(caught.value)
        assert len(str(caught.value)) < 250


def with_value(config, key, value):
    """The config with a key set, in the layer's table where it is one of the table's."""
    table, _, name = key.rpartition(".")
    if not table:
        return config | {key: value}
    return config | {table: config[table] | {name: value}}


NONSENSE = [0, -1, 1.5, True, "4", [4], {}, 10**400, -(10**400), MAX_SIZE + 1]


@pytest.mark.parametrize("value", NONSENSE, ids=str)
@pytest.mark.parametrize("key", [keys[0] for keys in SIZES.values()])
def test_every_size_is_judged(key, value):
    with pytest.raises(BadFileError, match="must be a whole number from 1 to"):
        layer_numbers(with_value(released(), key, value))


def test_no_key_of_a_table_is_passed_over():
    """Each key that the reader knows changes what is read, or is refused, in every form."""
    values = dict.fromkeys((key for keys in SIZES.values() for key in keys), 8)
    values |= dict.fromkeys(BOUNDS, -2.0) | dict.fromkeys(EPSILONS, 1e-3)
    values |= dict.fromkeys(DOUBLED, True) | dict.fromkeys(FIXED, "another")
    base = layer_numbers(released())
    assert len(values) > 25
    for key, value in values.items():
        config = with_value(released(), key, value)
        try:
            assert layer_numbers(config) != base, key
        except BadFileError as error:
            assert f"`{key}`" in str(error)


def layers_of(config):
    model = read_model_config("config.json", config)
    return sorted(model.layers.get("kda", ())), sorted(model.layers.get("full", ()))


def test_which_layers_are_kdas():
    assert layers_of(released(kda_layers=[1, 3], full_attn_layers=[2])) == ([1, 3], [2])
    based = read_model_config("x", released(kda_layers=[1, 3], kda_layer_index_base=0))
    assert (based.counted_from, based.listed) == (0, True)
    types = ["linear_attention", "full_attention", "linear_attention", "indexed_attention"]
    assert layers_of(FLAT | dict(layer_types=types)) == ([0, 2], [1, 3])
    assert layers_of(LING) == ([0, 1, 2, 4, 5, 6], [3, 7])
    # The last group is not whole: some readers call its layers KDA, others MLA.
    assert layers_of(LING | dict(num_hidden_layers=6)) == ([0, 1, 2], [3])
    hybrid = FLA | dict(num_hidden_layers=4)
    assert layers_of(hybrid | dict(attn=dict(layers=[1], num_heads=2))) == ([0, 2, 3], [1])
    assert layers_of(hybrid | dict(attn=[dict(layers=[1]), dict(layers=[3])])) == ([0, 2], [1, 3])
    assert layers_of(hybrid) == ([], [])
    assert layers_of(FLAT | dict(num_hidden_layers=MAX_LAYERS + 1)) == ([], [])
