"""One training step, and the state that a training is resumed from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from smollm2_training.adapter import Adapter
from smollm2_training.batches import Batch
from smollm2_training.losses import cross_entropy, divergence
from smollm2_training.network import Network


@dataclass(frozen=True)
class Objective:
    """What the three losses weigh, and where the base model is the teacher.

    Attributes:
        text: weight of the cross-entropy of real text.
        tasks: weight of the cross-entropy of answers.
        divergence: weight of KL(base ‖ model) on the beginnings of real text.
        teacher_tokens: tokens of each batch that the base model reads.
        teacher_context: its context; positions beyond are learned from the text alone.
    """

    text: float = 1.0
    tasks: float = 1.0
    divergence: float = 4.0
    teacher_tokens: int = 16_384
    teacher_context: int = 8192

    def taught(self, text_rows: int, length: int) -> tuple[int, int]:
        """How many of the text rows are compared with the base model, and how many tokens of each."""
        if not text_rows:
            return 0, 0
        rows = min(text_rows, max(1, self.teacher_tokens // min(length, 2048)))
        return rows, min(length, self.teacher_tokens // rows, self.teacher_context)


@dataclass
class Progress:
    """Where the training stands.

    Attributes:
        step: optimizer steps.
        warm_steps: of them, those since the optimizer's state was last new.
        tokens: tokens seen, by all processes.
        seconds: wall-clock time of all legs.
    """

    step: int = 0
    warm_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Of one batch, still on the device.

    Attributes:
        losses: mean loss by name, of those that the batch has rows for; after a step the gradient's norm too.
        right: bool [answers' tokens]; which were predicted.
    """

    losses: dict[str, Tensor]
    right: Tensor


class Trainer:
    """Adapter, optimizer and progress.

    Args:
        adapter: what is trained.
        network: the forward pass.
        objective: what the losses weigh.
        compiled: fuse the losses' arithmetic.
    """

    def __init__(self, adapter: Adapter, network: Network, objective: Objective, *, compiled: bool = False) -> None:
        self.adapter, self.network, self.objective, self._compiled = adapter, network, objective, compiled
        self._teacher = Network(network.shape, attention=network.attention)
        self.device = adapter.base.embedding.device
        self.optimizer = torch.optim.AdamW(
            adapter.parameters(), betas=(0.9, 0.99), weight_decay=0.0, fused=self.device.type == "cuda"
        )
        self.progress = Progress()

    def losses(self, batch: Batch) -> Outcome:
        """Forward pass of one batch; gradients reach the adapter through the losses."""
        tokens = torch.from_numpy(batch.tokens).to(self.device, non_blocking=True).long()
        rows, length = tokens.shape
        weights = self.adapter.merged()
        hidden = self.network.rows(weights, tokens, self.adapter.rope_base).view(rows, length, -1)
        losses: dict[str, Tensor] = {}
        right = torch.empty(0, dtype=torch.bool, device=self.device)
        if batch.text_rows:
            losses |= self._text_losses(tokens[: batch.text_rows], hidden[: batch.text_rows])
        if len(batch.places):
            places = torch.from_numpy(batch.places).to(self.device)
            scale = torch.from_numpy(batch.weights).to(self.device)
            # The token before each learned one predicts it.
            predicting = hidden.flatten(0, 1).index_select(0, places - 1)
            targets = tokens.flatten()[places]
            total, right = cross_entropy(predicting, weights.embedding, targets, scale, compiled=self._compiled)
            losses["tasks"] = total / scale.sum()
        return Outcome(losses, right)

    def _text_losses(self, tokens: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        embedding = self.adapter.base.embedding
        taught_rows, taught = self.objective.taught(*tokens.shape)
        with torch.no_grad():
            base = self.adapter.base
            teacher = self._teacher.rows(base, tokens[:taught_rows, :taught], self.network.shape.rope_base)
        student = hidden[:taught_rows, :taught].flatten(0, 1)
        ones = torch.ones(len(student), device=self.device)
        total, _ = divergence(student, embedding, teacher, ones, compiled=self._compiled)
        losses = {"kl": total / len(student)}

        learned = torch.ones(tokens.shape, dtype=torch.bool)
        learned[:taught_rows, :taught] = False
        learned[:, -1] = False
        places = learned.flatten().nonzero()[:, 0].to(self.device)
        if len(places):
            predicting = hidden.flatten(0, 1).index_select(0, places)
            targets = tokens.flatten()[places + 1]
            ones = torch.ones(len(places), device=self.device)
            total, _ = cross_entropy(predicting, embedding, targets, ones, compiled=self._compiled)
            losses["text"] = total / len(places)
        return losses

    def update(self, batch: Batch, rate: float) -> Outcome:
        """One optimizer step on ``batch``, and on those of the processes that train with this one."""
        share = {"text": self.objective.text, "tasks": self.objective.tasks, "kl": self.objective.divergence}
        outcome = self.losses(batch)
        loss = torch.stack([share[name] * value for name, value in outcome.losses.items()]).sum()
        loss.backward()
        parameters = self.adapter.parameters()
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if processes > 1:
            _average(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.warm_steps += 1
        self.progress.tokens += processes * batch.tokens.size
        losses = {name: value.detach() for name, value in outcome.losses.items()}
        return Outcome({**losses, "gradient": norm.detach()}, outcome.right)

    def save(self, path: Path) -> None:
        """Write everything that resuming needs, whole or not at all."""
        state = {
            "parameters": [parameter.detach().cpu() for parameter in self.adapter.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Resume from what ``save`` wrote."""
        state = torch.load(path, map_location=self.device)
        with torch.no_grad():
            for parameter, saved in zip(self.adapter.parameters(), state["parameters"], strict=True):
                parameter.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])


def _average(parameters: list[Tensor]) -> None:
    """The mean of the processes' gradients, in one exchange."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, dist.ReduceOp.AVG)
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
