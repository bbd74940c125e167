"""`kvsparse demo`: a passkey hidden in a long text, and which cache still finds it."""

from .facts import make_fact_trials
from .model import find_model
from .passkey import Trial, make_trials
from .run import METHODS, Outcome, run_demo

__all__ = ["METHODS", "Outcome", "Trial", "find_model", "make_fact_trials", "make_trials", "run_demo"]
