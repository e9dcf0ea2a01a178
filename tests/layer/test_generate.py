"""The example generates, and a request's tokens do not depend on who shares its batch."""

import jax
import numpy as np
import pytest
from support import load_example


@pytest.fixture(scope="module")
def example():
    return load_example("generate")


@pytest.mark.slow
def test_it_runs_saves_and_loads(example, tmp_path, capsys):
    arguments = ["--requests", "5", "--slots", "2", "--new-tokens", "6", "--temperature", "0.7"]
    assert example.main([*arguments, "--save", str(tmp_path / "weights.npz")]) == 0
    first = capsys.readouterr().out
    assert "5 of 5 requests have the same tokens alone" in first
    assert example.main([*arguments, "--weights", str(tmp_path / "weights.npz")]) == 0
    again = capsys.readouterr().out
    assert first.splitlines()[1:] == again.splitlines()[1:]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_neither_the_batch_nor_the_slots_change_a_requests_tokens(example, temperature):
    model = example.init_model(jax.random.key(3))
    results = []
    for slots in (2, 3, 7):
        requests = example.make_requests(7, 12, seed=5)
        done, _, decoded = example.generate(model, requests, slots=slots, temperature=temperature)
        assert sorted(done) == list(range(7))
        assert decoded == sum(len(tokens) - 1 for tokens in done.values())
        results.append(done)
    assert results[0] == results[1] == results[2]
    assert len({token for tokens in results[0].values() for token in tokens}) > 20, (
        "the model says one thing only"
    )


def test_a_prompt_that_does_not_fit_is_refused(example):
    request = example.Request(0, list(np.arange(30)), 3)
    with pytest.raises(ValueError, match="a prompt of 30 tokens does not fit into a prefill of 16"):
        example.generate({"layers": []}, [request], slots=2, temperature=0.0, prompt_tokens=16)
