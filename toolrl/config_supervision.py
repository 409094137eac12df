"""The settings of the supervision signals; see docs/supervision.md. Imports no torch.

The first signal, supervised training before reinforcement learning (`sft_then_rl`), is `cold_start`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

# OmegaConf reads these annotations at run time and wants Optional[X] spelled so.
# ruff: noqa: UP045


@dataclass
class ReferencesConfig:
    """Where trajectories come from that show how a task is done. A reference serves the task with its very prompt."""

    cold_start: bool = True  # the right ones of the run's cold-start traces
    path: Optional[str] = None  # and those of a Parquet file, of a cold start or of any run
    solved_tasks: int = 0  # and of the run's first so many tasks, played by the cold start's programs without a mistake
    own: bool = True  # and the run's own right trajectories, the newest of each task
    max_tasks: int = 4096  # of those given, and again of the run's own; memory: one trajectory each
    min_calls: int = 0  # legal calls in a reference


@dataclass
class OffPolicyConfig:
    """References in the place of rollouts."""

    per_group: int = 0  # of loop.group_size; 0: off. A task without a reference is rolled out as ever


@dataclass
class HintConfig:
    """Rollouts with a hint in the system message, which is taken out for the update."""

    per_group: int = 0  # of loop.group_size; 0: off
    # At the end of the system message; {answer} stands for the task's answer.
    text: str = "Hint: call a tool before you answer. Write each call whole, and nothing after it."


@dataclass
class ErroneousConfig:
    """Supervised training on the references of the batch's tasks whose samples all failed."""

    enabled: bool = False  # one supervised step after each step of the loop with such tasks and references of them
    max_references: int = 32  # in one step; drawn evenly where there are more
    learning_rate: Optional[float] = None  # of the supervised steps; None: the learner's of that moment


@dataclass
class InterleavedConfig:
    """Supervised steps between the steps of the loop."""

    every_steps: int = 0  # after every so many; 0: off
    steps: int = 1  # so many supervised steps at a time; 0: as many as show every reference once
    batch_size: int = 32  # references in one
    learning_rate: Optional[float] = None  # of the supervised steps; None: the learner's of that moment


@dataclass
class ReflectionConfig:
    """Supervised training on corrections of failed trajectories, written by a critic and found right by running them."""

    critic: Optional[str] = None  # chat_completions, or an import path module:function; None: off
    base_url: Optional[str] = None  # chat_completions: of an OpenAI-compatible endpoint, e.g. http://host:8000/v1
    model: Optional[str] = None  # chat_completions: its name there
    api_key_env: Optional[str] = None  # chat_completions: the environment variable that holds the key; None: no key
    # What the critic is asked; {question} {tools} {transcript} {answer} {form} are filled in. None: toolrl's own words.
    prompt: Optional[str] = None
    show_answer: bool = True  # tells the critic the task's answer, where it is known
    temperature: Optional[float] = 0.2  # of the critic; None: the endpoint's
    max_tokens: Optional[int] = 2048  # of one answer; None: the endpoint's
    extra_body: dict[str, Any] = field(default_factory=dict)  # more fields of the request
    retries: int = 2  # of one question, where the endpoint is busy, broken or gone
    deadline_s: float = 120.0  # from the question to a correction that was run and checked
    concurrency: int = 4  # questions at a time
    queue: int = 32  # trajectories at the critic and corrections not learnt yet; beyond, nothing more is asked
    every_steps: int = 1  # the critic is asked after every so many steps
    trajectories_per_step: int = 4  # failed ones that it is asked about, of as many tasks
    wait_s: float = 0.0  # how long a step waits for what is under way; 0: what comes later is learnt at a later step
    min_calls: int = 1  # legal calls that a correction must hold, all in all
    must_use_results: bool = True  # a correction must write something that only a tool's result told
    steps: int = 1  # supervised steps after a step of the loop, at most
    batch_size: int = 8  # corrections in one, at most
    learning_rate: Optional[float] = None  # of the supervised steps; None: the learner's of that moment


@dataclass
class SupervisionConfig:
    """Signals against format collapse, all off; any of them go together."""

    references: ReferencesConfig = field(default_factory=ReferencesConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    hint: HintConfig = field(default_factory=HintConfig)
    erroneous: ErroneousConfig = field(default_factory=ErroneousConfig)
    interleaved: InterleavedConfig = field(default_factory=InterleavedConfig)
    reflection: ReflectionConfig = field(default_factory=ReflectionConfig)
