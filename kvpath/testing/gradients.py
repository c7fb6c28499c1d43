"""Gradients: equal by every route, and those of the function that is computed."""

import torch
from torch import Tensor

from kvpath.model.decoder import Decoder
from kvpath.testing.routes import difference, worst
from kvpath.testing.toys import Toy, tokens

LENGTH = 9
STEP = 1e-4


def checkpointed(toy: Toy) -> float:
    """With activation checkpointing: logits and the gradients of all parameters."""
    results = []
    for checkpointing in (False, True):
        model = toy.decoder()
        model.activation_checkpointing = checkpointing
        found = model(tokens(2, LENGTH))
        assert isinstance(found, Tensor)
        loss(model).backward()
        results.append([found, *gradients(model)])
    return worst([difference(found, expected) for expected, found in zip(*results, strict=True)])


def suffix(toy: Toy) -> float:
    """The gradients of the last positions' logits, where no more is computed than these need."""
    results = []
    for wanted in (None, 3):
        model = toy.decoder()
        found = model(tokens(2, LENGTH), wanted=wanted)
        assert isinstance(found, Tensor)
        found[:, -3:].square().sum().backward()
        results.append(gradients(model))
    return worst([difference(found, expected) for expected, found in zip(*results, strict=True)])


def finite_differences(toy: Toy) -> float:
    """The change of the loss along random directions, against the gradients; relative where it is above 1.

    One direction for the parameters of each name in all layers. No other comparison sees a gradient that is dropped on
    every route.
    """
    model = toy.decoder()
    loss(model).backward()
    draw = torch.Generator().manual_seed(4)
    groups: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for (name, parameter), gradient in zip(model.named_parameters(), gradients(model), strict=True):
        direction = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
        groups.setdefault(name.split(".", 2)[-1], []).append((parameter, direction, gradient))
    differences = []
    for group in groups.values():
        losses, length = [], sum(float(direction.square().sum()) for _, direction, _ in group) ** 0.5
        for step in (STEP, -2 * STEP, STEP):
            with torch.no_grad():
                for weights, direction, _ in group:
                    weights.add_(direction, alpha=step / length)
                losses.append(float(loss(model)))
        slope = (losses[0] - losses[1]) / (2 * STEP)
        expected = sum(float((gradient * direction).sum()) for _, direction, gradient in group) / length
        differences.append(abs(expected - slope) / max(1.0, abs(slope)))
    return worst(differences)


def loss(model: Decoder) -> Tensor:
    """The sum over all positions, float64."""
    sums = model(tokens(2, LENGTH), tokens(2, LENGTH, seed=3))
    assert not isinstance(sums, Tensor)
    return sums.total


def gradients(model: Decoder) -> list[Tensor]:
    """Of all parameters; zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
