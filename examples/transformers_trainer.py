"""The Trainer of transformers with one callback more: a small Llama learns the bytes of a source file of Python."""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckptdeco.integrations import attach
from ckptdeco.integrations.transformers import CheckpointPolicyCallback
from ckptdeco.planning.meter import measure_step

LENGTH, WIDTH = 64, 64


def text() -> list[dict[str, torch.Tensor]]:
    """Rows of 64 bytes of the source of argparse."""
    data = torch.tensor(list(Path(argparse.__file__).read_bytes())[: 128 * LENGTH])
    return [{"input_ids": row, "labels": row} for row in data.view(-1, LENGTH)]


def train(policy: str) -> tuple[list[float], int]:
    """The losses, and the most bytes of activations that a step holds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=12, num_attention_heads=4,
        attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            tempfile.mkdtemp(), max_steps=10, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=1,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        ),
        train_dataset=text(),
        callbacks=[CheckpointPolicyCallback(policy)],
    )  # fmt: skip
    trainer.log = lambda logs, *_: losses.append(logs["loss"]) if "loss" in logs else None  # instead of printing
    losses: list[float] = []
    trainer.train()

    rows = torch.stack([row["input_ids"] for row in text()[:8]])
    with attach(model, policy):
        trace = measure_step(lambda: model(input_ids=rows, labels=rows).loss, model.parameters())
    return losses, trace.peak_bytes


if __name__ == "__main__":
    runs = {policy: train(policy) for policy in ("off", "segment=1", "segment=4, levels=2")}
    for policy, (losses, peak_bytes) in runs.items():
        print(f"{policy:<30} losses {losses[0]:.4f} to {losses[-1]:.4f}, {peak_bytes / 2**20:.1f} MiB of activations")
    (plain_losses, plain_bytes), *others = runs.values()
    for losses, peak_bytes in others:
        assert losses == plain_losses
        assert peak_bytes < plain_bytes / 3
