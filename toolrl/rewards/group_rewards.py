"""Rewards that compare the samples of a group: scored when a batch is leased, from what was recorded before.

A component `scored_at("group")` is a function `(group, context, **options)` that gives one score a member, each a number or
a list with one a policy turn. It sees the members that count: trained, with something sampled, with all their other
rewards. It works on the driver for every batch, and in the replay buffer for groups without spread, so it must be pure and
quick, and give the same for the same group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from toolrl.config import RewardConfig
from toolrl.errors import RunError
from toolrl.reward_records import Score, awaited_rewards, checked, has_spread, record
from toolrl.rewards.binding import bound, recorded_name
from toolrl.rewards.component import rewards, stage_of
from toolrl.rewards.group_context import GroupContext
from toolrl.trajectory import Trajectory

GroupComponent = Callable[[Sequence[Trajectory], GroupContext], Sequence[Score]]


class GroupRewardFailed(RunError):
    """A group component raised or gave something that is no reward; says which and why."""


@dataclass(frozen=True)
class GroupRewards:
    """The group components of a run. Can be pickled, as its functions can."""

    components: Mapping[str, GroupComponent]  # by the name that they are recorded under
    weights: Mapping[str, float]  # of all components, from the config

    @classmethod
    def of(cls, config: RewardConfig) -> GroupRewards:
        """Those among `rewards.components`. Raises UserError or UnknownName for an option or a name that cannot work."""
        parts = [part for part in config.components if stage_of(rewards.get(part.name)) == "group"]
        components = {recorded_name(part): bound(rewards, part, given=2) for part in parts}
        return cls(components, dict(config.weights))

    def __bool__(self) -> bool:
        return bool(self.components)

    def score(self, groups: Sequence[Sequence[Trajectory]], weights: Mapping[str, float] | None = None) -> None:
        """Writes weight × score into the rewards of the members that count; again gives the same.

        Args:
            weights: those in force, where they are not the config's.

        Raises:
            GroupRewardFailed: the run must not go on without a reward that it was to have.
        """
        in_force = {**self.weights, **(weights or {})}
        for group in groups:
            members = counting(group)
            for name in self.components if members else ():
                for member, score in zip(members, self._scores(name, members), strict=True):
                    record(member, name, score, in_force.get(name, 1.0))

    def has_signal(self, group: Sequence[Trajectory]) -> bool:
        """Whether a group whose other rewards have no spread teaches nevertheless, at whatever weight."""
        members = counting(group)
        return any(
            has_spread([sum(score) if isinstance(score, list) else score for score in self._scores(name, members)])
            for name in (self.components if members else ())
        )

    def _scores(self, name: str, members: Sequence[Trajectory]) -> list[Score]:
        try:
            scores = list(self.components[name](members, GroupContext(self.weights)))
            if len(scores) != len(members):
                raise ValueError(f"it gave {len(scores)} scores for {len(members)} members")
            return [
                checked(score, name, len(member.policy_turns)) for score, member in zip(scores, members, strict=True)
            ]
        # A component may be a user's own, whatever it raises.
        except Exception as error:
            raise GroupRewardFailed(
                f"the group reward {name!r} failed on group {members[0].group_id}: {type(error).__name__}: {error}; "
                "mend it, or remove it from rewards.components, and resume the run"
            ) from error


def counting(group: Sequence[Trajectory]) -> list[Trajectory]:
    """The members that a group reward compares."""
    return [
        member
        for member in group
        if member.outcome is not None
        and member.outcome.trained
        and any(turn.token_ids for turn in member.policy_turns)
        and not awaited_rewards(member)
    ]
