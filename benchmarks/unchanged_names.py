"""What a checkout calls its functions and modules: the one place that knows old and new names."""

import importlib
import importlib.util
import inspect
import types

import jax.numpy as jnp

RENAMED = {"initial_state": "pool", "source_indices": "sources"}


def names():
    """What the checkout on the path calls the functions and modules that are used here."""
    ops = "packed_decode fused_sigmoid_gating_kda_update recurrent_kda chunk_kda commit kda_decode"
    ops += " kda_prefill clear_slots pack_qkv state_from_kv state_to_kv"
    found = {name: _renamed(_find(f"kda_jax:{name}")) for name in ops.split()}
    for name in ("conv_decode", "conv_prefill"):
        found[name] = _renamed(_find(f"kda_jax:{name}", f"kda_jax.conv:{name}"))
    found["gated_rms_norm"] = _find("kda_jax:gated_rms_norm", "kda_jax.norm:gated_rms_norm")
    for name in ("KDAConfig", "KDACache", "init_params", "init_cache"):
        found[name] = _find(f"kda_jax:{name}")
    return types.SimpleNamespace(**found)


def module(*names):
    """The first of these modules that the checkout has."""
    for name in names:
        if _exists(name):
            return importlib.import_module(name)
    raise ImportError(f"none of {', '.join(names)}")


def module_or_none(name):
    return module(name) if importlib.util.find_spec(name) else None


def _find(*places):
    """The first of these `module:attribute` that the checkout has."""
    for place in places:
        name, attribute = place.split(":")
        if hasattr(found := importlib.import_module(name), attribute):
            return getattr(found, attribute)
    raise ImportError(f"none of {', '.join(places)}")


def _renamed(function):
    """The function, which also takes its keywords by their old names."""
    parameters = inspect.signature(function).parameters

    def call(*args, **options):
        if "fresh" in options and "fresh" not in parameters:
            fresh, slots = options.pop("fresh"), jnp.asarray(args[3])
            options["sources"] = None if fresh is None else jnp.where(fresh, -1, slots)
        known = {name if name in parameters else RENAMED[name]: x for name, x in options.items()}
        return function(*args, **known)

    return call


def _exists(name):
    """Whether a module can be imported; its package may be missing too."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
