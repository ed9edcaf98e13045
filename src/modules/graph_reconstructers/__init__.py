"""Stages 1 and 2: graphs of entities, the tokenizer, the masked-token predictor, and reconstruction by both."""
