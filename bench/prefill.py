"""Could one prefill replace decoding a baseline again? Logits of both ways, on transformers.

    python -m bench prefill

When a candidate joins a run, its divergence step has to be found in baselines that are there. One
forward pass over prompt and response would be cheaper than decoding again, but a pick is known
only if its logits are. This compares the logits of both ways, bit for bit, and their picks.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.machine import write
from knockout.tokens.checkpoint import resolve_model

BATCH, STEPS, TEMPERATURE = 8, 48, 0.6


def main() -> None:
    """Measures and writes bench/results/prefill.json."""
    torch.set_num_threads(1)
    write("prefill", {"model": "smollm2-135m", "dtype": "float32", **compared()})


@torch.no_grad()
def compared() -> dict[str, Any]:
    """Counts over all rows (one for each response and step) of both ways' logits and picks."""
    path = resolve_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {12 + n} + {31 + n}? Explain each step."}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for n in range(BATCH)
    ]
    ids = torch.tensor(prompts)
    uniform = torch.rand(
        STEPS, BATCH, model.config.vocab_size, generator=torch.Generator().manual_seed(1)
    )
    noise = -torch.log(-torch.log(uniform.clamp_(1e-20, 1 - 1e-7)))
    rows, new, cache, whole = [], ids, None, ids
    for step in range(STEPS):
        out = model(new, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[:, -1])
        new = (rows[-1] / TEMPERATURE + noise[step]).argmax(-1)[:, None]
        whole = torch.cat([whole, new], dim=1)
    decoded = torch.stack(rows)
    first = ids.shape[1] - 1
    prefilled = torch.stack(
        [model(whole[n : n + 1]).logits[0, first:-1] for n in range(BATCH)], dim=1
    )
    best, best_prefilled = (
        (logits / TEMPERATURE + noise).topk(2, dim=-1).indices for logits in (decoded, prefilled)
    )
    return {
        "rows": STEPS * BATCH,
        "rows_bit_equal": int((decoded == prefilled).all(-1).sum()),
        "largest_logit_difference": float((decoded - prefilled).abs().max()),
        "picks_that_differ": int((best[..., 0] != best_prefilled[..., 0]).sum()),
        "second_choices_that_differ": int((best[..., 1] != best_prefilled[..., 1]).sum()),
    }
