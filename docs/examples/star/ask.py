"""Questions about a text file, over the processes of torchrun: python ask.py MODEL FILE QUESTION..."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sparseprefill.adapters.star import Star
from transformers import AutoModelForCausalLM, AutoTokenizer

MARK = "\x1f"  # between context and question, until the template is filled in
folder, file, *questions = sys.argv[1:]
text = Path(file).read_text(encoding="utf-8")

os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # see docs/star.md, Faults
if torch.cuda.is_available():
    device, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
else:
    device, dtype = torch.device("cpu"), torch.float32
    dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)


def split(question):
    """Token ids of the context, and of the question with the rest of the chat template."""
    if not tokenizer.chat_template:
        return tokenizer(text)["input_ids"], tokenizer(question, add_special_tokens=False)["input_ids"]
    message = [{"role": "user", "content": f"{text}{MARK}{question}"}]
    whole = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in whole.split(MARK))


star = Star(model, timeout=120.0)
context = star.encode([split("")[0]])  # phase 1
for question in questions:
    (answer,) = context.generate([split(question)[1]], max_new_tokens=64, do_sample=False)  # phase 2
    if dist.get_rank() == 0:
        print(f"{question}\n{tokenizer.decode(answer, skip_special_tokens=True).strip()}\n", flush=True)
    context.rewind()  # the next question does not see this one; without it, it does
dist.destroy_process_group()
