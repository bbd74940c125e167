"""A small model of this package that recalls facts and solves chains of sums: what a cache loses shows at once, on a CPU."""

from .model import LENGTH, STEPS, load_model
from .tasks import TASKS, Question, make_questions
from .vocabulary import make_tokenizer

__all__ = ["LENGTH", "STEPS", "TASKS", "Question", "load_model", "make_questions", "make_tokenizer"]
