"""The critic of one rank: a value head on the policy's backbone, or a model of its own, with an optimiser of its own.

- `shared`: one linear layer in float32, zero at first, on the backbone's last hidden states. By default they are detached:
  the policy then learns exactly what it would learn without a critic, and nothing of the value loss enters the ratios, the
  KL or the gap to the engine. Training of some hundred small steps has little to win from features made for the value and
  a policy to lose. `backbone_gradient` lets the gradient through: it then is part of the policy's, clipped and applied with
  it, and `loss_weight` says how strong it is.
- `own`: a backbone of its own (of another folder, or a copy of the policy) under the same layer, all of it trained.

Every rank holds the whole critic, whatever the policy's ZeRO stage: losses are divided by global counts and gradients
summed over ranks, so the result depends on neither ranks nor micro-batches. A model of its own costs 16 bytes a
parameter on each rank. Where it computes in bfloat16, gradients and the optimiser's weights are float32, as DeepSpeed's are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from learner.critic_loss import ValueRows, value_losses
from learner.metrics import Sums
from learner.optimizer import CheckedAdamW
from learner.packing import PackedBatch
from learner.policy import PolicyModel, hidden_states, load_policy
from learner.sequence import ValueTargets
from learner.settings import RankSettings
from learner.ulysses import check_heads
from toolrl.config import CriticConfig


class Critic:
    """See the module. `backward` accumulates, `take_step` is collective."""

    def __init__(
        self,
        config: CriticConfig,
        width: int,
        backbone: torch.nn.Module | None = None,
        *,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """`width` is that of the hidden states, `backbone` the model of an `own` critic."""
        self.config, self.world, self.backbone = config, world, backbone
        self.head: Any = torch.nn.utils.skip_init(torch.nn.Linear, width, 1, device=device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        named = {f"head.{name}": weight for name, weight in self.head.named_parameters()}
        if backbone is not None:
            named |= {f"backbone.{name}": weight for name, weight in backbone.named_parameters()}
        self.weights: dict[str, torch.Tensor] = named
        # What the optimiser holds: float32 copies of 16-bit weights, other weights themselves.
        self.masters = {
            name: weight if weight.dtype == torch.float32 else weight.detach().float().requires_grad_()
            for name, weight in named.items()
        }
        self.optimizer = CheckedAdamW(
            self.masters.values(),
            clip=config.gradient_clip,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
        )

    @property
    def reads_policy(self) -> bool:
        """Whether it needs the policy's hidden states."""
        return self.backbone is None

    @property
    def joins_policy(self) -> bool:
        """Whether its loss trains the policy's backbone too."""
        return self.reads_policy and self.config.backbone_gradient

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it holds: weights, what the optimiser has of them, the optimiser's own."""
        yield from {id(each): each for each in (*self.weights.values(), *self.masters.values())}.values()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def values(self, batch: PackedBatch, rows: ValueRows, states: torch.Tensor | None = None) -> torch.Tensor:
        """[K] float32. `states` are the policy's for a critic that reads them, as `PolicyModel` gives them."""
        own = batch.own(rows.rows)
        if self.backbone is not None:
            states = hidden_states(self.backbone, batch).index_select(0, own.rows)
        elif states is None:
            raise ValueError("a shared critic needs the policy's hidden states")
        elif not self.joins_policy:
            states = states.detach()
        return own.join(self.head(states.float()).squeeze(1))

    def loss(
        self, values: torch.Tensor, targets: Sequence[ValueTargets], turns_in_update: int, sums: Sums
    ) -> torch.Tensor:
        """This micro-batch's part of the update's loss, 0-dim; `targets` of its sequences, in order."""
        old = [torch.from_numpy(each.old_values) for each in targets]
        returns = [torch.from_numpy(each.returns) for each in targets]
        nothing = [torch.zeros(0)]
        losses, clipped = value_losses(
            values,
            torch.cat(old or nothing).to(values),
            torch.cat(returns or nothing).to(values),
            self.config.value_clip,
        )
        loss = losses.sum() / max(1, turns_in_update)
        sums.add(value_loss=loss, value_clipped=clipped.sum(), value_turns=torch.as_tensor(len(values)).to(loss))
        return loss * self.config.loss_weight

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradient of a part of the loss that is not part of the policy's."""
        loss.backward()
        for name, weight in self.weights.items():
            master = self.masters[name]
            if master is not weight and weight.grad is not None:
                wide = weight.grad.float()
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                weight.grad = None

    def take_step(self, scale: float = 1.0) -> tuple[float, bool]:
        """(global gradient norm before clipping, whether the step was applied: not where it is not finite); collective.

        Args:
            scale: a factor on the accumulated gradient, for one that came through the policy's engine.
        """
        for master in self.masters.values():
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad.mul_(scale)
            if self.world > 1:
                torch.distributed.all_reduce(master.grad)
        self.optimizer.step()
        self._to_model()
        self.optimizer.zero_grad()
        return self.optimizer._global_grad_norm, not self.optimizer.overflow

    def start_from(self, policy: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A copy of the policy becomes one of the policy as it is now (after a supervised start), with a fresh optimiser.

        Nothing for a critic of another kind or folder. `policy`: its weights by name; iterated in any case, which may be
        collective.
        """
        copies = self.backbone is not None and self.config.model is None
        with torch.no_grad():
            for name, tensor in policy:
                own = self.masters.get(f"backbone.{name.partition('.')[2]}") if copies else None
                if own is not None:
                    own.copy_(tensor)
        self._to_model()
        self.optimizer.state.clear()

    def state(self) -> dict[str, Any]:
        """For a checkpoint; the same on every rank."""
        weights = {name: master.detach() for name, master in self.masters.items()}
        return {"kind": self.config.kind, "weights": weights, "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """What `state` gave. Raises ValueError for a critic of another kind."""
        if state["kind"] != self.config.kind or set(state["weights"]) != set(self.masters):
            raise ValueError(
                f"the checkpoint holds a critic of kind {state['kind']!r} or of another model, "
                f"this learner has critic.kind={self.config.kind}; continue with the settings it was saved with"
            )
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state["weights"][name])
        self._to_model()
        self.optimizer.load_state_dict(state["optimizer"])

    def _to_model(self) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                if self.masters[name] is not weight:
                    weight.copy_(self.masters[name])


def make_critic(settings: RankSettings, policy: PolicyModel, *, world: int) -> Critic | None:
    """The critic that the settings ask for.

    Raises:
        ValueError: the folder of an `own` critic holds a model with a smaller vocabulary than the policy's.
    """
    config = settings.critic
    if config.kind == "none":
        return None
    model = policy.causal_lm.config.get_text_config()
    if config.kind == "shared":
        return Critic(config, model.hidden_size, world=world, device=settings.device)
    folder = Path(config.model or settings.model_dir)
    loaded = load_policy(
        folder,
        dtype=settings.dtype,
        chunk=settings.learner.logprob_chunk_tokens,
        gradient_checkpointing=settings.learner.gradient_checkpointing,
        trust_remote_code=settings.trust_remote_code,
    ).causal_lm
    check_heads(loaded, settings.learner.sequence_parallel)
    own = loaded.config.get_text_config()
    if own.vocab_size < model.vocab_size:
        raise ValueError(
            f"critic.model={folder}: a vocabulary of {own.vocab_size}, the policy has {model.vocab_size}; "
            "the critic reads the policy's tokens, so take a model with the same tokenizer"
        )
    backbone = loaded.base_model.to(settings.device)
    return Critic(config, own.hidden_size, backbone, world=world, device=settings.device)
