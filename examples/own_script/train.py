"""A plain accelerate loop: a tiny llama, made from scratch, learns to count; it resumes from its last checkpoint."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import trainwright

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8, help="samples at once in each process")
parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save-every", type=int, default=20, help="optimizer steps between checkpoints")
parser.add_argument("--output-dir", type=Path, default=Path("output"))
parser.add_argument("--resume-from", type=Path, help="a checkpoint-N folder that this script has saved")
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
torch.manual_seed(0)
starts = torch.randint(0, 100, (480, 1))
samples = TensorDataset((starts + torch.arange(16)) % 100)  # 480 sequences of 16 numbers that count up
config = LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
loader = DataLoader(samples, batch_size=args.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

steps_per_epoch = -(-len(loader) // args.gradient_accumulation_steps)  # the last one may be smaller
step = 0
if args.resume_from:
    accelerator.load_state(args.resume_from)
    step = int(args.resume_from.name.removeprefix("checkpoint-"))

for epoch in range(step // steps_per_epoch, args.epochs):
    loader.set_epoch(epoch)
    skipped = (step % steps_per_epoch) * args.gradient_accumulation_steps
    for (tokens,) in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        mean = accelerator.reduce(loss.detach(), "mean")
        trainwright.report(step=step, loss=mean, epoch=step / steps_per_epoch, learning_rate=args.learning_rate)
        if step % args.save_every == 0:
            accelerator.save_state(args.output_dir / f"checkpoint-{step}", safe_serialization=True)

accelerator.wait_for_everyone()
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(args.output_dir / "final_model")
accelerator.end_training()
