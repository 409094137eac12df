"""Routes from a publication's tensors to a model's weights: taken where they were proven, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from actors.weights.routes import NoRoute, Routes, rows_of, together


def random(rows: int, seed: int, columns: int = 8) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


PARTS = {"q": random(6, 0), "k": random(2, 1), "v": random(2, 2)}


@pytest.mark.parametrize("order", [["q", "k", "v"], ["v", "q", "k"], ["k", "v", "q"]])
def test_the_order_of_the_rows_is_found(order: list[str]) -> None:
    assert rows_of(torch.cat([PARTS[name] for name in order]), PARTS) == order


def test_a_weight_that_is_more_than_its_parts_one_below_the_other_has_no_route() -> None:
    fused = torch.cat(list(PARTS.values()))
    scaled, interleaved = fused * 2, torch.stack([PARTS["k"], PARTS["v"]], 1).flatten(0, 1)
    padded, transposed = torch.cat([fused, torch.zeros(1, 8)]), PARTS["k"].T.contiguous()
    for weight, parts in (
        (scaled, PARTS),
        (interleaved, {"k": PARTS["k"], "v": PARTS["v"]}),
        (padded, PARTS),
        (fused[:-1], PARTS),
        (fused.bfloat16(), PARTS),
        (transposed, {"k": PARTS["k"]}),
        (fused, {"q": PARTS["q"], "k": PARTS["k"]}),
        (fused, {}),
    ):
        with pytest.raises(NoRoute):
            rows_of(weight, parts)


def test_equal_parts_prove_no_order() -> None:
    gate, up = torch.zeros(3, 8), torch.zeros(3, 8)
    with pytest.raises(NoRoute):
        rows_of(torch.cat([gate, up]), {"gate": gate, "up": up})


def test_parts_that_lie_together_are_not_copied() -> None:
    memory = random(20, 3)
    parts = [memory[2:5], memory[5:6], memory[6:14]]
    whole = together(parts)
    assert torch.equal(whole, memory[2:14])
    assert whole.data_ptr() == memory[2:].data_ptr()


def test_parts_that_lie_apart_are_put_together() -> None:
    memory, other = random(20, 4), random(3, 5)
    for parts in ([memory[2:5], memory[6:14]], [memory[5:9], memory[2:5]], [memory[0:3], other]):
        whole = together(parts)
        assert torch.equal(whole, torch.cat(parts))
        assert whole.data_ptr() != parts[0].data_ptr()


def test_routes_are_for_the_tensors_that_they_were_learned_from() -> None:
    routes = Routes(shapes={name: (part.shape, part.dtype) for name, part in PARTS.items()})
    assert routes.fit({name: part + 1 for name, part in PARTS.items()})
    for different in (
        PARTS | {"o": random(2, 6)},
        {name: part for name, part in PARTS.items() if name != "v"},
        PARTS | {"v": random(3, 7)},
        PARTS | {"v": PARTS["v"].bfloat16()},
    ):
        assert not routes.fit(different)
