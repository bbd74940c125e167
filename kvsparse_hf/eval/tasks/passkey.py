"""The passkey of `kvsparse demo`, at depths spread over a text of about 1,500 tokens."""

import random

from pydantic import Field

from ...demo.passkey import ANSWER_BEGINS, Trial, make_trials
from .base import Answer, Example, Setting, Task, TaskOptions


class PasskeyOptions(TaskOptions):
    """Options of the task."""

    depths: int = Field(20, ge=1, le=1000, description="depths at which the passkey is hidden, evenly spaced")


class PasskeyTask(Task):
    """A right answer begins with the two words."""

    name = "passkey"
    primary = "found"
    Options = PasskeyOptions

    def examples(self, setting: Setting) -> list[Example]:
        setting.no_data(self.name)
        trials = make_trials(setting.tokenizer, self.options.depths, setting.seed)
        random.Random(setting.seed).shuffle(trials)  # so that the first ones stand at all depths
        return [
            Example(
                id=f"{trial.depth:.4f}",
                prompt=trial.prompt,
                references=trial.passkey,
                max_new_tokens=setting.new_tokens(16),
                group={"depth": round(trial.depth, 4)},
                answer_begins=ANSWER_BEGINS,
                stop=("\n",),
            )
            for trial in trials[: setting.count(len(trials))]
        ]

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        trial = Trial(example.group["depth"], example.references, example.prompt)
        return {"found": float(trial.is_found(answer.texts[0]))}
