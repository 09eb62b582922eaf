"""What modules take and return: differences by hand, forwards in steps, and names of modules."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compare_q.backends.base import ModulePlace
from compare_q.backends.common.errors import ModelError
from compare_q.backends.layers.module_outputs import (
    ModuleHooks,
    OutputComparer,
    OutputWriter,
    compared_positions,
    relative_differences,
)
from compare_q.backends.module_differences import MOST_POSITIONS

LENGTH = 12
SIZE = 4


class Layer(nn.Module):
    """Doubles its input in a linear layer; returns (hidden states, residual) with ``pairs``."""

    def __init__(self, shared: nn.Module, *, pairs: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(SIZE, SIZE, bias=False)
        nn.init.eye_(self.proj.weight)
        self.proj.weight.data *= 2
        self.shared = shared
        self.pairs = pairs

    def forward(self, state: Any, residual: Any = None) -> Any:
        if residual is not None:
            state = state + residual
        hidden = self.shared(self.proj(state))
        if self.pairs:
            return hidden, state
        return hidden + state


class Model(nn.Module):
    """Two layers in a list "h", as in GPT-2, and a norm after them."""

    def __init__(self, *, pairs: bool = False) -> None:
        super().__init__()
        shared = nn.Identity()
        self.h = nn.ModuleList([Layer(shared, pairs=pairs), Layer(shared, pairs=pairs)])
        self.norm = nn.Identity()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: Any = (states,)
        for layer in self.h:
            output = layer(*output)
            if not isinstance(output, tuple):
                output = (output,)
        return self.norm(sum(output))


def states_of(length: int = LENGTH) -> torch.Tensor:
    return torch.randn(length, SIZE, generator=torch.Generator().manual_seed(0))


def show(model: Model, visitor: Any, *, step: int = LENGTH, head: float = 1.0) -> ModuleHooks:
    """Run the states, ``step`` positions per forward; the head multiplies by ``head``."""
    pairs = bool(model.h[0].pairs)
    hooks = ModuleHooks(model, list(model.h), visitor, LENGTH, pairs=pairs)
    states = states_of()
    logits = []
    for begin in range(0, LENGTH, step):
        positions = torch.arange(LENGTH)[begin : begin + step]
        hooks.begin(positions, positions)
        logits.append(head * model(states[begin : begin + step]))
    hooks.show_logits(logits, LENGTH)
    hooks.remove()
    return hooks


def recorded(model: Model, file: Path, *, step: int = LENGTH) -> Path:
    writer = OutputWriter(file)
    show(model, writer, step=step)
    writer.close()
    return file


def compared(model: Model, file: Path, **keys: Any) -> dict[tuple[str, str], float]:
    with closing(OutputComparer(file)) as comparer:
        show(model, comparer, **keys)
        differences = {}
        for place, difference in comparer.differences():
            differences[place.name, place.side] = difference
    return differences


def test_a_wrong_weight_shows_at_its_output_first(tmp_path: Path) -> None:
    """The second projection is 2.2 instead of 2: its output changes by 0.1, the layer's, which is 3
    times the input, by 0.2 / 3.
    """
    file = recorded(Model(), tmp_path / "outputs")
    wrong = Model()
    wrong.h[1].proj.weight.data *= 1.1
    differences = compared(wrong, file)
    assert list(differences) == [
        ("layers.0.proj", "input"),
        ("layers.0.proj", "output"),
        ("layers.0", "output"),
        ("layers.1.proj", "input"),
        ("layers.1.proj", "output"),
        ("layers.1", "output"),
        ("norm", "input"),
        ("norm", "output"),
        ("lm_head", "output"),
    ]
    values = list(differences.values())
    assert values[:4] == [0, 0, 0, 0]
    assert values[4] == pytest.approx(0.1, rel=1e-5)
    assert values[5:] == pytest.approx([0.2 / 3] * 4, rel=1e-5)
    # Only the head is wrong.
    differences = compared(Model(), file, head=1.5)
    assert differences.pop(("lm_head", "output")) == pytest.approx(0.5, rel=1e-5)
    assert set(differences.values()) == {0.0}


def test_a_pair_counts_as_its_sum(tmp_path: Path) -> None:
    """vLLM's layers return what another engine's layers add: both have the same states."""
    file = recorded(Model(), tmp_path / "outputs")
    differences = compared(Model(pairs=True), file)
    assert differences["layers.0", "output"] == pytest.approx(0, abs=1e-6)
    assert differences["layers.1", "output"] == pytest.approx(0, abs=1e-6)


def test_a_window_in_steps_is_one_window(tmp_path: Path) -> None:
    """5 + 5 + 2 positions: the difference is over all positions; other steps are refused."""
    file = recorded(Model(), tmp_path / "outputs", step=5)
    wrong = Model()
    wrong.h[0].proj.weight.data *= 1.1
    assert compared(wrong, file, step=5)["layers.0.proj", "output"] == pytest.approx(0.1, rel=1e-5)
    for step in (4, LENGTH):
        with pytest.raises(ModelError):
            compared(wrong, file, step=step)
    # A run that ends early.
    with closing(OutputComparer(file)) as comparer, pytest.raises(ModelError):
        comparer.differences()


def test_a_late_fault_is_not_hidden_by_a_large_first_state(tmp_path: Path) -> None:
    """The root mean square of each position's relative difference: 0.5 at 3 of 12 positions is
    0.25, though the first position's state is a million times as large.
    """
    rows = np.ones((12, 2), np.float32)
    rows[0] = 1e6
    wrong = rows.copy()
    wrong[9:] *= 1.5
    differences = relative_differences(wrong, rows)
    assert math.sqrt(np.mean(differences**2)) == pytest.approx(0.25)


def test_values_that_are_not_finite() -> None:
    """Equal infinities (the logits of padding) are no difference; new ones are infinite.  A row of
    zeros has no relative difference.
    """
    other = np.array([[3, 4], [3, np.inf], [3, 4], [0, 0]], np.float32)
    rows = np.array([[3, 4.5], [3, np.inf], [3, np.nan], [1, 1]], np.float32)
    assert relative_differences(rows, other).tolist() == [pytest.approx(0.1), 0.0, math.inf]
    assert relative_differences(other[:3], rows[:3])[2] == math.inf


def test_compared_positions_are_spread_and_the_same_for_every_run() -> None:
    assert compared_positions(5).tolist() == [0, 1, 2, 3, 4]
    positions = compared_positions(4096)
    assert len(set(positions.tolist())) == MOST_POSITIONS
    assert positions.tolist() == sorted(compared_positions(4096).tolist())
    # Neither one half of the window nor every second position only.
    assert 0.3 < np.mean(positions < 2048) < 0.7
    assert 0.3 < np.mean(positions % 2) < 0.7


def test_a_failing_visitor_is_reported_at_the_end() -> None:
    """An error in a hook would end vLLM's engine."""

    class Failing:
        def begin(self, positions: Any) -> None:
            pass

        def visit(self, place: ModulePlace, rows: Any) -> None:
            raise OSError("No space left on device")

    hooks = ModuleHooks(model := Model(), list(model.h), Failing(), LENGTH)
    hooks.begin(torch.arange(LENGTH), torch.arange(LENGTH))
    model(states_of())
    with pytest.raises(ModelError, match="No space left"):
        hooks.remove()
    # The hooks are gone.
    model(states_of())


def test_a_model_without_this_list_of_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="Model"):
        ModuleHooks(Model(), [nn.Identity()], OutputWriter, LENGTH)  # type: ignore[arg-type]
