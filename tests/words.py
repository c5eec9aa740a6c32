"""A tiny random model whose tokens are words, and an lm-eval task for it: a whole run in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["EOS", "N_WORDS", "WIDTH", "word_model", "word_task"]

WIDTH = 64
N_WORDS = 60
EOS = 0


def word_model(folder: Path) -> Path:
    """Saves a checkpoint: logits are 64 wide, ids 0 to 59 are "<end>" and "w1" to "w59"."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=WIDTH, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.4, eos_token_id=EOS, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<end>": EOS} | {f"w{i}": i for i in range(1, N_WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="w1"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)
    return folder


def word_task(folder: Path, n_problems: int) -> Path:
    """Writes a task `words`: right is an answer that holds the word of the problem."""
    rows = [
        {"question": f"w{1 + i % 50} w{1 + i * 7 % 50}", "word": f"w{i % 9}"}
        for i in range(n_problems)
    ]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.yaml").write_text(
        f"""\
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "words.jsonl"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{word}}}}"
generation_kwargs: {{until: ["w9 w9"]}}
filter_list:
  - name: found
    filter: [{{function: regex, regex_pattern: "(w[1-8])\\\\b"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
    )
    return folder
