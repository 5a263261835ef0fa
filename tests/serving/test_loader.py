"""Seeded random weights: the same for the same name wherever they are drawn, scaled so that a model of them says something."""

from __future__ import annotations

import torch

from emmy_vllm.loader import fill


def drawn(name: str, *shape: int, centre: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weight = torch.empty(shape, dtype=dtype)
    fill(weight, name, centre)
    return weight


def test_a_name_decides_the_values() -> None:
    a, b = drawn("layers.0.o_proj.weight", 64, 32), drawn("layers.1.o_proj.weight", 64, 32)
    assert torch.equal(a, drawn("layers.0.o_proj.weight", 64, 32)) and not torch.equal(a, b)
    assert torch.equal(a.bfloat16(), drawn("layers.0.o_proj.weight", 64, 32, dtype=torch.bfloat16))


def test_matrices_keep_the_scale_of_what_they_multiply() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    y = x @ drawn("w.weight", 1024, 512).T
    assert abs(float(y.std()) - 1) < 0.05 and abs(float(y.mean())) < 0.05


def test_vectors_are_near_their_centre() -> None:
    for centre, spread in ((1.0, 0.1), (0.0, 0.1), (1 / 16, 0.1 / 16)):
        found = drawn("norm.weight", 4096, centre=centre)
        assert abs(float(found.mean()) - centre) < spread / 10 and abs(float(found.std()) / spread - 1) < 0.1
