"""Messages to token ids and back, from the model's own tokenizer and chat template."""
