"""Clients against one pass of the MLX model, on a package whose unwritten cache is junk."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fake_package import FakePackage
from slow_params import slow

from convert.coreml_client import ContextFull, Contract, StatelessClient
from openelm_mlx.model import Model

CONTEXT, PREFILL = 24, 8
INTERFACES = ["static", "stateless", "flexible", "ane"]


def package(model: Model, interface: str, **settings: Any) -> FakePackage:
    return FakePackage(model, interface, **{"context": CONTEXT, "prefill": PREFILL, **settings})


def ids_of(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, 61, count).tolist()


def one_pass(model: Model, ids: list[int]) -> np.ndarray:
    """(n, V) logits of all tokens at once, without a cache."""
    return np.array(model(mx.array([ids]))[0])


def tolerance(interface: str) -> float:
    """float32's; caches handed over go through fp16, as the contract has it."""
    return 5e-3 if interface == "stateless" else 2e-5


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("first", [9, 19, *slow(1, 2, 8, 16, 17, 23, 24)])
def test_prompts_of_any_length_give_the_logits_of_one_pass(
    tiny_model: Model, interface: str, first: int
) -> None:
    ids = ids_of(CONTEXT)
    expected = one_pass(tiny_model, ids)
    client = package(tiny_model, interface).client()
    np.testing.assert_allclose(
        client.feed(ids[:first]), expected[first - 1], atol=tolerance(interface)
    )
    for n in range(first, CONTEXT):  # on to the very last place of the context
        logits = client.feed([ids[n]])
        np.testing.assert_allclose(logits, expected[n], atol=tolerance(interface))
    assert client.position == CONTEXT
    assert client.tokens == ids


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize(
    "cuts", [(3, 4, 10, 24), (18, 19, 22, 24), *slow((9, 20, 24), (1, 23, 24))]
)
def test_text_fed_in_pieces_gives_the_logits_of_one_pass(
    tiny_model: Model, interface: str, cuts: tuple[int, ...]
) -> None:
    ids = ids_of(CONTEXT, seed=4)
    client = package(tiny_model, interface, all_logits=True).client()
    rows, start = [], 0
    for end in cuts:
        rows.append(client.feed_all(ids[start:end]))
        start = end
    assert [len(r) for r in rows] == np.diff([0, *cuts]).tolist()
    np.testing.assert_allclose(
        np.concatenate(rows), one_pass(tiny_model, ids), atol=tolerance(interface)
    )


def test_prefill_takes_all_but_the_last_token_in_chunks(tiny_model: Model) -> None:
    fake = package(tiny_model, "static")
    fake.client().feed(ids_of(13))
    assert fake.calls == [("prefill", 8, 0), ("prefill", 8, 8), ("decode", 1, 12)]


def test_near_the_end_a_chunk_begins_earlier_in_place_of_padding_beyond_the_context(
    tiny_model: Model,
) -> None:
    fake = package(tiny_model, "static", context=20)
    fake.client().feed(ids_of(20))
    assert fake.calls == [
        *(("prefill", 8, 0), ("prefill", 8, 8), ("prefill", 8, 12)),
        ("decode", 1, 19),
    ]


def test_swift_transformers_sends_the_prompt_whole_and_then_single_tokens(
    tiny_model: Model,
) -> None:
    fake = package(tiny_model, "flexible")
    client = fake.client()
    client.feed(ids_of(11))
    client.feed([5])
    assert fake.calls == [(None, 11, 0), (None, 1, 11)]
    assert float(mx.min(fake.mask)) == 0.0  # the newest token sees everything


def test_a_call_of_one_token_is_enough_for_the_neural_engine_form(tiny_model: Model) -> None:
    ids = ids_of(6)
    client = package(tiny_model, "ane", prefill=1).client()
    np.testing.assert_allclose(client.feed_all(ids), one_pass(tiny_model, ids), atol=2e-5)


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_full_context_is_an_error_that_feeds_nothing(tiny_model: Model, interface: str) -> None:
    client = package(tiny_model, interface).client()
    client.feed(ids_of(20))
    with pytest.raises(ContextFull, match=r"5 tokens do not fit: 20 of .* 24 are used"):
        client.feed([1] * 5)
    assert client.position == 20
    client.feed([1] * 4)


@pytest.mark.parametrize("interface", INTERFACES)
def test_reset_forgets_the_sequence(tiny_model: Model, interface: str) -> None:
    client = package(tiny_model, interface).client()
    ids = ids_of(12)
    first = client.feed(ids)
    client.feed([7])
    client.reset()
    assert client.position == 0
    np.testing.assert_array_equal(client.feed(ids), first)


def test_a_failed_prediction_can_be_tried_again(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = package(tiny_model, "static")
    client = fake.client()
    client.feed(ids_of(4))

    def fail(*_: object) -> dict[str, np.ndarray]:
        raise ValueError("Core ML fails")

    with monkeypatch.context() as patch:
        patch.setattr(fake, "predict", fail)
        with pytest.raises(ValueError, match="Core ML fails"):
            client.feed([1, 2])
    assert client.position == 4
    expected = one_pass(tiny_model, [*ids_of(4), 1, 2])[-1]
    np.testing.assert_allclose(client.feed([1, 2]), expected, atol=2e-5)


def test_what_a_client_cannot_do_is_said(tiny_model: Model) -> None:
    client = package(tiny_model, "static").client()
    with pytest.raises(ValueError, match="no token"):
        client.feed([])
    with pytest.raises(ValueError, match="--all-logits"):
        client.feed_all([1])
    with pytest.raises(ValueError, match="shape of its caches"):
        StatelessClient(package(tiny_model, "stateless"), client.contract)


METADATA = {"openelm.interface": "ane", "openelm.context": "64", "openelm.prefill": "16"}


def test_the_metadata_say_how_a_package_is_called() -> None:
    contract = Contract.from_metadata(METADATA)
    assert contract == Contract(interface="ane", context=64, prefill=16, all_logits=True)
    static = {**METADATA, "openelm.interface": "static", "openelm.all_logits": "false"}
    assert not Contract.from_metadata(static).all_logits
    assert Contract.from_metadata({**static, "openelm.all_logits": "true"}).all_logits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"openelm.context": "many"}, "invalid literal"),
        ({"openelm.interface": "chunked"}, "known are static, flexible, stateless, ane"),
    ],
)
def test_metadata_of_another_exporter_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Contract.from_metadata({**METADATA, **change})
    with pytest.raises(ValueError, match="openelm convert coreml"):
        Contract.from_metadata({})
