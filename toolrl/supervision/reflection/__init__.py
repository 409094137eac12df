"""Process reflection (PRS): a critic corrects failed trajectories in writing, and what holds is learnt. See docs/supervision.md.

`prompt`: what the critic is asked. `critic`: who it may be. `form`: what it must answer. `failures`: which trajectories are
shown to it. That a correction holds is found by running it, which `toolrl.app.correcting` does.
"""

from toolrl.supervision.reflection.chat_completions import chat_completions
from toolrl.supervision.reflection.critic import Critic, NoAnswer, Question, Reply, answer_of_critic, critics
from toolrl.supervision.reflection.failures import failed_samples
from toolrl.supervision.reflection.form import CorrectedTurn, Correction, Malformed, read_correction
from toolrl.supervision.reflection.prompt import question_of

__all__ = [
    "CorrectedTurn",
    "Correction",
    "Critic",
    "Malformed",
    "NoAnswer",
    "Question",
    "Reply",
    "answer_of_critic",
    "chat_completions",
    "critics",
    "failed_samples",
    "question_of",
    "read_correction",
]
