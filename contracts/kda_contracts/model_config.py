"""What a config.json says of its model's KDA layers, whoever wrote it.

Four forms are read: a `linear_attn_config` (Kimi-Linear, Kimi-K3, GLM-5.3), flat keys (what
transformers writes of those), Ling-3.0's, and FLA's. The rule: a key that changes what the layer
computes is applied, or its value is refused by its name. One that says nothing (null, false)
passes.

Over 350 lines, since the keys and the rules between them are read as one.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from kda_contracts.judge import ContractError, check
from kda_contracts.layer import KDA_CONFIG, LOWER_BOUND, NORM_EPS
from kda_contracts.options import judge_option, shown_value
from kda_contracts.safetensors_header import BadFileError, short

MAX_SIZE = 2**20  # of heads, channels, taps: far above any model's
MAX_LAYERS = 10_000
LA = "linear_attn_config"

# Each number by the keys that may hold it. `LA` is the table inside; the rest is the model's own.
SIZES = {
    "H": (f"{LA}.num_heads", "linear_num_heads"),
    "K": (f"{LA}.head_dim", "linear_head_dim"),
    "W": (f"{LA}.short_conv_kernel_size", "linear_conv_kernel_dim"),
    "D": ("hidden_size",),
}
LING = {"H": "num_attention_heads", "K": "head_dim", "W": "short_conv_kernel_size"}
FLA = {"H": "num_heads", "K": "head_dim", "W": "conv_size", "D": "hidden_size"}
BOUNDS = (
    f"{LA}.gate_lower_bound",
    f"{LA}.lower_bound",
    "gate_lower_bound",
    "linear_lower_bound",
    "kda_lower_bound",
    "kda_gate_lower_bound",
    "lower_bound",
)
SAFE = (f"{LA}.safe_gate", "safe_gate", "kda_safe_gate")
EPSILONS = ("rms_norm_eps", "norm_eps")
DOUBLED = (
    f"{LA}.allow_neg_eigval",
    "allow_neg_eigval",
    "linear_allow_neg_eigval",
    "kda_allow_neg_eigval",
)
CONV_BIAS = (f"{LA}.conv_bias", "conv_bias")
# Flags that only allow one value: the layer of the other is not built here.
FIXED = {
    f"{LA}.use_short_conv": True,
    "use_short_conv": True,
    "use_qk_l2norm_in_kernel": True,
    "kda_use_qk_l2norm_in_kernel": True,
    f"{LA}.use_qk_l2norm_in_kernel": True,
    "kda_output_gate_act": "sigmoid",
}
COUNTED_FROM = f"{LA}.kda_layer_index_base"
# Keys that have no part in the layer's mathematics, or whose part the tensors show: an output gate
# of full rank is another tensor.
HARMLESS = {f"{LA}.{key}" for key in ("kda_layers", "full_attn_layers", "use_full_rank_gate")}
HARMLESS |= {"kda_use_full_proj", "kda_mode", "kda_unpad_inputs", "kda_use_fused_gate"}


@dataclass(frozen=True)
class ModelConfig:
    """A config.json, read. `layers` are the numbers that it calls KDA ("kda") or another kind
    ("full"), as it counts; `counted_from` is 0 or 1 where it is known, else None; `listed` is
    whether a list names them, so that each has to be there.

    `conv_bias` is None where nothing is said: the tensors tell. They tell the ranks too, where the
    config is wrong: None is a full one.
    """

    sizes: dict
    lower_bound: float | None
    norm_eps: float
    allow_neg_eigval: bool
    conv_bias: bool | None
    gate_rank: int | None
    forget_rank: int | None
    layers: dict = field(default_factory=dict)
    counted_from: int | None = None
    listed: bool = True
    quantization: dict = field(default_factory=dict)


def read_model_config(path, config) -> ModelConfig:
    """The content of a config.json. Raises BadFileError, in one line with the path and the key."""
    return _Reader(path, config).read()


def layer_numbers(config) -> dict:
    """What a config.json's content says of its KDA layers, as the keywords of a `KDAConfig`.

    {letter: size, "lower_bound", "norm_eps", "allow_neg_eigval", "conv_bias", "gate_rank",
    "forget_rank"}. Raises BadFileError where it is no KDA model's, or where a number is missing or
    wrong, or where a key asks for a layer that is not built here.
    """
    return numbers_of(read_model_config("config.json", config))


def numbers_of(model: ModelConfig) -> dict:
    """The keywords of a `KDAConfig`."""
    return model.sizes | {
        "lower_bound": model.lower_bound,
        "norm_eps": model.norm_eps,
        "allow_neg_eigval": model.allow_neg_eigval,
        "conv_bias": bool(model.conv_bias),
        "gate_rank": model.gate_rank,
        "forget_rank": model.forget_rank,
    }


class _Reader:
    """One config, and how its keys are found in it."""

    def __init__(self, path, config):
        self.path = Path(path)
        if not isinstance(config, dict):
            self.fail(f"the JSON must be an object (got {type(config).__name__})")
        text = config.get("text_config")
        self.outer, self.flat = config, text if isinstance(text, dict) and text else config
        table = self.flat.get(LA)
        self.table = table if isinstance(table, dict) else {}
        kind = self.flat.get("model_type")
        self.kind = kind if isinstance(kind, str) else ""
        self.is_fla = self.kind == "kda"
        ling = ("short_conv_kernel_size", "kda_safe_gate")
        self.is_ling = any(self.flat.get(key) is not None for key in ling)
        self.is_flat = any("." not in key and key in self.flat for key in SIZES["H"])
        if not (self.is_fla or self.is_ling or self.is_flat or self.table):
            self.fail(
                f"no {LA}, no linear_num_heads, no kda_safe_gate and no model_type of kda: "
                "this is no KDA model's config"
            )

    def read(self) -> ModelConfig:
        for key, wanted in FIXED.items():
            self.require(key, wanted)
        self.require_known_keys()
        sizes = self.sizes()
        full_gate = self.full(f"{LA}.use_full_rank_gate", "use_full_rank_gate", "no_kda_lora")
        model = ModelConfig(
            sizes=sizes,
            lower_bound=self.lower_bound(),
            norm_eps=self.norm_eps(),
            allow_neg_eigval=bool(self.flag(DOUBLED)),
            conv_bias=self.flag(CONV_BIAS),
            gate_rank=None if full_gate else sizes["V"],
            forget_rank=None if self.full("no_kda_lora") else sizes["V" if self.is_fla else "K"],
            quantization=self.quantization(),
        )
        layers = self.layers()
        try:
            check(KDA_CONFIG, **numbers_of(model))
        except ContractError as error:
            self.fail(" ".join(violation.headline for violation in error.violations))
        return replace(model, **layers)

    def fail(self, fault) -> NoReturn:
        raise BadFileError(self.path, fault)

    def present(self, key):
        """Whether a key stands there, and its value."""
        table, name = (self.table, key[len(LA) + 1 :]) if "." in key else (self.flat, key)
        return name in table, table.get(name)

    def one(self, keys):
        """`(key, value)` of the only value, other than null, that these keys have."""
        found = [(key, value) for key in keys for there, value in (self.present(key),) if there]
        said = [(key, value) for key, value in found if value is not None]
        for key, value in said[1:]:
            if isinstance(value, bool) != isinstance(said[0][1], bool) or value != said[0][1]:
                self.fail(f"`{said[0][0]}` is {shown(said[0][1])}, but `{key}` is {shown(value)}")
        return said[0] if said else (found[0] if found else ("", None))

    def flag(self, keys):
        key, value = self.one(keys)
        if value is not None and type(value) is not bool:
            self.fail(f"`{key}` must be true or false (got {shown(value)})")
        return value

    def full(self, *keys):
        """Whether a gate is of full rank, or None where nothing is said."""
        said = self.flag(keys)
        # transformers' own class has no other gate, and writes no key that says so.
        return True if said is None and self.kind == "bailing_hybrid" else said

    def require(self, key, wanted):
        there, value = self.present(key)
        if there and value is not None and (type(value) is not type(wanted) or value != wanted):
            self.fail(f"`{key}` must be {shown(wanted)} (got {shown(value)}): no other is built")

    def require_known_keys(self):
        """No key is passed over that could change the layer: neither in the layer's own table nor
        under its prefix."""
        known = {key for keys in SIZES.values() for key in keys} | HARMLESS | {COUNTED_FROM}
        known |= {*BOUNDS, *SAFE, *DOUBLED, *CONV_BIAS, *FIXED}
        same = {"num_kv_heads": "num_heads", "num_k_heads": "num_heads", "num_v_heads": "num_heads"}
        same |= {"head_k_dim": "head_dim", "head_v_dim": "head_dim", "v_head_dim": "head_dim"}
        keys = {f"{LA}.{key}": x for key, x in self.table.items() if key not in same}
        for key in same.keys() & self.table.keys():  # the layer has one number of each
            if type(x := self.table[key]) is not int or x != self.table.get(same[key]):
                keys[f"{LA}.{key}"] = x
        keys |= {key: x for key, x in self.flat.items() if key.startswith("kda_")}
        for key, x in keys.items():
            if x is not None and x is not False and key not in known:
                told = f"`{short(key)}` is {shown(x)}"
                self.fail(f"{told}: what it changes in the layer is not known")
        # transformers' layers take the convolution's activation from here; the others always SiLU.
        # Kimi-K3's is its MLP's.
        kimi = self.table and not self.kind.startswith("glm")
        activation = self.flat.get("hidden_act")
        if not (self.is_fla or kimi) and activation not in (None, "silu", "swish"):
            self.fail(f"`hidden_act` must be silu, the convolution's (got {shown(activation)})")

    def sizes(self):
        sizes = {}
        for letter, keys in SIZES.items():
            if self.is_fla:
                keys = (FLA[letter],)
            key, value = self.one(keys)
            if value is None and self.is_ling and letter in LING:
                keys = (*keys, LING[letter])
                key, value = self.one(keys)
            if value is None and letter == "W" and self.is_flat:
                value = 4  # transformers' default
            sizes[letter] = self.size(key or keys[0], value)
        sizes |= {"HV": sizes["H"], "V": sizes["K"]}
        if self.is_fla:
            there, heads = self.present("num_v_heads")
            if there and heads is not None:
                sizes["HV"] = self.size("num_v_heads", heads)
            expand = self.flat.get("expand_v")
            expand = 1 if expand is None else expand
            if type(expand) not in (int, float) or not 0 < expand < 2**16:
                self.fail(f"`expand_v` must be a number above 0 (got {shown(expand)})")
            width = sizes["K"] * expand
            sizes["V"] = self.size("head_dim * expand_v", int(width) if width % 1 == 0 else width)
        return {letter: sizes[letter] for letter in ("D", "H", "HV", "K", "V", "W")}

    def size(self, key, value):
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            got = "nothing" if value is None else shown(value)
            self.fail(f"`{key}` must be a whole number from 1 to {MAX_SIZE} (got {got})")
        return value

    def lower_bound(self):
        """The bound that selects the safe gate, or None for the softplus gate."""
        key, bound = self.one(BOUNDS)
        null = next((x for x in BOUNDS if self.present(x) == (True, None)), None)
        if bound is not None and null:
            self.fail(f"`{key}` is {shown(bound)}, but `{null}` is null")
        safe = self.flag(SAFE)
        if bound is not None and judge_option("option", LOWER_BOUND, bound):
            self.fail(f"`{key}` must be null or a finite number below 0 (got {shown(bound)})")
        if self.is_ling and not self.is_fla:
            if safe is False:
                return None
            if bound is None and (safe or not key):
                self.fail(
                    "`kda_safe_gate` needs a `kda_lower_bound`: add it, or set `kda_safe_gate` to "
                    "false for the softplus gate"
                )
        elif bound is None and safe:
            name = next(name for name in SAFE if self.present(name)[0])
            self.fail(
                f"`{name}` is true, and no lower bound is given: add `lower_bound`, or set the "
                "first to false for the softplus gate"
            )
        elif not key and safe is None and self.kind.startswith("glm"):
            self.fail(
                "no `gate_lower_bound`, for which GLM's readers take different ones: add it, or "
                "null for the softplus gate"
            )
        return None if bound is None else float(bound)

    def norm_eps(self):
        key, eps = self.one(EPSILONS)
        if not key:
            return 1e-6 if self.is_fla or self.is_ling else 1e-5
        if eps is None or judge_option("option", NORM_EPS, eps):
            self.fail(f"`{key}` must be a finite number above 0 (got {shown(eps)})")
        return float(eps)

    def quantization(self):
        """The model's quantization_config, which stands outside or beside the text's."""
        for table in (self.flat, self.outer):
            if isinstance(found := table.get("quantization_config"), dict):
                return found
        return {}

    def layers(self):
        """The fields of `ModelConfig` that say which layers are KDA's."""
        lists = {"kda": f"{LA}.kda_layers", "full": f"{LA}.full_attn_layers"}
        listed = {kind: self.numbers(key) for kind, key in lists.items()}
        if listed["kda"] is not None:
            layers = {kind: numbers or frozenset() for kind, numbers in listed.items()}
            there, base = self.present(COUNTED_FROM)
            if there and base is not None and (type(base) is not int or base not in (0, 1)):
                self.fail(f"`{COUNTED_FROM}` must be 0 or 1 (got {shown(base)})")
            return {"layers": layers, "counted_from": base}
        types, layers = self.flat.get("layer_types"), self.flat.get("num_hidden_layers")
        if isinstance(types, list) and types:
            self.require_few("layer_types", types)
            kda = {i for i, x in enumerate(types) if x in ("linear_attention", "kda")}
            return _split(len(types), kda)
        if type(layers) is not int or not 0 < layers <= MAX_LAYERS:
            return {}
        group = self.flat.get("layer_group_size")
        if self.is_ling and type(group) is int and 0 < group <= layers:
            # A last group that is not whole is KDA to some readers and MLA to others.
            whole = layers // group * group
            kda = {i for i in range(whole) if (i + 1) % group}
            return _split(whole, kda) | {"listed": False}
        if self.is_fla and self.flat.get("attn") is not None:
            tables = self.flat["attn"]
            tables = tables if isinstance(tables, list) else [tables]
            numbers = [x.get("layers") if isinstance(x, dict) else None for x in tables]
            full = frozenset().union(*(self.judged("attn.layers", x) for x in numbers))
            return _split(layers, set(range(layers)) - full) | {"listed": False}
        return {}

    def numbers(self, key):
        there, numbers = self.present(key)
        return self.judged(key, numbers) if there and numbers is not None else None

    def judged(self, key, numbers):
        if not isinstance(numbers, list):
            self.fail(f"`{key}` must be a list of layer numbers (got {shown(numbers)})")
        self.require_few(key, numbers)
        for x in numbers:
            if type(x) is not int or not 0 <= x <= MAX_LAYERS:
                self.fail(f"`{key}` must hold layer numbers up to {MAX_LAYERS} (got {shown(x)})")
        return frozenset(numbers)

    def require_few(self, key, values):
        if len(values) > MAX_LAYERS:
            self.fail(f"`{key}` has {len(values)} entries, more than {MAX_LAYERS}")


def _split(layers, kda):
    kda = frozenset(kda)
    return {"layers": {"kda": kda, "full": frozenset(range(layers)) - kda}, "counted_from": 0}


def shown(x: Any):
    """A value of a JSON file, at most 40 characters of it."""
    if isinstance(x, int) and x.bit_length() >= 128:
        return shown_value(x)
    text = json.dumps(x) if x is None or isinstance(x, bool) else repr(x)
    return f"{text:.40}"
