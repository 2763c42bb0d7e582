"""LoRA of peft in a frozen BERT, without enable_input_require_grads: learns to fill in bytes of source text."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM

import ckptdeco
from ckptdeco.planning.meter import measure_step

LENGTH, WIDTH, MASK, N_STEPS = 64, 64, 256, 10


def batches() -> list[dict[str, torch.Tensor]]:
    """Rows of 64 bytes of the source of argparse, some bytes masked."""
    data = torch.tensor(list(Path(argparse.__file__).read_bytes())[: 8 * N_STEPS * LENGTH])
    rows = data.view(N_STEPS, 8, LENGTH)
    is_masked = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    inputs, labels = rows.masked_fill(is_masked, MASK), rows.masked_fill(~is_masked, -100)
    return [{"input_ids": one, "labels": other} for one, other in zip(inputs, labels, strict=True)]


def train(policy: ckptdeco.Policy) -> tuple[list[float], int]:
    """The losses, and the most bytes of activations that a step holds."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=MASK + 1, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=12, num_attention_heads=4
    )
    lora = LoraConfig(r=8, target_modules=["query", "value"], lora_dropout=0.1, modules_to_save=["cls"])
    model = get_peft_model(BertForMaskedLM(config), lora)
    ckptdeco.decorate(model)  # before get_peft_model would do as well
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    with policy:
        for batch in batches():
            loss = model(**batch).loss
            loss.backward()
            assert all(parameter.grad is not None for parameter in trained)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        peak_bytes = measure_step(lambda: model(**batches()[0]).loss, trained).peak_bytes
    return losses, peak_bytes


if __name__ == "__main__":
    runs = {
        policy: train(policy)
        for policy in (ckptdeco.policy(None), ckptdeco.policy(segment=1), ckptdeco.policy(segment=4, levels=2))
    }
    for policy, (losses, peak_bytes) in runs.items():
        print(f"{policy!r:<30} losses {losses[0]:.4f} to {losses[-1]:.4f}, {peak_bytes / 2**20:.1f} MiB of activations")
    (plain_losses, plain_bytes), *others = runs.values()
    for losses, peak_bytes in others:
        assert losses == plain_losses
        assert peak_bytes < plain_bytes / 3
