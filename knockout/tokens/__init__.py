"""Vocabulary, lists of tokens and candidates."""
