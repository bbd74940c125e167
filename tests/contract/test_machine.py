"""Random sequences of everything the cache contract offers, every method against a reference that remembers all."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import CacheMachine
from methods import CORE, METHODS

_COMMON = dict(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=True)


def _run(case, examples: int, steps: int) -> None:
    with torch.no_grad():
        machine = type("Machine", (CacheMachine,), {"case": case})
        run_state_machine_as_test(
            machine, settings=settings(max_examples=examples, stateful_step_count=steps, **_COMMON)
        )


@pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)
def test_any_sequence(case):
    _run(case, 40, 12)


@pytest.mark.parametrize("case", [case for case in METHODS if case not in CORE], ids=lambda case: case.id)
def test_a_few_sequences_of_every_method(case):
    _run(case, 4, 12)


@pytest.mark.slow
@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
def test_long_sequences(case):
    """More than 5,000 sequences in all."""
    _run(case, -(-5200 // len(METHODS)), 25)
