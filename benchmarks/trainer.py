"""The transformers Trainer on the same model, for ``benchmarks.step``."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.plain_llama import token_loss


class _Clock(TrainerCallback):
    """Time from the start of one step to the end of its update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


class _WithLoss(nn.Module):
    """The calling convention of the Trainer: a dict with the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """``input_ids``: ``[batch, seq + 1]``."""
        return {"loss": token_loss(self.model, input_ids)}


class _Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random samples, as the other contenders get."""

    def __init__(self, count: int, length: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(0, vocab_size, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index]}


def trainer_seconds(
    model: nn.Module, rounds: int, *, samples: int, length: int, vocab_size: int
) -> list[float]:
    """Seconds of each of ``rounds`` steps after two of warm-up."""
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=samples,
            max_steps=rounds + 2,
            use_cpu=next(model.parameters()).device.type == "cpu",
            ddp_find_unused_parameters=False,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        data = _Tokens((rounds + 2) * samples * 2, length, vocab_size)
        trainer = Trainer(_WithLoss(model), arguments, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.seconds[2:]
