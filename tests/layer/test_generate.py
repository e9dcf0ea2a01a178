"""The example serves, and a request's tokens are those that it gets alone."""

import jax
import pytest
from support import load_example


@pytest.fixture(scope="module")
def example():
    return load_example("generate")


@pytest.fixture(scope="module")
def model(example):
    return example.init_model(jax.random.key(3))


# One set of sizes for all tests: a size compiles for seconds.
SIZES = dict(rows=2, slots=6)
ARGUMENTS = ["--rows", "2", "--slots", "6", "--speculate", "3"]


def serve(example, model, **options):
    server = example.Server(model, **SIZES, **options)
    return server.run(example.make_requests(7, 12, seed=5)), server


@pytest.mark.slow
def test_it_runs_saves_and_loads(example, tmp_path, capsys):
    arguments = [*ARGUMENTS, "--requests", "5", "--new-tokens", "6", "--temperature", "0.7"]
    assert example.main([*arguments, "--save", str(tmp_path / "weights.npz")]) == 0
    first = capsys.readouterr().out
    assert "5 of 5 requests have the same tokens alone" in first
    assert example.main([*arguments, "--weights", str(tmp_path / "weights.npz")]) == 0
    again = capsys.readouterr().out
    assert first.splitlines()[2:] == again.splitlines()[2:]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "speculate"), [(0.0, 0), (0.0, 3), (0.9, 0)])
def test_neither_batch_prefixes_nor_guesses_change_a_requests_tokens(
    example, model, temperature, speculate
):
    finished, _ = serve(example, model, temperature=temperature, speculate=speculate)
    for request in example.make_requests(7, 12, seed=5):
        alone = example.generate_alone(model, request, rows=2, temperature=temperature)
        assert finished[request.number] == alone
    assert len({token for tokens in finished.values() for token in tokens}) > 20, (
        "the model says one thing only"
    )


@pytest.mark.slow
def test_prefixes_are_hit_and_evicted_and_guesses_are_counted(example, model):
    _, server = serve(example, model, speculate=3)
    assert server.prefixes.hits > 0
    assert server.prefixes.saved >= 64 * server.prefixes.hits
    assert server.prefixes.evicted > 0
    assert server.guessed > server.right >= 0
    assert set(server.prefixes.slots.values()).isdisjoint(server.free)
    held = len(server.free) + len(server.prefixes.slots)
    assert held == server.slots, "a slot was lost"


@pytest.mark.slow
def test_it_ends_in_failure_where_a_prefix_is_anothers(example, monkeypatch, capsys):
    """The check at the end sees a state that is not that of the request's first tokens."""
    longest = example.Prefixes.longest

    def another(self, prompt):
        end, slot = longest(self, prompt)
        others = [x for x in self.slots.values() if x != slot]
        return (end, others[0]) if end and others else (end, slot)

    monkeypatch.setattr(example.Prefixes, "longest", another)
    assert example.main([*ARGUMENTS, "--requests", "9", "--new-tokens", "16"]) == 1
    assert "9 of 9" not in capsys.readouterr().out


def test_a_guess_is_what_followed_the_same_end(example):
    assert example.guess([1, 2, 3, 4, 9, 1, 2, 3], 3) == [4, 9, 1]
    assert example.guess([5, 6, 5, 7, 5], 2) == [7, 5]
    assert example.guess([1, 2, 3], 2) == []
    assert example.guess([4, 4, 4], 5) == [4]
