"""Small BPE tokenizers that were really trained."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café, 東京 and emoji 🙂", "x = [1, 2]  # version 3"] * 9


def trained(byte_level: bool) -> Tokenizer:
    """Of bytes, or of characters with spaces among them."""
    tokenizer = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"]))
    return tokenizer
