"""The replay store's rules over again, in memory and as plainly as possible: what the real one is compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from actors.replay import Entry, ReplaySettings
from toolrl.ledger import Ledger
from toolrl.reward_records import has_spread
from toolrl.trajectory import Outcome


@dataclass
class Sample:
    state: str = "waiting"  # waiting, running, arrived, dropped
    attempt: int = 1
    entry: Entry | None = None
    progress: Entry | None = None
    reason: str = ""


@dataclass
class Group:
    task: int
    samples: list[Sample]
    min_version: int
    worker: str | None = None
    leased_at: float = 0.0
    lease_until: float = 0.0
    batch: int | None = None  # the last batch that it was in, until it changes
    leased: bool = False
    trained: tuple[int, int] | None = None  # step, version

    @property
    def alive(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.state != "dropped"]

    @property
    def state(self) -> str:
        if not self.alive:
            return "dropped"
        if self.trained is not None:
            return "trained"
        if all(sample.state == "arrived" for sample in self.alive):
            return "leased" if self.leased else "ready"
        return "generating" if any(sample.state == "running" for sample in self.alive) else "waiting"

    @property
    def begun(self) -> bool:
        return self.state != "waiting" or any(sample.state == "arrived" for sample in self.samples)


@dataclass
class Model:
    settings: ReplaySettings
    groups: list[Group] = field(default_factory=list)
    batches: dict[int, str] = field(default_factory=dict)  # leased, acked, returned
    batch_until: dict[int, float] = field(default_factory=dict)
    batch_tasks: dict[int, list[int]] = field(default_factory=dict)
    fenced: set[str] = field(default_factory=set)
    version: int = 0
    now: float = 0.0
    reissued: Counter[str] = field(default_factory=Counter)
    fruitless_since_batch: int = 0

    def of(self, *states: str) -> list[Group]:
        return [group for group in self.groups if group.state in states]

    # Workers.

    def outstanding(self) -> int:
        unpublished = [g for g in self.of("trained") if g.trained is not None and g.trained[1] > self.version]
        return len(self.of("waiting", "generating", "ready", "leased")) + len(unpublished)

    def next_ticket(self, engine_version: int | None) -> tuple[int, list[int]] | None:
        """Task and missing samples of the ticket that the store should give out."""
        serves = self.version if engine_version is None else engine_version
        floor = self.version - self.settings.max_staleness
        room = self.outstanding() - sum(not group.begun for group in self.groups) < self.settings.max_outstanding_groups
        for group in self.of("waiting"):
            if max(group.min_version, floor) <= serves and (group.begun or room):
                return group.task, [i for i, sample in enumerate(group.samples) if sample.state == "waiting"]
        if self.fruitless_since_batch >= self.settings.max_fruitless_groups:
            return None
        useful = len(self.groups) - len(self.of("dropped"))
        wanted = self.settings.total_groups is None or useful < self.settings.total_groups
        if serves >= self.version and wanted and self.outstanding() < self.settings.max_outstanding_groups:
            return len(self.groups), list(range(self.settings.group_size))
        return None

    def lease(self, worker: str, task: int, engine_version: int | None) -> Group:
        if task == len(self.groups):
            samples = [Sample() for _ in range(self.settings.group_size)]
            self.groups.append(Group(task, samples, self.version))
        group = self.groups[task]
        floor = self.version - self.settings.max_staleness
        needed = max(group.min_version, floor)
        begun_with = [needed if engine_version is None else engine_version]
        for sample in group.samples:
            if sample.progress is not None and (sample.progress.oldest_version or 0) < floor:
                sample.progress = None
            if sample.progress is not None:
                begun_with.append(sample.progress.oldest_version or 0)
            if sample.state == "waiting":
                sample.state = "running"
        group.min_version = min(begun_with)
        group.worker, group.leased_at = worker, self.now
        group.lease_until = self.now + self.settings.worker_lease_s
        return group

    def fail(self, group: Group, sample: Sample, reason: str, *, keep_progress: bool, counts: bool = True) -> str:
        sample.entry = None
        sample.progress = sample.progress if keep_progress else None
        if counts and sample.attempt >= self.settings.max_attempts:
            sample.state, sample.reason, sample.progress = "dropped", reason, None
            return "dropped"
        sample.state = "waiting"
        sample.attempt += counts
        self.reissued[reason] += 1
        return "reissued"

    def settle(self, group: Group) -> None:
        group.trained = None
        if group.state in ("ready", "dropped"):
            group.worker = None
            rewards = [sample.entry.reward for sample in group.alive if sample.entry is not None]
            uniform = len(rewards) > 0 and not has_spread(rewards)
            few = len(rewards) < 2
            if group.alive and (few or (uniform and self.settings.drop_uniform_groups)):
                unrewarded = any(sample.reason == "reward_missing" for sample in group.samples)
                self.fruitless_since_batch += not few or unrewarded
                for sample in group.alive:
                    sample.state, sample.reason = "dropped", "too_few" if few else "uniform"
        elif group.state == "waiting":
            group.worker, group.batch = None, None

    def put(self, worker: str, entry: Entry, task: int) -> str:
        group = self.groups[task]
        sample = group.samples[entry.sample_index]
        assert entry.outcome is not None
        if worker in self.fenced:
            return "fenced"
        if sample.state == "dropped":
            return "closed"
        if sample.state == "arrived" or (not entry.outcome.trained and group.worker != worker):
            return "duplicate"
        if entry.outcome.reissued:
            keep = entry.outcome is Outcome.INFRA_ERROR
            return self.fail(group, sample, entry.outcome.value, keep_progress=keep)
        sample.progress = None
        if not entry.outcome.trained:
            sample.state, sample.reason = "dropped", entry.outcome.value
            return "dropped"
        sample.state, sample.entry = "arrived", entry
        return "accepted"

    def give_back(self, group: Group, reason: str | None) -> None:
        for sample in group.samples:
            if sample.state == "running":
                if reason is None:
                    sample.state = "waiting"
                else:
                    self.fail(group, sample, reason, keep_progress=True)
        self.settle(group)

    def expire_tickets(self) -> list[int]:
        late = [group for group in self.of("generating") if group.lease_until < self.now]
        for group in late:
            self.give_back(group, "worker_lost")
        return [group.task for group in late]

    # The learner.

    def expire_batches(self) -> list[int]:
        late = [b for b, state in self.batches.items() if state == "leased" and self.batch_until[b] < self.now]
        for batch in late:
            self.take_back(batch)
        return late

    def take_back(self, batch: int) -> None:
        self.batches[batch] = "returned"
        for group in self.groups:
            if group.batch == batch and group.leased:
                group.leased = False

    def reissue_stale(self, learner_version: int) -> None:
        for group in self.of("ready"):
            old = [
                s
                for s in group.alive
                if s.entry and (s.entry.oldest_version or 0) < learner_version - self.settings.max_staleness
            ]
            for sample in old:
                self.fail(group, sample, "stale", keep_progress=False)
            if old:
                group.min_version = self.version
                self.settle(group)

    def age(self, group: Group) -> int:
        """The oldest version of any token in the group, or that it can still get."""
        ages = []
        for sample in group.alive:
            finished = sample.entry.oldest_version if sample.entry is not None else None
            running = group.min_version if sample.state == "running" else None
            ages.append(next((age for age in (finished, running) if age is not None), self.version + 1))
        return min(ages)

    def next_batch(self, n: int, learner_version: int, patient: bool) -> list[int] | None:
        """Tasks that fifo should choose. Impatience closes groups on the way."""

        def last_chance(group: Group) -> bool:
            return learner_version - self.age(group) == self.settings.max_staleness

        def choose() -> list[int] | None:
            ready = sorted(self.of("ready"), key=lambda group: (not last_chance(group), group.task))
            urgent = sum(last_chance(group) for group in ready)
            waits = patient and urgent < n and any(last_chance(group) for group in self.of("waiting", "generating"))
            return None if waits or len(ready) < n else sorted(group.task for group in ready[:n])

        chosen = choose()
        if chosen is None and not patient:
            for group in self.of("waiting", "generating"):
                arrived = [sample for sample in group.samples if sample.state == "arrived"]
                if len(arrived) >= 2 and len(self.of("ready")) < n:
                    for sample in group.alive:
                        if sample.state != "arrived":
                            sample.state, sample.reason, sample.progress = "dropped", "late", None
                    self.settle(group)
            chosen = choose()
        return chosen

    def rollback(self, step: int, version: int) -> tuple[int, int]:
        self.fruitless_since_batch = 0
        workers = {group.worker for group in self.groups if group.worker}
        self.fenced |= workers
        for batch, state in list(self.batches.items()):
            if state == "leased":
                self.take_back(batch)
        back = [group for group in self.of("trained") if group.trained is not None and group.trained[0] > step]
        for group in back:
            assert group.batch is not None
            self.batches[group.batch] = "returned"
            group.trained, group.leased = None, False
        self.version = version
        gone = 0
        for group in self.of("ready", "waiting", "generating"):
            group.batch = None
            group.min_version = min(group.min_version, version)
            for sample in group.alive:
                if sample.progress is not None and (sample.progress.newest_version or 0) > version:
                    sample.progress = None
                if sample.state == "running":
                    sample.state = "waiting"
                if sample.entry is not None:
                    newer = (sample.entry.newest_version or 0) > version
                    older = (sample.entry.oldest_version or 0) < version - self.settings.max_staleness
                    if newer or older:
                        gone += 1
                        self.fail(group, sample, "rolled_back" if newer else "stale", keep_progress=False, counts=False)
                        group.min_version = version
            self.settle(group)
        return len(back), gone

    def reject(self, batch: int, reason: str) -> None:
        self.batches[batch] = "rejected"
        for task in self.batch_tasks[batch]:
            group = self.groups[task]
            for sample in group.alive:
                sample.state, sample.reason = "dropped", reason
            group.leased, group.batch = False, None

    # The account.

    def counts(self) -> dict[str, int]:
        """The ledger's states of samples, counted here."""
        found: Counter[str] = Counter()
        for group in self.groups:
            for sample in group.samples:
                if sample.state == "dropped":
                    found[f"dropped:{sample.reason}"] += 1
                elif group.state in ("ready", "leased", "trained"):
                    found[group.state] += 1
                else:
                    found[sample.state] += 1
        return dict(found)


def counts_of(ledger: Ledger) -> dict[str, int]:
    """The same of a real ledger."""
    names = ("trained", "ready", "leased", "waiting", "running", "arrived")
    states = {name: getattr(ledger, name) for name in names}
    states |= {f"dropped:{reason}": n for reason, n in ledger.dropped.items()}
    return {state: n for state, n in states.items() if n}
