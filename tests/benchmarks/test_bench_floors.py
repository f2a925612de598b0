"""The floor of a benchmark, by hand: what is multiplied, which bytes move, and how they become seconds."""

import floors
import pytest
from floors import Rates, Shape, decode_bytes, floor_of, ppo_floor
from harness import with_floors

LLAMA = dict(hidden_size=8, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=50)
OPT = dict(hidden_size=8, ffn_dim=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=50)


def test_weights_of_a_gated_model_with_fewer_key_heads_and_of_opt():
    # a layer: q and o 8 x 8, k and v 8 x 4, gate, up and down 8 x 20
    assert Shape.of(LLAMA).body == 3 * (2 * 64 + 2 * 32 + 3 * 160)
    assert Shape.of(OPT).body == 3 * (4 * 64 + 2 * 256)
    assert Shape.of(OPT).head == 400


def test_the_products_are_the_weights():
    for settings in (LLAMA, OPT):
        shape = Shape.of(settings)
        assert sum(i * o for _, i, o in shape.products(7)) * shape.layers == shape.body


def test_bytes_of_decoding():
    shape = Shape.of(LLAMA)
    # 4 steps of all weights in bf16; the first request's tokens attend to 10 + 2 on average, the second's to 6 + 1
    attended = (10 + 2) * 4 + (6 + 1) * 2
    assert decode_bytes(shape, [10, 6], [4, 2]) == 4 * 2 * (shape.body + 400) + attended * 2 * 2 * 3 * 4
    assert decode_bytes(shape, [10, 6], [4, 2], width=4) == 2 * decode_bytes(shape, [10, 6], [4, 2])
    # one at a time: 6 steps
    assert decode_bytes(shape, [10, 6], [4, 2], slots=1) == 6 * 2 * (shape.body + 400) + attended * 2 * 2 * 3 * 4


def test_seconds_from_the_rates_that_were_measured(monkeypatch):
    asked = []

    def rate(shapes, dtype):
        asked.append(shapes)
        return 1e6 if len(asked) == 1 else 2e6

    monkeypatch.setattr(floors, "matrix_rate", rate)
    monkeypatch.setattr(floors, "bandwidth", lambda: 5e5)
    shape = Shape.of(LLAMA)
    total, line = floor_of(shape, 100, 3, (40, 2), decoded=(1, 10_000), trained=10)
    assert total == pytest.approx(2 * 2016 * 100 * 3 / 1e6 + 2 * 400 * 40 * 2 / 2e6 + 10_000 / 5e5 + 30 * 10 / 5e5)
    assert asked == [shape.products(100), [(40, 8, 50)]]
    assert "head at 0 G/s 0.03" in line
    total, line = floor_of(shape, 100, 3)
    assert "head" not in line
    assert "optimizer" not in line


def test_a_decode_step_takes_the_longer_of_its_bytes_and_its_products():
    shape, rates = Shape.of(LLAMA), Rates(lambda shapes, dtype: 1e6, lambda: 5e5)
    rest, _ = floor_of(shape, 100, 3, rates=rates)
    by_bytes, line = floor_of(shape, 100, 3, decoded=(7, 20_000), rates=rates)  # products: 2 * 7 * 2416 / 1e6 = .034
    assert by_bytes - rest == pytest.approx(.04) and "decoding at 0.0 GB/s 0.04" in line
    by_products, line = floor_of(shape, 100, 3, decoded=(7, 10_000), rates=rates)
    assert by_products - rest == pytest.approx(2 * 7 * (2016 + 400) / 1e6) and "decoding at 0 G/s 0.03" in line


def test_a_ppo_step_reads_everything_eight_times_or_six_with_adapters():
    shape, rates = Shape.of(OPT), Rates(lambda shapes, dtype: 1e6, lambda: 1e9)
    decoded = 2 * (shape.body + shape.head) * 8 / 1e6  # longer than the bytes take
    # 28 tokens: reference and reward once, actor and critic three times; 18 tokens are prefilled
    products = 2 * shape.body * (28 * 8 + 18) + 2 * shape.head * 8 * 4
    optimizer = 30 * 2 * (shape.body + shape.head) / 1e9
    assert ppo_floor(shape, [10, 10], [4, 4], False, rates)[0] == pytest.approx(products / 1e6 + decoded + optimizer)
    # frozen weights have no gradient: a backward costs one forward, and there is next to nothing to update
    products = 2 * shape.body * (28 * 6 + 18) + 2 * shape.head * 8 * 3
    assert ppo_floor(shape, [10, 10], [4, 4], True, rates)[0] == pytest.approx(products / 1e6 + decoded)


def test_floors_are_measured_after_each_round_and_the_first_round_does_not_count():
    order = []

    def side(name):
        return lambda: order.append(name) or float(len(order))

    (ours, peer), found = with_floors(2, lambda: order.append("floor") or len(order), side("ours"), side("peer"))
    assert order == ["ours", "peer", "floor"] * 3
    assert (ours.least, ours.most, peer.median) == (4.0, 7.0, 6.5)
    assert found == [6, 9]
