"""Trains a tiny Llama on CPU ranks with DeepSpeed under HF Trainer or accelerate; run as a script, one process per rank.

    python deepspeed_trainers.py OPTIONS.json

The file holds a list of runs. Options of a run: kind (`trainer`, `accelerate`), directory, stage, steps (until it ends), save
(after so many steps), resume (the directory of a checkpoint), losses (file for the losses of the first rank).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
TOKENS, LENGTH = 64, 8


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": options["stage"], "overlap_comm": False},
    }


def model_of():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, max_position_embeddings=32, tie_word_embeddings=True, **sizes))


def examples() -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(4)
    rows = torch.randint(0, TOKENS, (64, LENGTH))
    return [{"input_ids": row, "labels": row} for row in rows]


def tokenizer_of():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(TOKENS - 1)} | {"[PAD]": TOKENS - 1}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), pad_token="[PAD]")


def with_trainer(options: dict[str, Any]) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=options["directory"],
        max_steps=options["steps"],
        save_steps=options["save"],
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=0.01,
        warmup_steps=3,
        bf16=True,
        use_cpu=True,
        report_to=[],
        deepspeed=config_of(options),
        seed=5,
    )
    trainer = Trainer(model=model_of(), args=arguments, train_dataset=examples(), processing_class=tokenizer_of())
    trainer.train(resume_from_checkpoint=options.get("resume"))
    first = options["save"] if options.get("resume") else 0
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > first]


def with_accelerate(options: dict[str, Any]) -> list[float]:
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin
    from torch.utils.data import DataLoader

    AcceleratorState._reset_state()  # that of the run before
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(options)))
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    data = DataLoader(examples(), batch_size=2)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    accelerator.register_for_checkpointing(Counter())
    first = 0
    if options.get("resume"):
        accelerator.load_state(options["resume"])
        first = options["save"]
    losses = []
    for step, batch in enumerate(data):
        if step < first:
            continue
        if step == options["steps"]:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step + 1 == options["save"] and not options.get("resume"):
            accelerator.save_state(options["directory"])
    return losses


class Counter:
    """Something of the user's own that accelerate saves along."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 2}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"epoch": 2}


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        runs = json.load(file)
    import torch
    from deepspeed.accelerator import get_accelerator

    torch.set_num_threads(1)
    get_accelerator().is_fp16_supported = lambda: True
    linear = torch.nn.functional.linear
    for options in runs:
        torch.nn.functional.linear = linear  # an engine of ZeRO 3 leaves one of its own behind
        losses = (with_trainer if options["kind"] == "trainer" else with_accelerate)(options)
        if os.environ["RANK"] == "0":
            with open(options["losses"], "w", encoding="utf-8") as file:
                json.dump(losses, file)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of torch that are left over sometimes abort a process that ends by itself


if __name__ == "__main__":
    main()
